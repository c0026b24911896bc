"""What each setting takes: how a text or a JSON value is read, and what is said of one that is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.adapters import names
from briter_worker.allowlist import Allowlist
from briter_worker.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MONTH_MS = 31 * 24 * 60 * 60 * 1000


class Kind(NamedTuple):
    """What values a setting takes. `parse` answers what it refuses with a ValueError: what is accepted."""

    parse: Callable[[Any, Mapping[str, Any]], object]
    """From the text of a variable or any JSON value, and the settings that stand above it."""
    schema: Mapping[str, Any]
    lenient: bool = False
    """Whether what is not accepted is passed over with a warning: no start fails for it."""


def absolute(path: Path, base: Path | None = None) -> Path:
    """The path from the root on; a relative one is below `base`."""
    path = ((base or Path()) / path).absolute()
    # A symlink may stand before `..`, so the file system decides what that means. Else as written.
    return Path(os.path.realpath(path)) if ".." in path.parts else path


_NAMEABLE = r"[^\0\ud800-\udc7f\udd00-\udfff]+"
"""What the system can open. The surrogates left stand for bytes that are no UTF-8."""


def _folder(value: object, above: Mapping[str, Any]) -> Path:
    if not isinstance(value, str | Path) or not re.fullmatch(_NAMEABLE, str(value)):
        raise ValueError("a folder, absolute or relative to BRITER_APP_ROOT")
    return absolute(Path(value), above.get("app_root"))


def _digits(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,16}", value) else value


def whole(least: int, most: int) -> Kind:
    """Whole numbers in this range."""

    def parse(value: object, _above: object) -> int:
        number = _digits(value)
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return number

    return Kind(parse, {"minimum": least, "maximum": most, "type": "integer"})


def fraction(most: float) -> Kind:
    """Numbers from 0 to this."""

    def parse(value: object, _above: object) -> float:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}", value):
            value = float(value)
        if type(value) not in {int, float} or not 0 <= value <= most:  # type: ignore[operator]
            raise ValueError(f"a number from 0 to {most}")
        return float(value)  # type: ignore[arg-type]

    return Kind(parse, {"minimum": 0, "maximum": most, "type": "number"})


_TRUTH = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}


def _truth(value: object, _above: object) -> bool:
    word = str(value).casefold()
    if word not in _TRUTH:
        raise ValueError("true, false, 1, 0, yes, no, on or off")
    return _TRUTH[word]


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [item.strip() for item in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [None]


def delays(value: object, _above: object) -> tuple[int, ...]:
    """Milliseconds, one after the other."""
    given = [_digits(item) for item in _items(value)]
    delays = tuple(item for item in given if type(item) is int and 0 <= item <= MONTH_MS)
    if not delays or len(delays) != len(given):
        raise ValueError(f"a list of whole numbers from 0 to {MONTH_MS}, with commas between them")
    return delays


def json_object(value: object, _above: object) -> Mapping[str, Any]:
    """A JSON object, or its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise ValueError("a JSON object")  # noqa: TRY004 - how every parser here refuses
    return value


def folder_list(value: object, _above: object) -> tuple[str, ...]:
    """Folders that may be allowed."""
    folders = [item for item in _items(value) if isinstance(item, str)]
    if len(folders) != len(_items(value)):
        raise ValueError("a list of folders, with commas between them")
    try:
        return Allowlist(folders).folders
    except UsageError as refused:
        raise ValueError(f"a list of folders below the repository's root; {refused}") from None


def adapter_name(value: object, _above: object) -> str:
    """One of the adapters."""
    if value not in names():
        raise ValueError(f"one of {', '.join(names())}")
    return str(value)


