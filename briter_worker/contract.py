"""The table of the job file, as a model: what breaks it, in words, and its JSON Schema.

Only what needs one of these loads it. A job with nothing unusual about it is read without (`jobfile`), as
loading pydantic takes longer than a whole run that finds nothing to do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic.alias_generators import to_camel

from briter_worker.job import GIT_SYNC, Job, Status, last_change, parse_time
from briter_worker.job import Author as JobAuthor
from briter_worker.strictjson import MalformedJobError, quoted

if TYPE_CHECKING:
    from briter_worker.strictjson import Document

_NO_CONTROL = r"^[^\x00-\x1f\x7f]+$"
Line = Annotated[str, Field(min_length=1, pattern=_NO_CONTROL)]
# Writers may have used the key for something of their own before it had a meaning: that breaks no job.
Address = Annotated[Any, WithJsonSchema({"type": "string", "format": "uri"})]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class Author(BaseModel):
    """Who wrote the post; git shows it as the commit's author."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    name: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f<>]+$")]
    email: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x20\x7f<>]+$")]


class JobFile(BaseModel):
    """A job file: one post to publish."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="allow",
        alias_generator=to_camel,
        title="Briter Worker job",
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
    webhook: Address = Field(
        None, description="An https address that is told when this job is published or dead-lettered."
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


def parse_strictly(value: Any, *, name: str, modified: float) -> Job:  # noqa: ANN401 - any JSON value
    """As `jobfile.parse_job`, of any value whatever."""
    if not isinstance(value, dict):
        raise MalformedJobError(f"a job is a JSON object, not {_KINDS.get(type(value), 'this')}")
    try:
        file = JobFile.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedJobError(f"{where}: {first['msg']}", value) from None
    created = _moment("createdAt", file.created_at, value)
    return Job(
        id=file.id or name.removesuffix(".json"),
        slug=file.slug,
        paths=tuple(file.paths),
        # Files written by hand leave times out, or null: absent.
        created_at=modified if created is None else created,
        type=file.type or GIT_SYNC,
        message=file.message,
        author=JobAuthor(file.author.name, file.author.email) if file.author else None,
        scheduled_for=_moment("scheduledFor", file.scheduled_for, value),
        status=file.status or Status.PENDING,
        attempts=file.attempts or 0,
        next_attempt_at=_moment("nextAttemptAt", file.next_attempt_at, value),
        last_error=file.last_error,
        failure=file.failure,
        webhook=file.webhook if type(file.webhook) is str else None,
        changed_at=math.inf if file.next_attempt_at is None else last_change(value, modified),
    )


def _moment(key: str, text: str | None, document: Document) -> float | None:
    """The time that a key holds."""
    try:
        return None if text is None else parse_time(text)
    except ValueError:
        reason = f"{key}: {quoted(text or '')} is no ISO-8601 time such as 2026-01-31T09:00:00Z"
        raise MalformedJobError(reason, document) from None


_KINDS: dict[type, str] = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "a truth value",
    type(None): "null",
}


def broken_keys(document: Document) -> set[str]:
    """The keys by which the document breaks the table, each in its first spelling."""
    try:
        JobFile.model_validate(document)
    except ValidationError as error:
        return {str(part["loc"][0]) for part in error.errors(include_url=False, include_input=False)}
    return set()


def job_schema() -> Document:
    """The JSON Schema of a job file, generated from the model."""
    schema = JobFile.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema
