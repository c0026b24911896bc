"""Reading a job file's document as a job.

Nearly every file is plain: it has the types that the contract's table names, in today's spellings. Such a
one is read here, at once. Whatever else it may be is for the model in `contract` to judge, which is the
table; a test has both read the same documents.
"""

from __future__ import annotations

import math
import re
from typing import Any

from briter_worker.job import GIT_SYNC, OLD_SPELLINGS, Author, Job, Status, last_change, parse_time

_line = re.compile(r"[^\x00-\x1f\x7f]+").fullmatch
_name = re.compile(r"[^\x00-\x1f\x7f<>]+").fullmatch
_email = re.compile(r"[^\x00-\x20\x7f<>]+").fullmatch
_MAX_ATTEMPTS = 2**53
_STATUS: dict[str | None, Status] = {None: Status.PENDING, "pending": Status.PENDING, "failed": Status.FAILED}


def parse_job(value: Any, *, name: str, modified: float) -> Job:  # noqa: ANN401 - any JSON value
    """The job in a file called `name`, last modified at `modified`; `value` as `read_document` read it.

    Raises MalformedJobError when it breaks the contract's table.
    """
    job = plain_job(value, name=name, modified=modified)
    if job is None:
        from briter_worker.contract import parse_strictly  # noqa: PLC0415 - it says why

        job = parse_strictly(value, name=name, modified=modified)
    return job


def plain_job(value: Any, *, name: str, modified: float) -> Job | None:  # noqa: ANN401 - as above
    """The job, when there is nothing unusual about it; None decides nothing."""
    if type(value) is not dict or not OLD_SPELLINGS.keys().isdisjoint(value):
        return None
    get = value.get
    slug, paths, attempts, status = get("slug"), get("paths"), get("attempts"), get("status")
    job_id, kind, author = get("id"), get("type"), get("author")
    texts = (get("message"), get("lastError"), get("failure"), get("updatedAt"))
    if not (
        type(slug) is str
        and _line(slug)
        and type(paths) is list
        and all(type(path) is str for path in paths)
        and (job_id is None or (type(job_id) is str and _line(job_id)))
        and (kind is None or (type(kind) is str and _line(kind)))
        and (attempts is None or (type(attempts) is int and 0 <= attempts < _MAX_ATTEMPTS))
        and (status is None or type(status) is str)
        and status in _STATUS
        and all(text is None or type(text) is str for text in texts)
        and (author is None or _is_author(author))
    ):
        return None
    message, last_error, failure, _ = texts
    if message and "\0" in message:
        return None
    created, scheduled, retry = get("createdAt"), get("scheduledFor"), get("nextAttemptAt")
    try:
        return Job(
            id=job_id or name.removesuffix(".json"),
            slug=slug,
            paths=tuple(paths),
            # Files written by hand leave times out, or null: absent.
            created_at=modified if created is None else parse_time(created),
            type=kind or GIT_SYNC,
            message=message,
            author=None if author is None else Author(author["name"], author["email"]),
            scheduled_for=None if scheduled is None else parse_time(scheduled),
            status=_STATUS[status],
            attempts=attempts or 0,
            next_attempt_at=None if retry is None else parse_time(retry),
            last_error=last_error,
            failure=failure,
            webhook=get("webhook") if type(get("webhook")) is str else None,
            changed_at=math.inf if retry is None else last_change(value, modified),
        )
    except (ValueError, AttributeError):  # no time, or no text
        return None


def _is_author(value: object) -> bool:
    if type(value) is not dict:
        return False
    name, email = value.get("name"), value.get("email")
    return type(name) is str and type(email) is str and bool(_name(name) and _email(email))