def _matching(pattern: str, accepted: str) -> Kind:
    def parse(value: object, _above: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(accepted)
        return value

    return Kind(parse, {"type": "string"})


def list_of(parse: Callable[[Any, Mapping[str, Any]], object], item: str) -> Kind:
    """What `parse` makes of a list, or of a text with commas."""
    return Kind(parse, {"anyOf": [{"items": {"type": item}, "type": "array"}, {"type": "string"}]})


# Narrower than `git check-ref-format`, which lets `+main` (a forced push) pass: these reach a refspec.
_NO_LINE = r"\x00-\x1f\x7f-\x9f\ud800-\udfff"
_INK = rf"[^\s{_NO_LINE}]"
_PART = r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*(?<!\.lock)"
_NAME = rf"(?!refs/|HEAD$)(?=.{{1,200}}$){_PART}(?:/{_PART})*"
_WEB_ADDRESS = r"://(?:[!-~]*@)?(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]{1,5})?(?:[/?][!\"$-+\--~]*)?"
SITE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""It names a folder of the cache, too."""
_TOPIC = "(?:published|dead-lettered|condition)"


def web_address(value: object, above: Mapping[str, Any], tail: str = "") -> str:
    """An address for webhooks."""
    scheme = "https?" if above["webhook_allow_private"] else "https"
    if not isinstance(value, str) or not re.fullmatch(f"(?:{scheme}{_WEB_ADDRESS}{tail})", value):
        raise ValueError(
            f"an address with {scheme.replace('?', ' or http')}, such as https://example.org/hook"
        )
    return value


def web_addresses(value: object, above: Mapping[str, Any]) -> tuple[str, ...]:
    """Such addresses, each with what it is told of."""
    try:
        return tuple(web_address(item, above, rf"(?:#{_TOPIC}(?:\+{_TOPIC})*)?") for item in _items(value))
    except ValueError as refused:
        raise ValueError(
            f"a list, with commas between: {refused}; behind a # may stand what it is told of: "
            "published, dead-lettered, condition, with + between them"
        ) from None


def one_of(*words: str) -> Kind:
    """One of these words."""

    def parse(value: object, _above: object) -> str:
        if value not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return str(value)

    return Kind(parse, {"enum": list(words), "type": "string"})


_ACCEPTED_NAME = "letters, digits, and between them . _ - and /"

FOLDER = Kind(_folder, {"format": "path", "type": "string"})
TRUE_OR_FALSE = Kind(_truth, {"type": "boolean"})
BRANCH = _matching(_NAME, f"a branch's short name, such as main: {_ACCEPTED_NAME}")
REMOTE = _matching(_NAME, f"the name of a configured remote, such as origin: {_ACCEPTED_NAME}")
PERSON = _matching(rf"(?=.*\w)[^{_NO_LINE}<>]+", "one line with a letter, without < and >")
EMAIL = _matching(rf"(?!.*[<>]){_INK}+", "an address without spaces, < and >")
HREF = _matching(
    rf"https?://(?![/?#{{]){_INK}*\{{slug\}}{_INK}*|",
    "an http(s) address with {slug} in it, such as https://example.org/notes/{slug}",
)
COMMIT_HREF = _matching(
    rf"https?://(?![/?#{{]){_INK}*\{{commit\}}{_INK}*|",
    "an http(s) address with {commit} in it, such as https://example.org/commit/{commit}",
)
HOST = _matching(r"[A-Za-z0-9.:%_-]{1,255}", "an address or a host's name, such as 127.0.0.1 or ::1")
SIGNING_SECRET = _matching(
    r"whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?|",
    "whsec_ and 24 to 64 bytes as base64: echo whsec_$(openssl rand -base64 32) makes one",
)
SITE = _matching(
    rf"{SITE_NAME}|", "a site's name: up to 100 letters, digits, and after the first also . _ and -"
)
DATABASE = _matching(
    r"postgres(?:ql)?://[!-~]+|", "an address of Postgres, such as postgresql://db.example.org/briter"
)
TOKEN = _matching(r"[!-~]{16,200}|", "at least 16 characters, without spaces: openssl rand -hex 32 makes one")
