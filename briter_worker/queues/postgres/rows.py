"""A publication as a row: the job file to the letter, and beside it what is asked for by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from briter_worker.job import format_time
from briter_worker.jobfile import parse_job
from briter_worker.strictjson import MAX_BYTES, MalformedJobError, encode, has_nul, read_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from briter_worker.job import Job, State
    from briter_worker.queues.postgres.database import Connection
    from briter_worker.strictjson import Document

_MAX_NAME = 1_000
"""So many bytes of a slug or an id still fit an index."""
_BIG = 2**53
COLUMNS = "id, document, job_id, created_at"
"""What `Save.read` reads, in this order."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save of a post, in its row."""

    id: int
    job: Job
    text: str
    """The job file."""

    @staticmethod
    def read(row: Sequence[Any]) -> Save:
        """From the values of `COLUMNS`."""
        number, text, job_id, created_at = row
        return Save(number, parse_job(read_document(text.encode()), name=job_id, modified=created_at), text)

    @staticmethod
    def new(document: Mapping[str, Any], *, name: str, now: float) -> Save:
        """From what a writer wants published; `name` is its id where it has none. No row has it yet.

        Raises MalformedJobError and UnreadableJobError.
        """
        if has_nul(json.dumps(document)):
            raise MalformedJobError("a text has a NUL character in it")
        text = _text(dict(document))
        job = parse_job(read_document(text.encode()), name=name, modified=now)
        for value in (job.id, job.slug):
            if len(value.encode()) > _MAX_NAME:
                raise MalformedJobError(f"{value[:40]}… is longer than {_MAX_NAME} bytes")
        return Save(0, job, text)

    @property
    def document(self) -> Document:
        """The job file, with every key its writer gave it."""
        document: Document = read_document(self.text.encode())
        return document

    @property
    def order(self) -> tuple[float, int]:
        """Of two saves of a slug, the greater is the newer."""
        return (self.job.created_at, self.id)

    def rewritten(self, document: Document) -> Save:
        """The same save with another job file."""
        text = _text(document)
        job = parse_job(read_document(text.encode()), name=self.job.id, modified=self.job.created_at)
        return Save(self.id, job, text)

    def with_paths(self, paths: Sequence[str]) -> Save:
        """The same save, declaring these; itself where it does."""
        if set(paths) == set(self.job.paths):
            return self
        return self.rewritten({**self.document, "paths": list(paths)})


def _text(document: Document) -> str:
    data = encode(document)
    if len(data) > MAX_BYTES and "updatedAt" not in document:
        # By this it is known as the worker's writing, which may be larger than a writer's.
        data = encode({**document, "updatedAt": format_time(0.0)})
    return data.decode()


@dataclass(frozen=True, slots=True)
class Row:
    """A job as a person sees it. Implements `steering.Shown`."""

    id: int
    job: Job
    """In flight, with the running attempt."""
    state: State
    site: str
    changed_at: float
    text: str

    @property
    def place(self) -> str:
        """Where a person finds it."""
        return f"site {self.site}, row {self.id}"

    @property
    def document(self) -> Document:
        """The job file with every key its writer gave it."""
        document = read_document(self.text.encode())
        return {"id": self.job.id, **document, "paths": list(self.job.paths), "attempts": self.job.attempts}


def values_of(save: Save) -> tuple[Any, ...]:
    """The save in the order of `_TYPES`."""
    job = save.job
    return (
        save.id,
        job.id,
        job.slug,
        save.text,
        json.dumps(job.paths),
        job.created_at,
        job.scheduled_for or 0.0,
        job.next_attempt_at or 0.0,
        min(job.attempts, _BIG),
        job.failure,
    )


def values_as_new(save: Save, state: str) -> dict[str, Any]:
    """As `NEW_VALUES` wants them."""
    return {**dict(zip(_TYPES, (*values_of(save), state), strict=True)), "paths": list(save.job.paths)}


_TYPES = {
    "id": "bigint",
    "job_id": "text",
    "slug": "text",
    "document": "text",
    "paths": "text",
    "created_at": "float8",
    "scheduled_for": "float8",
    "next_attempt_at": "float8",
    "attempts": "bigint",
    "failure": "text",
    "state": "text",
}
_NEW_TYPES = {"paths": "text[]"}
_NAMES = ", ".join(_TYPES)
_UNNEST = f"unnest({', '.join(f'%s::{kind}[]' for kind in _TYPES.values())}) AS n ({_NAMES})"
# Arrays of arrays have to be of one length in SQL, so that paths come as JSON.
_VALUES = ", ".join(
    "ARRAY(SELECT json_array_elements_text(n.paths::json))" if name == "paths" else f"n.{name}"
    for name in _TYPES
)
_INSERT = f"INSERT INTO publications (site, {_NAMES}) SELECT %s, {_VALUES} FROM {_UNNEST}"  # noqa: S608 - no values
_UPDATE = (
    f"UPDATE publications p SET ({_NAMES}) = ({_VALUES}), cancel = false, batch = NULL, attempt = 0,"  # noqa: S608
    f" changed_at = %s FROM {_UNNEST} WHERE p.id = n.id"
)
NEW = ", ".join(name for name in _TYPES if name != "id")
NEW_VALUES = ", ".join(
    f"%(job_{name})s::{_NEW_TYPES.get(name, kind)}" for name, kind in _TYPES.items() if name != "id"
)
"""For one new row, which gets its id from the table."""
COPY = f"COPY publications (site, {_NAMES}) FROM STDIN"
"""For very many new rows; the paths are an array here."""


def insert(connection: Connection, site: str, rows: Iterable[tuple[Save, str]]) -> None:
    """New rows, each in its state."""
    connection.execute(_INSERT.encode(), (site, *_columns(rows)))


def update(connection: Connection, rows: Iterable[tuple[Save, str]], now: float) -> None:
    """These rows are as the saves say now, each in its state, and nobody's claim."""
    connection.execute(_UPDATE.encode(), (now, *_columns(rows)))


def _columns(rows: Iterable[tuple[Save, str]]) -> Iterator[list[Any]]:
    values = [(*values_of(save), state) for save, state in rows]
    return (list(column) for column in zip(*values, strict=True))


def with_attempts(job: Job, attempts: int) -> Job:
    """The job, with the attempts that a person is to see."""
    return replace(job, attempts=attempts)
