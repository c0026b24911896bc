"""The job: one post to publish. Its file is the contract with every program outside the worker.

`Job` is the table of CONTRACT.md as a pydantic model. The document, as the producer wrote it, is kept beside
it, so that unknown keys survive every rewrite.
"""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from briter_worker.accepted import refusal_text
from briter_worker.errors import FailureCode, one_line
from briter_worker.spelling import SCHEDULED_FOR, is_schedule_synonym, key_meant, near_misses

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic_core import ErrorDetails

    from briter_worker.errors import Failure

GIT_SYNC = "git-sync"
SUFFIX = ".json"
MAX_FILE_BYTES = 1 << 20
MAX_REWRITTEN_BYTES = 16 << 20
"""The worker adds its own keys and the paths of superseded saves."""
MAX_CO_AUTHORS = 20
LATEST = 250_000_000_000.0
"""A moment in the year 9892: in every time zone, the calendar has it."""
_MAX_DEPTH = 64
_MILLISECONDS = 1e11
"""A number of seconds since 1970 is smaller, one of milliseconds greater."""
_UNITS = ((60, 1, "s"), (2 * 3600, 60, "min"), (2 * 86400, 3600, "h"))

WORKERS_KEYS = frozenset(
    (
        *("status", "attempts", "attempt", "nextAttemptAt", "lastError", "failure", "fix", "updatedAt"),
        *("dryRunAt", "firstSavedAt", "quietUntil", "coAuthors", "madeBy", "programPaths"),
        *("missingAttempts", "publishedCommit"),
    )
)
"""The keys of a job file that only the worker writes."""

Document = dict[str, Any]
"""A job file as its producer wrote it."""


class UnreadableJobError(Exception):
    """The bytes are not a JSON document (yet): the producer may still be writing them."""

    def __init__(self, reason: str, document: Document | None = None) -> None:
        self.reason = one_line(reason)
        super().__init__(self.reason)
        self.document = document or {}
        """The keys that are not broken."""


class MalformedJobError(UnreadableJobError):
    """The bytes are JSON, but not a job."""


class Status(StrEnum):
    """Value of the job file's `status`."""

    PENDING = "pending"
    FAILED = "failed"


class Program(StrEnum):
    """A program of ours that makes jobs: value of the job file's `madeBy`."""

    WATCH = "watch"
    UNDO = "undo"


