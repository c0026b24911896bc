"""Saving posts: the job and what it brings along, in one transaction, whichever worker runs or none."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from briter_worker.job import Status
from briter_worker.queues.postgres import contents, joining, rows, single, tokens
from briter_worker.queues.postgres.deliveries import as_bytes
from briter_worker.queues.postgres.joining import ARRIVING, FAILED, WAITING
from briter_worker.queues.postgres.rows import Save, values_of
from briter_worker.strictjson import MalformedJobError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from briter_worker.job import Job
    from briter_worker.queues.postgres.contents import Source
    from briter_worker.queues.postgres.database import Connection, Database

_MAX_PATH = 2_000
"""So many bytes of a path still fit an index."""


def submit(
    database: Database,
    site: str,
    document: Mapping[str, Any],
    source: Source | None = None,
    *,
    now: float | None = None,
    first: Callable[[Connection], None] | None = None,
) -> Job:
    """Have the post published as this job file says, with what `source` brings along.

    A waiting save of the slug is joined with it: the newest `createdAt` wins, in whatever order they are
    written. A job without an id gets one. When this returns, it is durable; should the connection break,
    the same call again does no harm. `first` is done in the same transaction, before it; what it raises
    leaves nothing written.

    Raises MalformedJobError and UnreadableJobError for what is no job, ContentChangedError,
    SiteMissingError, DatabaseError.
    """
    (job,) = submit_many(database, site, [(document, source)], now=now, first=first)
    return job


def submit_many(
    database: Database,
    site: str,
    saves: Iterable[tuple[Mapping[str, Any], Source | None]],
    *,
    now: float | None = None,
    first: Callable[[Connection], None] | None = None,
) -> list[Job]:
    """As `submit`, for all of these or, when an exception says so, none."""
    now = time.time() if now is None else now
    new = [(Save.new(document, name=uuid4().hex, now=now), source) for document, source in saves]
    sources = [source for _, source in new if source is not None]
    for source in sources:
        _check(source)
    if not new:
        return []
    if len(new) == 1 and first is None and _saved_at_once(database, site, *new[0]):
        return [new[0][0].job]
    with database.transaction() as connection:
        if first is not None:
            first(connection)
        contents.store(connection, sources)
        # From here on the site's other writers wait; so contents, which may be large, come first.
        tokens.lock(connection, site, None)
        numbers = _numbers(connection, len(new))
        written = [
            (Save(number, save.job, save.text), source)
            for number, (save, source) in zip(numbers, new, strict=True)
        ]
        _write(connection, site, written, now)
    return [save.job for save, _ in new]


def _saved_at_once(database: Database, site: str, save: Save, source: Source | None) -> bool:
    files = list(_files(save, source)) if source is not None else []
    folders = list(_folders(save, source)) if source is not None else []
    return single.save(database, site, save, source, files, folders)


def _write(
    connection: Connection, site: str, written: Sequence[tuple[Save, Source | None]], now: float
) -> None:
    by_state = {
        state: [save for save, _ in written if save.job.status is status]
        for status, state in ((Status.PENDING, WAITING), (Status.FAILED, FAILED))
    }
    crowded: set[int] = set()
    rivals: dict[str, dict[str, list[Save]]] = {}
    for state, saves in by_state.items():
        counts = Counter(save.job.slug for save in saves)
        rivals[state] = joining.rivals(connection, site, counts, state) if saves else {}
        crowded |= {save.id for save in saves if counts[save.job.slug] > 1 or save.job.slug in rivals[state]}
    states = [
        ARRIVING if save.id in crowded else WAITING if save.job.status is Status.PENDING else FAILED
        for save, _ in written
    ]
    _insert(connection, site, [(save, state) for (save, _), state in zip(written, states, strict=True)])
    _deliver(connection, [(save, source) for save, source in written if source is not None])
    for state, saves in by_state.items():
        together = [save for save in saves if save.id in crowded]
        joining.place(connection, site, together, state, now, others=rivals[state])


def _numbers(connection: Connection, count: int) -> list[int]:
    numbers = connection.execute(
        "SELECT nextval('publications_id_seq') FROM generate_series(1, %s)", (count,)
    )
    return sorted(number for (number,) in numbers)


def _insert(connection: Connection, site: str, saves: Sequence[tuple[Save, str]]) -> None:
    if len(saves) < contents.FEW:
        rows.insert(connection, site, saves)
        return
    with connection.cursor().copy(rows.COPY.encode()) as copy:
        for save, state in saves:
            number, job_id, slug, text, _, *rest = values_of(save)
            copy.write_row((site, number, job_id, slug, text, list(save.job.paths), *rest, state))


def _deliver(connection: Connection, saves: Sequence[tuple[Save, Source]]) -> None:
    files = [row for save, source in saves for row in _files(save, source)]
    folders = [row for save, source in saves for row in _folders(save, source)]
    if len(files) >= contents.FEW:
        with connection.cursor().copy(
            "COPY delivered (publication, path, mode, blob, base, knows_base, saved_at) FROM STDIN"
        ) as copy:
            for row in files:
                copy.write_row(row)
    elif files:
        connection.execute(
            "INSERT INTO delivered (publication, path, mode, blob, base, knows_base, saved_at)"
            " SELECT * FROM unnest(%s::bigint[], %s::bytea[], %s::text[], %s::text[], %s::text[], %s::bool[],"
            " %s::float8[])",
            [list(column) for column in zip(*files, strict=True)],
        )
    if folders:
        connection.execute(
            "INSERT INTO folders (publication, path, saved_at)"
            " SELECT * FROM unnest(%s::bigint[], %s::bytea[], %s::float8[])",
            [list(column) for column in zip(*folders, strict=True)],
        )


def _files(save: Save, source: Source) -> Iterator[tuple[object, ...]]:
    for file in source.delivery.files:
        path = as_bytes(file.path)
        yield save.id, path, file.mode, file.blob, file.base, file.knows_base, file.saved_at


def _folders(save: Save, source: Source) -> Iterator[tuple[object, ...]]:
    for path in dict.fromkeys(source.delivery.folders):
        below = f"{path.rstrip('/')}/"
        times = [file.saved_at for file in source.delivery.files if file.path.startswith(below)]
        # What is older than anything in it, and not in it, was not there any more.
        yield save.id, as_bytes(path), min(times, default=save.job.created_at)


def _check(source: Source) -> None:
    delivery = source.delivery
    paths = [file.path for file in delivery.files]
    if len(set(paths)) != len(paths):
        raise MalformedJobError("a path is brought along twice")
    for path in (*paths, *delivery.folders):
        if len(as_bytes(path)) > _MAX_PATH or "\0" in path:
            raise MalformedJobError(f"the path {path[:40]}… has a NUL in it, or more than {_MAX_PATH} bytes")
