"""Keys of a job file that are spelled otherwise than in the contract's table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SCHEDULED_FOR = "scheduledFor"
_PRODUCERS_KEYS = (
    *("id", "type", "slug", "paths", "message", "title", SCHEDULED_FOR, "createdAt", "author", "webhook"),
)
_PRODUCERS_OWN = frozenset({"uid", "_id", "path", "authors", "types"})
"""Keys that a CMS has for purposes of its own."""
_SYNONYMS = frozenset({"publishat", "scheduledat", "publishdate", "publishon"})
"""Names that producers give the time of a scheduled post, in plain spelling."""
_SHORTEST = 3
"""Two shorter keys that differ by one letter are different words."""


def near_misses(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys that look like a key of the table, and the right spelling of each."""
    spellings = ((key, _right_spelling(key)) for key in keys)
    return {key: right for key, right in spellings if right}


@lru_cache(maxsize=1000)
def _right_spelling(key: str) -> str:
    """Return the key of the table that this one looks like; empty if it is right, or none of the table's."""
    if key in _PRODUCERS_KEYS or key in _PRODUCERS_OWN:
        return ""
    return next((right for right in _PRODUCERS_KEYS if _is_near(_plain(key), right.lower())), "")


def key_meant(keys: Iterable[str], right: str) -> str:
    """Return the key that a producer may have written for the absent key `right`; empty if there is none."""
    return next((key for key in keys if _is_near(_plain(key), right.lower())), "")


def is_schedule_synonym(key: str) -> bool:
    """Return True for a usual name of the time of a scheduled post."""
    return _plain(key) in _SYNONYMS


def _plain(key: str) -> str:
    return key.replace("_", "").replace("-", "").lower()


def _is_near(key: str, right: str) -> bool:
    """Return True if the keys are equal, or if both are long enough and differ by one letter or one swap."""
    if key == right:
        return True
    if min(len(key), len(right)) < _SHORTEST:
        return False
    start = 0
    while key[start : start + 1] == right[start : start + 1]:
        start += 1
    key_end = key[start:]
    right_end = right[start:]
    has_other_letter = key_end[1:] == right_end[1:]
    has_letter_more = key_end[1:] == right_end
    has_letter_less = key_end == right_end[1:]
    swapped = right_end[1:2] + right_end[:1] + right_end[2:]
    return has_other_letter or has_letter_more or has_letter_less or key_end == swapped