class State(StrEnum):
    """State of a job, as `list` and the dashboard show it."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    RETRYING = "retrying"
    QUIET = "quiet"
    TRIED = "tried"
    CLAIMED = "claimed"
    FAILED = "failed"


def parse_time(text: str) -> float:
    """Return seconds since 1970 of an ISO-8601 text; a date alone is midnight UTC, no offset means UTC.

    Raises ValueError with the text and what is accepted.
    """
    try:
        moment = datetime.fromisoformat(text.strip().upper())
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{one_line(text, 80)!r} is no ISO-8601 time such as 2026-01-31T09:00:00Z") from None


def ago(seconds: float) -> str:
    """Return a distance in time: `in 3 h` for the future, `3 h ago` for the past, `now` within a second."""
    text = span(abs(seconds))
    if abs(seconds) < 1:
        return "now"
    return f"in {text}" if seconds > 0 else f"{text} ago"


def span(seconds: float) -> str:
    """Return a duration in its largest unit."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, size, unit in _UNITS:
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def count(number: int, noun: str) -> str:
    """Return `1 post` or `3 posts`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_time(seconds: float) -> str:
    """Return ISO-8601 in UTC with milliseconds, as JavaScript writes it; clamp to the calendar's end."""
    try:
        moment = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        moment = datetime.max.replace(tzinfo=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(value: object, info: ValidationInfo) -> object:
    if isinstance(value, str):
        return parse_time(value)
    if info.context == "file" and value is not None:
        raise ValueError("expected an ISO-8601 time such as 2026-01-31T09:00:00Z")
    return value


# Producers may have used these keys for something of their own before they had a meaning.


def _text_or_none(value: object) -> object:
    return value if isinstance(value, str) else None


def _program(value: object) -> object:
    # Producers may use the key for something of their own.
    return next((each for each in Program if each == value), None)


def _texts(value: object) -> object:
    is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return value if is_list else None


def _count(value: object) -> object:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


_Line = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    PlainSerializer(format_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class Author(BaseModel):
    """Author of the post, shown by git as the commit's author."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f<>]+$")]
    email: Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x20\x7f<>]+$")]


def _workers(default: object, description: str, **more: Any) -> Any:  # noqa: ANN401 - as Field
    return Field(default, description=f"{description} Written by the worker.", **more)


class Job(BaseModel):
    """A job file: one post to publish."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        populate_by_name=True,
        alias_generator=to_camel,
        title="Briter Worker job",
        defer_build=True,  # a start that finds no job needs no validator
    )

    id: _Line = Field("", description="Unique. Absent: the file's name without `.json`.")
    type: _Line = Field(GIT_SYNC, description="The kind of job; another type than `git-sync` needs a plugin.")
    slug: _Line = Field(description="The post; at most one job per slug is pending.")
    paths: tuple[str, ...] = Field(
        strict=False,
        description="What to publish, relative to the work tree, `/` between parts: a file, a deleted file, "
        "or a folder (all under it, deletions too).",
    )
    message: Annotated[str, Field(pattern=r"^[^\x00]*$")] | None = Field(
        None,
        validation_alias=AliasChoices("message", "commitMessage"),
        description="The commit message, used exactly as it is. Absent or empty: `Publish <slug>`.",
    )
    scheduled_for: _Seconds | None = Field(
        None,
        description="Not published before. Absent: now. A date alone is midnight UTC; no offset means UTC.",
    )
    created_at: _Seconds = Field(
        0.0, description="Orders two jobs of one slug. Absent: the file's modification time."
    )
    author: Author | None = Field(
        None, description="The commit's author; the committer is always the worker's own identity."
    )
    webhook: Annotated[
        str | None, BeforeValidator(_text_or_none), WithJsonSchema({"type": "string", "format": "uri"})
    ] = Field(None, description="An https address, notified when this job is published or dead-lettered.")
    status: Status = _workers(Status.PENDING, "`pending` or `failed`.", strict=False)
    attempts: Annotated[int, Field(ge=0, lt=2**53)] = _workers(
        0, "Attempts made so far.", validation_alias=AliasChoices("attempts", "attempt")
    )
    next_attempt_at: _Seconds | None = _workers(None, "A retry waits until then.")
    last_error: str | None = _workers(None, "One line for a person: what happened.")
    failure: str | None = _workers(None, "The failure code, from a closed set.")
    fix: str | None = _workers(None, "A command or an action that helps.")
    updated_at: _Seconds = _workers(math.inf, "The last change of state.")
    dry_run_at: _Seconds | None = _workers(None, "When a dry run last built the commit.")
    first_saved_at: _Seconds | None = _workers(None, "The first unpublished save of the post.")
    quiet_until: _Seconds | None = _workers(None, "The end of the post's quiet time.")
    missing_attempts: Annotated[int, BeforeValidator(_count)] = _workers(
        0, "Attempts at which declared paths were missing."
    )
    published_commit: Annotated[str | None, BeforeValidator(_text_or_none)] = _workers(
        None, "The commit with the paths that are published already; `paths` has the others."
    )
    co_authors: Annotated[tuple[Author, ...], Field(max_length=MAX_CO_AUTHORS)] = _workers(
        (), "The authors of superseded saves.", strict=False
    )
    made_by: Annotated[
        Program | None,
        BeforeValidator(_program),
        WithJsonSchema({"type": "string", "enum": [each.value for each in Program]}),
    ] = _workers(
        None,
        "`watch` or `undo`, if one of them made the job. Such a job supersedes no scheduled job of a "
        "producer, and publishes nothing that a scheduled job declares.",
    )
    program_paths: Annotated[tuple[str, ...] | None, BeforeValidator(_texts)] = _workers(
        None,
        "The paths that no producer declared, if a save of `watch` or `undo` was joined with a producer's.",
        strict=False,
    )

    @classmethod
    def from_document(cls, document: Any, *, name: str, modified: float) -> Job:  # noqa: ANN401 - any JSON value
        """Return the job in a file called `name`, last modified at `modified`.

        Raises MalformedJobError when the document breaks the contract's table.
        """
        if not isinstance(document, dict):
            raise MalformedJobError("a job is a JSON object")
        values = {key: value for key, value in document.items() if value is not None}
        values.setdefault("id", name.removesuffix(SUFFIX))
        values.setdefault("createdAt", format_time(modified))
        values.setdefault("updatedAt", format_time(modified))
        try:
            return cls.model_validate(values, context="file", by_name=False)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            reason = _refusal(found[0]) + _key_meant(found[0], document)
            broken = {str(each["loc"][0]) for each in found}
            readable = {key: value for key, value in document.items() if key not in broken}
            raise MalformedJobError(reason, readable | {"paths": named_paths(document)}) from None

    @property
    def paths_of_programs(self) -> frozenset[str]:
        """Return the declared paths that no producer declared."""
        if self.program_paths is not None:
            return frozenset(self.program_paths)
        return frozenset() if self.made_by is None else frozenset(self.paths)

    @property
    def commit_message(self) -> str:
        """Return the message exactly as declared, or the default one."""
        return self.message or f"Publish {self.slug}"

    @property
    def full_message(self) -> str:
        """Return the message with a trailer for each co-author."""
        message = self.commit_message
        trailers = [f"Co-authored-by: {person.name} <{person.email}>" for person in self.co_authors]
        return "\n".join([message.rstrip("\n"), "", *trailers, ""]) if trailers else message

    def due_at(self, now: float, longest_delay: float) -> float:
        """Return when the job may be published.

        A retry further away than the longest delay was written by a clock that ran ahead; the wait is then
        bounded by the longest delay after the last change of state.
        """
        retry = self.next_attempt_at or 0.0
        if retry > now + longest_delay:
            retry = 0.0 if self.updated_at > now else self.updated_at + longest_delay
        return max(self.scheduled_for or 0.0, retry, self.quiet_until or 0.0)

    def state(self, now: float) -> State:
        """Return the state of the job while it is in the queue and not claimed."""
        if self.status is Status.FAILED:
            return State.FAILED
        if (self.scheduled_for or 0.0) > now:
            return State.SCHEDULED
        if self.dry_run_at is not None:
            return State.TRIED
        if (self.next_attempt_at or 0.0) > now:
            return State.RETRYING
        return State.QUIET if (self.quiet_until or 0.0) > now else State.PENDING


_LINE = "must be one line of text, and not empty"
_PERSON = 'needs a name and an e-mail address: {"name": "Ada Author", "email": "ada@example.org"}'
_EXPECTED = {
    "id": _LINE,
    "type": _LINE,
    "slug": _LINE,
    "paths": 'must be a list of texts, such as ["content/posts/hello.md"]',
    "message": "must be a text",
    "author": _PERSON,
    "coAuthors": "must be a list of authors, each with a name and an email",
    "name": "must be one line of text, without < and >",
    "email": "must be an address without spaces, < and >",
    "status": "must be 'pending' or 'failed'",
    "attempts": "must be a whole number",
    **dict.fromkeys(("lastError", "failure", "fix"), "must be a text"),
}
"""By key of the job file, or of an author. Times and addresses say it in errors of their own."""


def _refusal(error: ErrorDetails) -> str:
    """Return which key of a job file is refused, and what the contract expects there."""
    where = ".".join(map(str, error["loc"]))
    owner = ".".join(map(str, error["loc"][:-1]))
    names = [part for part in error["loc"] if isinstance(part, str)]
    expected = _EXPECTED.get(names[-1]) or refusal_text(error)
    match error["type"]:
        case "missing" if names[-1] in {"name", "email"}:
            return f"{owner}: {_PERSON}"
        case "missing":
            return f"{where}: is missing; it {expected}"
        case "value_error":
            return f"{where}: {refusal_text(error)}"
        case _ if isinstance(error["loc"][-1], int):
            return f"{where}: {refusal_text(error)}"
        case _:
            return f"{where}: {expected}"


def _key_meant(error: ErrorDetails, document: Document) -> str:
    """Return which key the producer may have meant for one that is missing."""
    right = str(error["loc"][0])
    key = key_meant(document, right) if error["type"] == "missing" else ""
    return f"; the file has {key}" if key else ""


def embargo_fault(document: Document, now: float) -> str:
    """Return why the time that a producer has set would be overlooked; empty if it is not.

    A job with a misspelt `scheduledFor` would be published at once, and so would one with a usual synonym of
    the key. A job that has the right key, too, is scheduled as that says.
    """
    if document.get(SCHEDULED_FOR) is not None:
        return ""
    given = {key: value for key, value in document.items() if value is not None}
    for key, right in near_misses(given).items():
        if right == SCHEDULED_FOR:
            return f"{key}: the key is spelled {SCHEDULED_FOR}"
    for key, value in given.items():
        if is_schedule_synonym(key) and _moment(value) > now:
            return f"{key}: a time to come, and the key for it is {SCHEDULED_FOR}"
    return ""


def _moment(value: object) -> float:
    """Return the time of a value in seconds since 1970; of what is no time, the beginning of time."""
    if isinstance(value, str):
        try:
            return parse_time(value)
        except ValueError:
            return -math.inf
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value / 1000 if value > _MILLISECONDS else value
    return -math.inf


class QuietTime(NamedTuple):
    """A post's wait after a save, and its longest wait after the first unpublished save, in seconds."""

    after_save: float = 0.0
    longest: float = 60.0

    def apply(self, job: Job, saved_at: float, *earlier: Job) -> Job:
        """Return the job with its first unpublished save and the end of its quiet time.

        `earlier`: unpublished saves that the job stands for, too. A retry has no quiet time.
        """
        if not self.after_save or job.attempts:
            return job if job.quiet_until is None else job.model_copy(update={"quiet_until": None})
        first = min(saved_at, job.first_saved_at or saved_at)
        first = min([first, *(each.first_saved_at or each.created_at for each in earlier)])
        until = min(saved_at + self.after_save, first + self.longest, job.quiet_until or math.inf)
        return job.model_copy(update={"first_saved_at": first, "quiet_until": until})


NO_QUIET_TIME = QuietTime()


def job_schema() -> Document:
    """Return the JSON Schema of a job file, generated from the model."""
    schema = Job.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return schema


def join_paths(newer: Iterable[str], *older: Iterable[str]) -> tuple[str, ...]:
    """Return the newer job's paths, then those that only the superseded jobs declared."""
    return tuple(dict.fromkeys([*newer, *(path for paths in older for path in paths)]))


def winner_index(newest_first: Sequence[Job]) -> int:
    """Return which of the saves of one post stands for all of them: the newest.

    A save that a program of ours made never stands for a producer's save that has a `scheduledFor`, also
    when the program's save is newer, or the time has come since. The producer's save stands for both then.
    """
    producers = [place for place, job in enumerate(newest_first) if job.made_by is None]
    if producers and newest_first[producers[0]].scheduled_for is not None:
        return producers[0]
    return 0


def joined_keys(newest: Job, older: Sequence[Job], *, with_first_save: bool) -> Document:
    """Return the keys of the newest save that change when it stands for older saves, too."""
    keys: Document = {}
    paths = join_paths(newest.paths, *(job.paths for job in older))
    if set(paths) != set(newest.paths):
        keys |= {"paths": list(paths), "dryRunAt": None}
    keys |= _joined_program_paths(newest, older)
    people = [newest.author, *newest.co_authors]
    for job in older:
        people += [job.author, *job.co_authors]
    others: dict[str, Author] = {}
    for person in filter(None, people):
        others.setdefault(person.email.casefold(), person)
    if newest.author:
        del others[newest.author.email.casefold()]
    if len(others) > len(newest.co_authors):
        keys["coAuthors"] = [person.model_dump() for person in others.values()][:MAX_CO_AUTHORS]
    if with_first_save or "paths" in keys:
        first = min(job.first_saved_at or job.created_at for job in (newest, *older))
        keys["firstSavedAt"] = format_time(first)
    return keys


def _joined_program_paths(newest: Job, older: Sequence[Job]) -> Document:
    """Return the key that tells the paths of programs from those that a producer declared."""
    saves = (newest, *older)
    if all(job.made_by is None and job.program_paths is None for job in saves):
        return {}
    if all(job.made_by is not None and job.program_paths is None for job in saves):
        return {}  # no producer declared anything
    declared: set[str] = set()
    for job in saves:
        declared.update(set(job.paths) - job.paths_of_programs)
    of_programs = [path for path in join_paths(*(job.paths for job in saves)) if path not in declared]
    if tuple(of_programs) == (newest.program_paths or ()) and newest.made_by is None:
        return {}
    return {"programPaths": of_programs}


def in_part(document: Document, left: Iterable[str], commit: str) -> Document:
    """Return the document of a job of which `commit` has a part: it declares only what is left."""
    return {**document, "paths": list(left), "publishedCommit": commit}


def with_state(
    document: Document,
    now: float,
    *,
    status: Status,
    attempts: int,
    failure: Failure | None = None,
    next_attempt_at: float | None = None,
    dry_run_at: float | None = None,
) -> Document:
    """Return the document with the worker's keys replaced; every other key stays as its producer wrote it."""
    changed = _in_current_spelling(document)
    missing_attempts = changed.pop("missingAttempts", 0)
    if failure is not None and failure.code is FailureCode.MISSING:
        before = missing_attempts if isinstance(missing_attempts, int) else 0
        missing_attempts = before + 1
    if failure is not None and missing_attempts:
        changed["missingAttempts"] = missing_attempts
    changed |= {
        "status": status.value,
        "attempts": attempts,
        "nextAttemptAt": None if next_attempt_at is None else format_time(next_attempt_at),
        "lastError": failure.message if failure else None,
        "failure": failure.code.value if failure else None,
        "fix": (failure.fix or None) if failure else None,
        "updatedAt": format_time(now),
    }
    changed.pop("dryRunAt", None)
    if dry_run_at is not None:
        changed["dryRunAt"] = format_time(dry_run_at)
    return changed


_OLD_SPELLINGS = {"commitMessage": "message", "attempt": "attempts"}


def _in_current_spelling(document: Document) -> Document:
    """Return the document with old spellings of keys replaced. The current spelling wins over an old one."""
    current: Document = {}
    for key, value in document.items():
        right = _OLD_SPELLINGS.get(key, key)
        if right == key or right not in document:
            current[right] = value
    return current


def read_document(data: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON value of a job file, read strictly.

    Raises:
        UnreadableJobError: it is not JSON (cut off, empty, not UTF-8).
        MalformedJobError: it is JSON that programs disagree about (a key twice, NaN, NUL, too deep, …).
    """
    try:
        return _read_strictly(data)
    except UnreadableJobError as error:
        error.document = _read_leniently(data.decode("utf-8-sig", errors="replace"))
        raise


def _read_strictly(data: bytes) -> Any:  # noqa: ANN401 - any JSON value
    limit = MAX_REWRITTEN_BYTES if b'"updatedAt"' in data else MAX_FILE_BYTES
    if len(data) > limit:
        raise MalformedJobError(f"the file has {len(data)} bytes; a job file has at most {MAX_FILE_BYTES}")
    try:
        value = _DECODER.decode(data.decode("utf-8-sig"))
        if reason := _fault_of(value):
            raise MalformedJobError(reason)
    except RecursionError:
        raise MalformedJobError(f"the JSON is nested deeper than {_MAX_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UnreadableJobError(f"not valid JSON: {error}") from None
    return value


def _read_leniently(text: str) -> Document:
    """Return what is whole of a JSON object that breaks off, or that programs disagree about.

    The paths that it names stay withheld: of a list that breaks off, the texts before the break.
    """
    document: Document = {}
    paths: list[str] = []
    key = _FIRST_KEY.match(text)
    while key:
        name = json.loads(key[1])
        try:
            value, end = _LENIENT_DECODER.raw_decode(text, key.end())
        except (ValueError, RecursionError):
            if begun := _BEGUN_LIST.match(text, key.end()):
                paths += named_paths({name: [json.loads(each) for each in _TEXT.findall(begun[1])]})
            break
        paths += named_paths({name: value})
        if not _fault_of({name: value}):
            document[name] = value
        key = _NEXT_KEY.match(text, end)
    return document | {"paths": [path for path in paths if not _fault_of(path)]}


def named_paths(document: Document) -> list[str]:
    """Return the paths that a document names which is no job: in `paths`, or in a misspelt key for them."""
    value = document.get("paths" if "paths" in document else key_meant(document, "paths"))
    if isinstance(value, str):
        return [value]
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _fault_of(value: object, depth: int = 0) -> str:
    """Return why programs may read a JSON value differently; empty if they do not."""
    if isinstance(value, str):
        if "\0" in value:
            return "a text contains a NUL character"
        if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            return "a text contains half of a surrogate pair"
    elif isinstance(value, float):
        return "" if math.isfinite(value) else "a number is too large"
    elif isinstance(value, dict | list):
        if depth >= _MAX_DEPTH:
            return f"the JSON is nested deeper than {_MAX_DEPTH} levels"
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, (_fault_of(each, depth + 1) for each in parts)), "")
    return ""


def without_duplicates(pairs: list[tuple[str, Any]]) -> Document:
    """Return the JSON object. Raises MalformedJobError for a key that occurs twice."""
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for i, key in enumerate(keys) if key in keys[:i])
        raise MalformedJobError(f"the key {one_line(twice, 80)!r} occurs twice")
    return document


def _refuse_constant(text: str) -> float:
    raise MalformedJobError(f"{text} is not JSON")


_JSON_TEXT = r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+"'
_TEXT = re.compile(_JSON_TEXT)
_FIRST_KEY = re.compile(rf"\s*\{{\s*({_JSON_TEXT})\s*:\s*")
_NEXT_KEY = re.compile(rf"\s*,\s*({_JSON_TEXT})\s*:\s*")
_BEGUN_LIST = re.compile(rf"\[((?:\s*{_JSON_TEXT}\s*,?)*+)")
_LENIENT_DECODER = json.JSONDecoder()
_DECODER = json.JSONDecoder(object_pairs_hook=without_duplicates, parse_constant=_refuse_constant)


def encode_document(document: Document) -> bytes:
    """Return the bytes of a job file: indented, with escapes for what a terminal could obey."""
    text = json.dumps(document, ensure_ascii=False, indent=2)
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return (text.replace("\x7f", "\\u007f") + "\n").encode()
