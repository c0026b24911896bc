"""The job: one post to publish. Its file is the contract with everything outside the worker.

`JobFile` is the table of the contract, and the JSON Schema is generated from it. `Job` is what the worker
works with. Whatever keys a writer put into the file survive every rewrite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - pydantic and dataclasses need them at run time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from briter_worker.strictjson import Document, MalformedJobError

GIT_SYNC = "git-sync"


class Status(StrEnum):
    """What the file says. Where the job is (waiting, in flight, gone) is the queue's knowledge."""

    PENDING = "pending"
    FAILED = "failed"


class State(StrEnum):
    """What a person asks: where does this job stand?"""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    RETRYING = "retrying"
    CLAIMED = "claimed"
    FAILED = "failed"


_NO_CONTROL = r"^[^\x00-\x1f\x7f]+$"
Line = Annotated[str, Field(min_length=1, pattern=_NO_CONTROL)]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class Author(BaseModel):
    """Who wrote the post; git shows it as the commit's author."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", defer_build=True)

    name: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f<>]+$")]
    email: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x20\x7f<>]+$")]


class JobFile(BaseModel):
    """A job file: one post to publish."""

    # Built when the first job is read: a worker that finds none starts without it.
    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="allow",
        alias_generator=to_camel,
        title="Briter Worker job",
        defer_build=True,
    )

    id: Line | None = Field(None, description="Unique. Absent: the file's name without `.json`.")
    type: Line | None = Field(GIT_SYNC, description="The kind of job; others than `git-sync` need a plugin.")
    slug: Line = Field(description="The post. At most one pending job per slug.")
    paths: list[str] = Field(
        description="What to publish, relative to the worktree, `/` between parts: a file, a deleted file, "
        "or a folder (all under it, deletions too)."
    )
    message: Annotated[str, Field(pattern=r"^[^\x00]*$")] | None = Field(
        None,
        validation_alias=AliasChoices("message", "commitMessage"),
        description="The commit message, used exactly as it is. Absent: `Publish <slug>`.",
    )
    scheduled_for: Timestamp | None = Field(
        None,
        description="Held until then. Absent: now. A date alone is midnight UTC; without an offset: UTC.",
    )
    created_at: Timestamp | None = Field(
        None, description="Orders two jobs of one slug. Absent: the file's modification time."
    )
    author: Author | None = Field(
        None, description="The commit's author; the committer is always the worker's own identity."
    )
    status: Status | None = Field(Status.PENDING, strict=False, description="Written by the worker.")
    attempts: Annotated[int, Field(ge=0, lt=2**53)] | None = Field(
        0,
        validation_alias=AliasChoices("attempts", "attempt"),
        description="Attempts made so far. Written by the worker.",
    )
    next_attempt_at: Timestamp | None = Field(
        None, description="A retry waits until then. Written by the worker."
    )
    last_error: str | None = Field(
        None, description="One line for a person: what happened, and what to do. Written by the worker."
    )
    failure: str | None = Field(
        None, description="Why it failed, from a closed set of words. Written by the worker."
    )
    updated_at: Timestamp | None = Field(None, description="The last change of state. Written by the worker.")


@dataclass(frozen=True, slots=True)
class Job:
    """One post to publish. Times are seconds since 1970."""

    id: str
    slug: str
    paths: tuple[str, ...]
    created_at: float
    type: str = GIT_SYNC
    message: str | None = None
    author: Author | None = None
    scheduled_for: float | None = None
    status: Status = Status.PENDING
    attempts: int = 0
    next_attempt_at: float | None = None
    last_error: str | None = None
    failure: str | None = None

    @property
    def commit_message(self) -> str:
        """The message, to the letter, or the default one."""
        return f"Publish {self.slug}" if self.message is None else self.message

    def due_at(self, now: float, longest_delay: float) -> float:
        """When it may be published. A retry further away than any backoff is due: a clock was set back."""
        retry = self.next_attempt_at or 0.0
        if retry > now + longest_delay:
            retry = 0.0
        return max(self.scheduled_for or 0.0, retry)

    def state(self, now: float) -> State:
        """Where it stands while it waits in the queue."""
        if self.status is Status.FAILED:
            return State.FAILED
        if (self.scheduled_for or 0.0) > now:
            return State.SCHEDULED
        if self.attempts and (self.next_attempt_at or 0.0) > now:
            return State.RETRYING
        return State.PENDING


def parse_time(text: str) -> float:
    """Seconds since 1970 of an ISO-8601 text; a date alone is midnight UTC, no offset means UTC.

    Raises ValueError with the text and what is accepted.
    """
    try:
        moment = datetime.fromisoformat(text.strip().upper())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no ISO-8601 time such as 2026-01-31T09:00:00Z") from None


def format_time(seconds: float) -> str:
    """ISO-8601 in UTC with milliseconds, as JavaScript writes it. Beyond the calendar: its last moment."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_job(value: Any, *, name: str, modified: float) -> Job:  # noqa: ANN401 - any JSON value
    """The job in a file called `name`, last modified at `modified`.

    Raises MalformedJobError when it breaks the contract's table.
    """
    if not isinstance(value, dict):
        raise MalformedJobError(f"a job is a JSON object, not {_KINDS.get(type(value), 'this')}")
    try:
        file = JobFile.model_validate(value)
        # Files written by hand leave times out, or null: absent.
        created = modified if file.created_at is None else parse_time(file.created_at)
        scheduled = None if file.scheduled_for is None else parse_time(file.scheduled_for)
        retry = None if file.next_attempt_at is None else parse_time(file.next_attempt_at)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedJobError(f"{where}: {first['msg']}", value) from None
    except ValueError as error:
        raise MalformedJobError(str(error), value) from None
    return Job(
        id=file.id or name.removesuffix(".json"),
        slug=file.slug,
        paths=tuple(file.paths),
        created_at=created,
        type=file.type or GIT_SYNC,
        message=file.message,
        author=file.author,
        scheduled_for=scheduled,
        status=file.status or Status.PENDING,
        attempts=file.attempts or 0,
        next_attempt_at=retry,
        last_error=file.last_error,
        failure=file.failure,
    )


_KINDS: dict[type, str] = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}
_OLD_SPELLINGS = {"commitMessage": "message", "attempt": "attempts"}


def rewritten(
    document: Mapping[str, Any],
    *,
    status: Status,
    attempts: int,
    now: float,
    next_attempt_at: float | None = None,
    last_error: str | None = None,
    failure: str | None = None,
    paths: Sequence[str] | None = None,
) -> Document:
    """The document with the worker's keys set anew, and every other key as its writer left it."""
    changed: Document = {}
    for key, value in document.items():
        current = _OLD_SPELLINGS.get(key, key)
        if current == key or current not in document:
            changed[current] = value
    if paths is not None:
        changed["paths"] = list(paths)
    changed["status"] = status.value
    changed["attempts"] = attempts
    changed["nextAttemptAt"] = None if next_attempt_at is None else format_time(next_attempt_at)
    changed["lastError"] = last_error
    changed["failure"] = failure
    changed["updatedAt"] = format_time(now)
    return changed


def joined(newer: Sequence[str], *older: Sequence[str]) -> tuple[str, ...]:
    """The newer job's paths, then those that only the older ones declared."""
    return tuple(dict.fromkeys([*newer, *(path for paths in older for path in paths)]))


def job_schema() -> Document:
    """The JSON Schema of a job file, generated from the model."""
    schema = JobFile.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
