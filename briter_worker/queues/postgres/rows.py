"""A publication as a row: the job file as written, and beside it the columns that queries need.

Whoever changes a site's rows locks the site. Each drain takes the site's next fencing token, and only the
holder of the last one may write: a node that was suspended, taken for dead and replaced changes nothing,
wherever it wakes up. `join_saves` keeps at most one pending job and one dead letter per slug.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from briter_worker.errors import DeclinedError, FailureCode, LockLostError
from briter_worker.job import (
    MAX_FILE_BYTES,
    Job,
    MalformedJobError,
    encode_document,
    format_time,
    joined_keys,
    read_document,
    winner_index,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.job import Document
    from briter_worker.queues.postgres.database import Connection, Database

FOLDER = "040000"
"""Mode of a folder among the files."""
PENDING, CLAIMED, FAILED = "pending", "claimed", "failed"
_OF_QUARANTINED_FILES = frozenset({FailureCode.MALFORMED, FailureCode.UNREADABLE})
"""Dead letters of such failures stand for one file each, and are not joined."""
_MAX_NAME_BYTES = 1_000  # an index entry has at most 2,700 bytes
_MAX_BIGINT = 2**53
_FEW_SLUGS = 20
COLUMNS = "id, document, job_id, created_at, state, attempt, alone, cancelled"
_MOVE_FILES = """
INSERT INTO files AS f (publication, path, mode, blob, base, has_base, saved_at)
SELECT DISTINCT ON (m.newer, o.path) m.newer, o.path, o.mode, o.blob, o.base, o.has_base, o.saved_at
FROM unnest(%(older)s::bigint[], %(newer)s::bigint[]) AS m (older, newer)
JOIN files o ON o.publication = m.older
ORDER BY m.newer, o.path, o.saved_at DESC, o.publication DESC
ON CONFLICT (publication, path) DO UPDATE SET
    mode = CASE WHEN excluded.saved_at > f.saved_at THEN excluded.mode ELSE f.mode END,
    blob = CASE WHEN excluded.saved_at > f.saved_at THEN excluded.blob ELSE f.blob END,
    base = CASE WHEN excluded.has_base AND (excluded.saved_at > f.saved_at OR NOT f.has_base)
                THEN excluded.base ELSE f.base END,
    has_base = f.has_base OR excluded.has_base,
    saved_at = greatest(f.saved_at, excluded.saved_at)
