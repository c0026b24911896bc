"""Which keys of a job file are misspelt, and which are a CMS's own."""

from __future__ import annotations

import pytest

from briter_worker.client import compose
from briter_worker.job import Job, MalformedJobError, embargo_fault
from briter_worker.spelling import near_misses

NOW = 1_800_000_000.0
COME, PAST = "2099-01-01T00:00:00Z", "2020-01-01"


@pytest.mark.parametrize(
    "key",
    [
        *("scheduled_for", "scheduled-for", "scheduledfor", "ScheduledFor", "SCHEDULED_FOR", "scheduledFour"),
        *("scheduleFor", "sheduledFor", "scheduledFro", "scheduledFo", "schedulledFor", "xcheduledFor"),
    ],
)
@pytest.mark.parametrize("value", [COME, PAST, "next week", 1])
def test_a_misspelt_time_is_refused_with_the_right_spelling(key: str, value: object) -> None:
    assert embargo_fault({"slug": "a", key: value}, NOW) == f"{key}: the key is spelled scheduledFor"


@pytest.mark.parametrize(
    "key",
    ["publishAt", "publish_at", "scheduledAt", "scheduled-at", "publishDate", "publish_date", "publishOn"],
)
def test_a_synonym_is_refused_if_its_time_is_to_come(key: str) -> None:
    to_come: list[object] = [COME, NOW + 60, (NOW + 60) * 1000]
    others: list[object] = [PAST, NOW - 60, (NOW - 60) * 1000, "Friday", True, None, [COME]]
    for value in to_come:
        assert embargo_fault({key: value}, NOW).startswith(f"{key}: a time to come")
    for value in others:
        assert embargo_fault({key: value}, NOW) == ""


def test_a_job_that_is_scheduled_keeps_keys_of_its_own_for_the_time() -> None:
    assert embargo_fault({"scheduledFor": COME, "publishAt": COME, "scheduled_for": PAST}, NOW) == ""
    assert embargo_fault({"scheduledFor": None, "scheduled_for": COME}, NOW)


def test_a_misspelt_key_without_a_value_is_nothing() -> None:
    assert embargo_fault({"scheduled_for": None}, NOW) == ""


@pytest.mark.parametrize("key", ["uid", "_id", "path", "authors", "types", "scheduled", "published", "date"])
def test_a_key_of_the_cms_is_no_misspelling(key: str) -> None:
    assert near_misses([key]) == {}
    assert embargo_fault({key: COME}, NOW) == ""


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("created_at", "createdAt"),
        ("CreatedAt", "createdAt"),
        ("mesage", "message"),
        ("Slug", "slug"),
        ("autor", "author"),
        ("web-hook", "webhook"),
        ("ID", "id"),
        ("pahts", "paths"),
    ],
)
def test_other_near_misses_are_found(key: str, right: str) -> None:
    assert near_misses([key, right]) == {key: right}


@pytest.mark.parametrize("right", ["slug", "paths"])
@pytest.mark.parametrize("change", [str.upper, lambda key: f"{key[:-1]}", lambda key: f"_{key}"])
def test_a_misspelt_slug_or_paths_is_named_when_the_right_one_is_absent(right: str, change: object) -> None:
    assert callable(change)
    job = {"slug": "a", "paths": ["a"]}
    key = change(right)
    job[key] = job.pop(right)
    with pytest.raises(MalformedJobError, match=f"{right}: is missing.*; the file has {key}$"):
        Job.from_document(job, name="a", modified=NOW)


def test_a_producer_in_python_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="scheduled_for: the key is spelled scheduledFor"):
        compose("a", ["a.md"], scheduled_for=COME)
