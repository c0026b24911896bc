"""What the API takes and gives, as OpenAPI tells it. Keys are those of the job file and of the log."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

_TEXT = r"^[^\x00-\x1f\x7f]+$"
_TIME: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Author(_Model):
    """Who wrote the post; git shows it as the commit's author."""

    name: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x1f\x7f<>]+$")]
    email: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00-\x20\x7f<>]+$")]


class NewJob(BaseModel):
    """A post to publish. Keys that are not named here are kept in the job as they are."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow")

    slug: Annotated[str, Field(min_length=1, max_length=1000, pattern=_TEXT, description="The post.")]
    paths: Annotated[
        list[str],
        Field(
            max_length=10_000, description="What to publish, relative to the repository, `/` between parts."
        ),
    ]
    message: Annotated[
        str | None, Field(max_length=100_000, pattern=r"^[^\x00]*$", description="Absent: `Publish <slug>`.")
    ] = None
    scheduled_for: Annotated[
        str | None, Field(description="Held until then. Absent: now.", json_schema_extra=_TIME)
    ] = None
    author: Author | None = None


class Job(BaseModel):
    """A job, with every key of its file, and where it stands."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")

    id: str
    slug: str
    state: Annotated[
        str,
        Field(description="pending, scheduled, retrying, claimed, failed; or how it ended, when it is gone."),
    ]
    type: str | None = None
    paths: list[str] | None = None
    message: str | None = None
    scheduled_for: str | None = None
    created_at: str | None = None
    status: str | None = None
    attempts: int | None = None
    next_attempt_at: str | None = None
    last_error: str | None = None
    failure: str | None = None


class Phase(_Model):
    """One phase of an attempt; `ended` null while it lasts."""

    name: str
    began: str | None
    ended: str | None


class Receipt(_Model):
    """What became of one attempt."""

    id: int
    time: str | None
    job_id: str
    slug: str
    title: str
    attempt: int
    outcome: str | None
    commit: str | None
    branch: str | None
    remote: str | None
    dry_run: bool
    duration_ms: int | None
    saved_at: str | None
    scheduled_for: str | None
    save_to_remote_ms: int | None
    href: str | None
    error: str | None
    failure: str | None
    retry_at: str | None
    rejected_paths: list[str]
    superseded_by: str | None
    stale: bool
    phase: str | None
    done: int
    total: int
    phases: list[Phase]


class JobInFull(Job):
    """A job with its progress, and the receipts of its attempts, newest first."""

    progress: Receipt | None = None
    receipts: list[Receipt] = []


class Queue(_Model):
    """What waits and what failed, as Briter's dashboard shows it; the totals count beyond the lists."""

    scheduled: list[Job]
    failed: list[Job]
    scheduled_total: int
    failed_total: int


class Jobs(_Model):
    """A page of jobs; `next` is the offset of the next one, null at the end."""

    items: list[Job]
    total: int
    next: int | None


class History(_Model):
    """A page of receipts, newest first; `next` is the `before` of the next one, null at the end."""

    items: list[Receipt]
    next: int | None


class Enqueued(_Model):
    """A job that is in the queue, durably."""

    id: str
    slug: str
    replayed: Annotated[bool, Field(description="The Idempotency-Key was known: the job was there before.")]
    warnings: Annotated[list[str], Field(description="Paths that will not be published, and why.")]


class Named(_Model):
    """A job that something was done to."""

    id: str
    slug: str


class Steered(_Model):
    """What a command was done to."""

    jobs: list[Named]


class Cancelled(Named):
    """`cancelled` false: it is in flight, and ends unless its push has begun."""

    cancelled: bool


class Cancellation(_Model):
    """What became of a cancellation."""

    jobs: list[Cancelled]


class PauseRequest(BaseModel):
    """How long nothing is to be published: with neither key, until somebody resumes."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")

    seconds: Annotated[int | None, Field(ge=1, le=366 * 86400, description="For so long.")] = None
    until: Annotated[
        str | None,
        Field(description="Until then; with `seconds`, the earlier holds.", json_schema_extra=_TIME),
    ] = None
    reason: Annotated[str, Field(max_length=500)] = ""


class Pause(_Model):
    """A pause that lasts."""

    since: str
    until: str | None
    reason: str | None


class Resumed(_Model):
    """Whether there was a pause to end."""

    resumed: bool


class Status(BaseModel):
    """How the site stands; the keys are those of `briter-worker status --json`."""

    model_config = ConfigDict(extra="allow")

    jobs: dict[str, int]
    worker: dict[str, Any] | None
    paused: Pause | None
    condition: str | None
    failure: str | None


class Finding(_Model):
    """One thing that the doctor looked at."""

    check: str
    state: Literal["ok", "warning", "error"]
    message: str
    fix: str | None


class Findings(_Model):
    """All that the doctor found; `ok` when nothing keeps posts from being published."""

    ok: bool
    findings: list[Finding]


class Csrf(_Model):
    """For the header X-CSRF-Token."""

    token: str


class Health(_Model):
    """Whether it is well."""

    status: str


class Problem(BaseModel):
    """RFC 9457: what went wrong, for programs and people."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