"""
# A folder came with all its files: an older file below the folder was deleted before.
_DROP_DELETED_FILES = f"""
DELETE FROM files d USING files f
WHERE d.publication = ANY(%(newer)s) AND f.publication = d.publication AND d.saved_at < f.saved_at
AND d.mode <> '{FOLDER}' AND f.mode = '{FOLDER}' AND substring(d.path FROM 1 FOR length(f.path)) = f.path
"""  # noqa: S608 - a constant


class SiteMissingError(DeclinedError):
    """The cluster has no site of this name."""

    def __init__(self, site: str) -> None:
        super().__init__(
            f"there is no site {site!r}", "briter-worker site list, or briter-worker site add NAME"
        )


def lock_site(connection: Connection, site: str, token: int | None = None) -> None:
    """Lock the site until the transaction ends, for producers and commands, or for the drain of a token.

    Raises SiteMissingError; for a drain LockLostError, also if the token is not the site's last one.
    """
    row = connection.execute(
        "SELECT token FROM sites WHERE name = %s AND NOT removed FOR NO KEY UPDATE", (site,)
    ).fetchone()
    if token is None:
        if row is None:
            raise SiteMissingError(site)
    elif row is None:
        raise LockLostError(f"there is no site {site} any more")
    elif row[0] != token:
        raise LockLostError(f"another worker has the site {site} now; this drain ends")


@contextlib.contextmanager
def locked(database: Database, site: str, token: int | None = None) -> Iterator[Connection]:
    """Yield a transaction that has locked the site as `lock_site` does."""
    with database.transaction(is_pipelined=token is not None) as connection:
        lock_site(connection, site, token)
        yield connection


@dataclass(frozen=True, slots=True)
class Row:
    """One row of `publications`."""

    id: int
    job: Job
    text: str
    """The job file."""
    state: str
    """`pending`, `claimed` or `failed`."""
    attempt: int = 0
    """While the job is claimed: the running attempt, counted from 1."""
    alone: bool = False
    is_cancelled: bool = False

    @classmethod
    def from_record(cls, record: Sequence[Any]) -> Row:
        """Return the row of a record with the columns that `select` reads."""
        number, text, job_id, created_at, *rest = record
        return cls(number, _job(text, job_id, created_at), text, *rest)

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, name: str, now: float) -> Row:
        """Return a row, without a number yet, for a producer's document; `name` is the id where it has none.

        Raises MalformedJobError and UnreadableJobError.
        """
        try:
            text = _encode(dict(document))
        except UnicodeEncodeError:
            raise MalformedJobError("a text contains half of a surrogate pair") from None
        job = _job(text, name, now)
        for value in (job.id, job.slug):
            if len(value.encode()) > _MAX_NAME_BYTES:
                raise MalformedJobError(f"{value[:40]}… is longer than {_MAX_NAME_BYTES} bytes")
        return cls(0, job, text, job.status.value)

    @property
    def document(self) -> Document:
        """Return the job file, with every key that its producer wrote."""
        document: Document = read_document(self.text.encode())
        return document

    @property
    def order(self) -> tuple[float, int]:
        """Return a sort key: of two saves of a slug, the newer one has the greater key."""
        return (self.job.created_at, self.id)

    def rewritten(self, document: Document) -> Row:
        """Return the row with another job file, in the state that the job file says."""
        text = _encode(document)
        job = _job(text, self.job.id, self.job.created_at)
        return Row(self.id, job, text, job.status.value)

    def with_paths(self, paths: Collection[str], now: float) -> Row:
        """Return the row with these declared paths; a dry run has then not tried it yet."""
        if set(paths) == set(self.job.paths):
            return self
        return self.with_keys({"paths": list(paths), "dryRunAt": None}, now)

    def with_keys(self, keys: Document, now: float) -> Row:
        """Return the row with these keys replaced in the job file."""
        return self.rewritten({**self.document, **keys, "updatedAt": format_time(now)})

    def fields(self, site: str) -> dict[str, object]:
        """Return the values of the row's columns."""
        job = self.job
        return {
            "site": site,
            "job_id": job.id,
            "slug": job.slug,
            "document": self.text,
            "paths": job.paths,
            "created_at": job.created_at,
            "scheduled_for": job.scheduled_for or 0.0,
            "next_attempt_at": job.next_attempt_at or 0.0,
            "quiet_until": job.quiet_until or 0.0,
            "attempts": min(job.attempts, _MAX_BIGINT),
            "failure": job.failure,
            "tried": job.dry_run_at is not None,
            "state": self.state,
        }


def _job(text: str, name: str, arrived: float) -> Job:
    """Return the job; its arrival counts, not the clock of its producer."""
    job = Job.from_document(read_document(text.encode()), name=name, modified=arrived)
    return job.model_copy(update={"created_at": arrived})


def _encode(document: Document) -> str:
    data = encode_document(document)
    if len(data) > MAX_FILE_BYTES and "updatedAt" not in document:
        # The key marks a file that the worker wrote, which may be larger than a producer's.
        data = encode_document({**document, "updatedAt": format_time(0.0)})
    return data.decode()


def encode_path(path: str) -> bytes:
    """Return the path as git has it; bytes that are not UTF-8 survive."""
    return path.encode("utf-8", "surrogateescape")


def decode_path(path: bytes) -> str:
    """Return the path as the worker has it."""
    return bytes(path).decode("utf-8", "surrogateescape")


def path_field(path: str) -> str:
    """Return the path as JSON has it for a column of bytes."""
    return f"\\x{encode_path(path).hex()}"


def is_covered(path: str, declared: Collection[str]) -> bool:
    """Return True if the path, or a folder above it, is declared. `declared` has no trailing slashes."""
    path = path.rstrip("/")
    while path and path not in declared:
        path = path.rpartition("/")[0]
    return bool(path)


def select(
    connection: Connection, condition: str, values: Mapping[str, object], *, prepare: bool | None = None
) -> list[Row]:
    """Return the rows of a condition."""
    query = f"SELECT {COLUMNS} FROM publications WHERE {condition}"  # noqa: S608
    records = connection.execute(query, values, prepare=prepare)
    return [Row.from_record(record) for record in records]


