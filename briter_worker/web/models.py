"""Models of the API: they validate requests and describe answers. Keys are those of the job file."""

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from briter_worker.job import Author

_TEXT = r"^[^\x00-\x1f\x7f]+$"
_TIME: dict[str, Any] = {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]}
T = TypeVar("T")


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class _OpenModel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")


# Requests


class NewJob(BaseModel):
    """A post to publish. Other keys are kept in the job as they are."""

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
        str | None, Field(description="Not published before. Absent: now.", json_schema_extra=_TIME)
    ] = None
    author: Author | None = None


class NewUpload(NewJob):
    """A post to publish, with its files. Other keys are kept in the job as they are."""

    paths: Annotated[
        list[str],
        Field(max_length=10_000, description="If present, the paths of `contents`.", default_factory=list),
    ]
    contents: Annotated[
        dict[str, str | None],
        Field(
            min_length=1,
            max_length=10_000,
            description="The files to publish: for each path, relative to the repository, the content in "
            "base64, or null to delete the file.",
        ),
    ]


class PauseRequest(BaseModel):
    """The length of a pause: with neither `seconds` nor `until`, the pause lasts until `resume`."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid")

    seconds: Annotated[int | None, Field(ge=1, le=366 * 86400, description="Length of the pause.")] = None
    until: Annotated[
        str | None,
        Field(
            description="End of the pause; with `seconds`, the earlier end counts.", json_schema_extra=_TIME
        ),
    ] = None
    reason: Annotated[str, Field(max_length=500)] = ""


# Answers


class Job(_OpenModel):
    """A job with the keys of its file (`briter-worker schema job` describes them), and its state."""

    id: str
    slug: str
    state: Annotated[
        str,
        Field(
            description="pending, scheduled, retrying, tried, claimed, failed; the outcome once it is gone."
        ),
    ]
    last_error: str | None = None
    failure: str | None = None
    fix: str | None = None


class Receipt(_OpenModel):
    """The outcome of one attempt; `outcome` is null while the attempt runs."""

    id: int
    time: str | None
    job_id: str
    slug: str
    attempt: int
    outcome: str | None
    commit: str | None
    href: str | None
    error: str | None
    failure: str | None
    fix: str | None
    retry_at: str | None
    rejected_paths: list[str]


class JobInFull(Job):
    """A job with its progress, and the receipts of its attempts, newest first."""

    progress: Receipt | None = None
    receipts: list[Receipt] = []


class Queue(_Model):
    """Scheduled and failed jobs; the totals also count the jobs beyond `limit`."""

    scheduled: list[Job]
    failed: list[Job]
    scheduled_total: int
    failed_total: int


class History(_Model):
    """A page of receipts, newest first; `next` is the `before` of the next page, null at the end."""

    items: list[Receipt]
    next: int | None


class Page(_Model, Generic[T]):
    """A page of a list; `next` is the `offset` of the next page, null at the end."""

    items: list[T]
    total: int
    next: int | None


class Enqueued(_Model):
    """A job that was stored durably."""

    id: str
    slug: str
    replayed: Annotated[bool, Field(description="The Idempotency-Key was used before, for this job.")]
    warnings: Annotated[list[str], Field(description="Paths that will not be published, and why.")]


class ChangedJob(_OpenModel):
    """A job that was changed. `cancelled` false: it is in flight, and ends unless its push has begun."""

    id: str
    slug: str


class ChangedJobs(_Model):
    """The jobs that were changed."""

    jobs: list[ChangedJob]


class Pause(_Model):
    """An active pause."""

    since: str
    until: str | None
    reason: str | None


class Status(_OpenModel):
    """The status of the site, with the keys of `briter-worker status --json`."""

    jobs: dict[str, int]
    worker: dict[str, Any] | None
    paused: Pause | None
    condition: Annotated[str | None, Field(description="Why no post of the site can be published.")]
    failure: str | None
    fix: str | None


class Finding(_Model):
    """One result of the checks."""

    check: str
    state: Literal["ok", "warning", "error"]
    message: str
    fix: str | None


class Findings(_Model):
    """All results of the checks; `ok` is true if posts can be published."""

    ok: bool
    findings: list[Finding]


class SiteSummary(_OpenModel):
    """One site of a cluster."""

    name: str
    remote: str
    branch: str
    jobs: dict[str, int]
    oldest_waiting_seconds: float | None
    paused: Pause | None
    condition: str | None
    failure: str | None
    fix: str | None


class ClusterStatus(_OpenModel):
    """All sites together; `hosts` is the number of nodes."""

    sites: int
    hosts: int
    jobs: dict[str, int]


class Problem(_OpenModel):
    """A problem document (RFC 9457); `fix` is present if there is one."""

    type: str
    title: str
    status: int
    detail: str