def select_saves(connection: Connection, site: str, state: str, slugs: Collection[str]) -> list[Row]:
    """Return the site's rows of these slugs in this state."""
    # The state is not a parameter, so that every plan can use the partial index for it.
    condition = f"site = %(site)s AND state = '{state}' AND slug = ANY(%(slugs)s)"
    # Prepared for one slug, the statement compares each row with each slug: a second for 5,000 of 10,000.
    prepare = None if len(slugs) <= _FEW_SLUGS else False
    return select(connection, condition, {"site": site, "slugs": list(slugs)}, prepare=prepare)


def update(connection: Connection, site: str, rows: Iterable[Row]) -> None:
    """Store the rows as they are now; none of them is claimed any more."""
    records = [{"id": row.id, **row.fields(site)} for row in rows]
    names = [name for name in records[0] if name != "id"]
    connection.execute(
        f"UPDATE publications p SET ({', '.join(names)}) = (n.{', n.'.join(names)}),"  # noqa: S608
        " attempt = 0, alone = false, cancelled = false"
        " FROM json_populate_recordset(NULL::publications, %s) n WHERE p.id = n.id",
        (json.dumps(records),),
    )


def put_back(connection: Connection, site: str, rows: Sequence[Row], now: float) -> None:
    """Store rows that were claimed or failed in their new states, and join them with other saves."""
    if rows:
        update(connection, site, rows)
        join_saves(connection, site, rows, now)


def delete(connection: Connection, ids: Sequence[int]) -> None:
    """Delete rows with their files. Their blobs stay until the garbage collection."""
    if ids:
        connection.execute("DELETE FROM publications WHERE id = ANY(%s)", (list(ids),))


def delete_files(connection: Connection, publication: int, is_gone: Callable[[str], bool]) -> None:
    """Delete those files and folders of one publication whose paths are gone."""
    found = connection.execute("SELECT path FROM files WHERE publication = %s", (publication,))
    gone = [path for (path,) in found if is_gone(decode_path(path))]
    connection.execute("DELETE FROM files WHERE publication = %s AND path = ANY(%s)", (publication, gone))


def join_saves(connection: Connection, site: str, changed: Sequence[Row], now: float) -> None:
    """Join each changed row with other saves of its slug in the same state.

    The save that `winner_index` chooses stays, with the paths and files of all. The others are noted for the
    next claim to report.
    """
    winners: list[Row] = []
    pairs: list[tuple[Row, Row]] = []
    """Each superseded save, with the save that stands for it now."""
    for state in {row.state for row in changed}:
        slugs = [row.job.slug for row in changed if row.state == state]
        for saves in _saves_by_slug(connection, site, state, slugs):
            winner, superseded = _join(saves, now)
            if superseded:
                winners.append(winner)
                pairs += [(row, winner) for row in superseded]
    if not pairs:
        return
    numbers = {"older": [older.id for older, _ in pairs], "newer": [newer.id for _, newer in pairs]}
    for statement in (_MOVE_FILES, _DROP_DELETED_FILES):
        connection.execute(statement, numbers)
    delete(connection, numbers["older"])
    update(connection, site, winners)
    other_jobs = [(older.job, newer.job) for older, newer in pairs if older.job.id != newer.job.id]
    connection.cursor().executemany(
        "INSERT INTO superseded (site, job_id, slug, by_job) VALUES (%s, %s, %s, %s)",
        [(site, older.id, older.slug, newer.id) for older, newer in other_jobs],
    )


def _saves_by_slug(
    connection: Connection, site: str, state: str, slugs: Collection[str]
) -> Collection[list[Row]]:
    """Return the saves in this state that may be joined, together for each slug."""
    saves: dict[str, list[Row]] = defaultdict(list)
    for row in select_saves(connection, site, state, slugs):
        stands_for_one_file = state == FAILED and row.job.failure in _OF_QUARANTINED_FILES
        if not stands_for_one_file:
            saves[row.job.slug].append(row)
    return saves.values()


def _join(saves: Collection[Row], now: float) -> tuple[Row, list[Row]]:
    """Return the save that stands for all saves of one post, with the paths of all, and the other saves."""
    others = sorted(saves, key=lambda row: row.order, reverse=True)
    winner = others.pop(winner_index([row.job for row in others]))
    has_quiet_time = winner.job.quiet_until is not None
    keys = joined_keys(winner.job, [row.job for row in others], with_first_save=has_quiet_time)
    if keys:
        winner = winner.with_keys(keys, now)
    return winner, others
