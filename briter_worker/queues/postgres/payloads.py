"""What jobs carry: their files and folders, and each content once, by the id that git gives its blob.

Producers store jobs with what they carry. The garbage collection deletes a content when no job and no base
version needs it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from briter_worker.errors import DeclinedError, one_line
from briter_worker.job import NO_QUIET_TIME, MalformedJobError, embargo_fault, format_time
from briter_worker.ports import BaseVersion, Conflict, Payload, PublishedVersion, SubmittedFile, blob_id
from briter_worker.queues.postgres.rows import (
    FOLDER,
    PENDING,
    Row,
    SiteMissingError,
    decode_path,
    encode_path,
    join_saves,
    lock_site,
    locked,
    path_field,
    select_saves,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from briter_worker.job import Job, QuietTime
    from briter_worker.queues.postgres.database import Connection, Database

_MAX_PATH_BYTES = 2_000  # an index entry has at most 2,700 bytes
_FILE = "path, mode, blob, base, has_base, saved_at"
_COLLECTED_AT_ONCE = 500
_SMALL_BYTES = 1 << 20
# The lock keeps the garbage collection away from the known blobs.
_LOCK_KNOWN_BLOBS = "SELECT blob FROM blobs WHERE blob = ANY(%s) ORDER BY blob FOR KEY SHARE"
# A blob that another producer has inserted meanwhile is locked like a known one.
_INSERT_BLOB = """
INSERT INTO blobs (blob, content) VALUES (%s, %b) ON CONFLICT (blob) DO UPDATE SET content = blobs.content
"""
# Locks the site. No two saves arrive at the same time, also where the server's clock was set back.
_ARRIVE = """
UPDATE sites SET last_save = greatest(
    last_save + 0.00001, coalesce(%s::float8, extract(epoch FROM clock_timestamp())::float8)
) WHERE name = %s AND NOT removed RETURNING last_save
"""
_IS_UNUSED = """
NOT EXISTS (SELECT FROM files f WHERE f.blob = b.blob)
AND NOT EXISTS (SELECT FROM base_versions v WHERE v.kept = b.blob)
"""
_LOCK_UNUSED_BLOBS = f"""
SELECT blob FROM blobs b WHERE {_IS_UNUSED} ORDER BY blob LIMIT %s FOR UPDATE SKIP LOCKED
"""  # noqa: S608 - constants only, here and below
_DELETE_BLOBS = f"DELETE FROM blobs b WHERE blob = ANY(%s) AND {_IS_UNUSED}"  # noqa: S608
# With everything that a publication of these files asks next; the contents, if there are few.
_READ_PAYLOADS = """
SELECT f.publication, f.path, f.mode, f.blob, f.saved_at, f.base, f.has_base,
    p.saved_at, coalesce(p.outdated_by, ''), v.path IS NOT NULL, v.base, v.conflict,
    CASE WHEN sum(octet_length(b.content)) OVER () <= %(small)s THEN b.content END
FROM files f
LEFT JOIN blobs b ON b.blob = f.blob
LEFT JOIN published p ON p.site = %(site)s AND p.path = f.path
LEFT JOIN base_versions v ON v.site = %(site)s AND v.path = f.path
WHERE f.publication = ANY(%(ids)s) ORDER BY f.publication, f.path
"""
# What is remembered reaches the disk with the acknowledgement that follows it.
_REMEMBER = """
WITH own AS (
    UPDATE sites SET pushed_tip = coalesce(%s, pushed_tip)
    WHERE name = %s AND token = %s AND NOT removed AND set_config('synchronous_commit', 'off', true) = 'off'
    RETURNING name
), remembered AS (
    INSERT INTO base_versions (site, path, base, conflict, kept)
    SELECT own.name, new.path, new.base, new.conflict, new.kept
    FROM own, json_populate_recordset(NULL::base_versions, %s) AS new
    ON CONFLICT (site, path) DO UPDATE
    SET base = excluded.base, conflict = excluded.conflict, kept = excluded.kept
)
SELECT name FROM own
"""
_OUTDATE = """
INSERT INTO published (site, path, saved_at, outdated_by)
VALUES (%s, %s, extract(epoch FROM clock_timestamp()), %s)
ON CONFLICT (site, path) DO UPDATE SET saved_at = excluded.saved_at, outdated_by = excluded.outdated_by
"""


class ContentChangedError(Exception):
    """A file changed while it was read, so that its content does not match its blob id. Read it again."""

    def __init__(self, blob: str) -> None:
        super().__init__(f"a file changed while it was read: its content is not {blob} any more")


class NewerSaveError(DeclinedError):
    """A save that comes from elsewhere is older than the save of its post that waits here."""

    def __init__(self, slug: str) -> None:
        text = f"the cluster has a newer save of {one_line(slug, 80)}, which waits"
        super().__init__(text, "cancel one of the two saves, then import again")


class PayloadSource(NamedTuple):
    """The payload of a new job, and what returns the content of a blob."""

    payload: Payload
    content: Callable[[str], bytes]

    @classmethod
    def of(cls, files: Mapping[str, bytes | None]) -> PayloadSource:
        """Return the source of files with these contents; None: the file was deleted."""
        blobs = {path: None if content is None else blob_id(content) for path, content in files.items()}
        contents = {blob: files[path] or b"" for path, blob in blobs.items() if blob}
        submitted = (SubmittedFile(path, "100644" if blob else "", blob, 0.0) for path, blob in blobs.items())
        return cls(Payload(tuple(submitted)), contents.__getitem__)


def submit(
    connection: Connection,
    site: str,
    document: Mapping[str, Any],
    source: PayloadSource | None = None,
    *,
    now: float | None = None,
    saved_at: float | None = None,
    quiet: QuietTime = NO_QUIET_TIME,
) -> Job:
    """Store a job with its files, in the caller's transaction. Wake the site after the commit.

    The save of a slug that arrives last wins, by Postgres's clock (or `now`). A job without an id gets one.
    To submit the same job again, after an error in the commit, does no harm. `saved_at`: when a save was made
    that comes from elsewhere; its arrival must not make it the newest.

    Raises MalformedJobError, UnreadableJobError, ContentChangedError, SiteMissingError and NewerSaveError.
    """
    source = source or PayloadSource.of({})
    name = uuid4().hex
    Row.from_document(document, name=name, now=0.0)
    _check_paths(source.payload)
    # Before the site is locked: large contents take long, and whoever locks both does so in this order.
    store_blobs(connection, source)
    arrived = connection.execute(_ARRIVE, (now, site)).fetchone()
    if arrived is None:
        raise SiteMissingError(site)
    now = float(arrived[0])
    row = Row.from_document(document, name=name, now=now)
    if saved_at is None and (fault := embargo_fault(dict(document), now)):
        raise MalformedJobError(fault)
    if saved_at is not None and row.state == PENDING:
        for waiting in select_saves(connection, site, PENDING, [row.job.slug]):
            if waiting.job.created_at > saved_at and waiting.job.id != row.job.id:
                raise NewerSaveError(row.job.slug)
    if quiet.after_save and not row.job.attempts:
        earlier = [each.job for each in select_saves(connection, site, PENDING, [row.job.slug])]
        job = quiet.apply(row.job, now, *earlier)
        times = {"firstSavedAt": job.first_saved_at, "quietUntil": job.quiet_until}
        row = row.with_keys({key: format_time(at) for key, at in times.items() if at is not None}, now)
    _insert(connection, row, site, _records(source.payload, now))
    return row.job


def _insert(connection: Connection, row: Row, site: str, files: Sequence[Mapping[str, object]]) -> None:
    """Store a new row with its files, and join it with other saves of its slug."""
    values = row.fields(site)
    names = ", ".join(values)
    # The state is not a parameter, as in `select_saves`. The statement does not see what it inserts itself.
    (has_others,) = connection.execute(
        f"WITH added AS (INSERT INTO publications ({names})"  # noqa: S608
        f" SELECT {names} FROM json_populate_record(NULL::publications, %s) RETURNING id),"
        f" with_files AS (INSERT INTO files (publication, {_FILE}) SELECT added.id, {_FILE}"
        " FROM added, json_populate_recordset(NULL::files, %s))"
        " SELECT EXISTS (SELECT FROM publications"
        f" WHERE site = %s AND state = '{row.state}' AND slug = %s) FROM added",
        (json.dumps(values), json.dumps(files), site, row.job.slug),
    ).fetchone() or (False,)
    if has_others:
        join_saves(connection, site, [row], row.job.created_at)


def _check_paths(payload: Payload) -> None:
    paths = [file.path for file in payload.files]
    if len(set(paths)) != len(paths):
        raise MalformedJobError("a path is submitted twice")
    for path in (*paths, *payload.folders):
        if len(encode_path(path)) > _MAX_PATH_BYTES or "\0" in path:
            raise MalformedJobError(f"the path {path[:40]}… has a NUL, or more than {_MAX_PATH_BYTES} bytes")


def _records(payload: Payload, arrived: float) -> list[dict[str, object]]:
    folders = dict.fromkeys(f"{folder.rstrip('/')}/" for folder in payload.folders)
    files = [*payload.files, *(SubmittedFile(below, FOLDER, None, arrived) for below in folders)]
    return [{**file._asdict(), "saved_at": arrived, "path": path_field(file.path)} for file in files]


def store_blobs(connection: Connection, source: PayloadSource) -> None:
    """Store the contents; they stay at least until the transaction ends. Raises ContentChangedError."""
    wanted = sorted({file.blob for file in source.payload.files if file.blob is not None})
    known: set[str] = set()
    if len(wanted) > 1:  # to ask about a single one costs more than to send it
        known = {blob for (blob,) in connection.execute(_LOCK_KNOWN_BLOBS, (wanted,))}
    # In one order, so that two producers never wait for each other in a circle.
    for blob in wanted:
        if blob not in known:
            content = source.content(blob)
            if blob_id(content) != blob:
                raise ContentChangedError(blob)
            connection.execute(_INSERT_BLOB, (blob, content))


def collect_blobs(database: Database) -> int:
    """Delete the blobs that no job and no base version needs; return how many.

    A blob that a producer is about to use is locked, and stays.
    """
    collected = 0
    while True:
        with database.transaction() as connection:
            locked = [blob for (blob,) in connection.execute(_LOCK_UNUSED_BLOBS, (_COLLECTED_AT_ONCE,))]
            # A second statement, because the first does not see what was committed before it had the locks.
            deleted = connection.execute(_DELETE_BLOBS, (locked,)).rowcount
        collected += deleted
        if not deleted:
            return collected


class PostgresPayloads:
    """Implements `ports.Payloads` for one site."""

    def __init__(self, database: Database, site: str) -> None:
        self._database = database
        self._site = site
        self._contents: dict[str, bytes] = {}
        self._published: dict[str, PublishedVersion | None] = {}
        self._bases: dict[str, BaseVersion | None] = {}
        """The rows read so far: of the last payloads' files, and of other paths that were asked for."""

    def of(self, keys: Collection[str]) -> Mapping[str, Payload]:
        """Return the payload of each claim, by key."""
        ids = [int(key) for key in keys]
        files: dict[int, list[SubmittedFile]] = defaultdict(list)
        folders: dict[int, list[str]] = defaultdict(list)
        self._contents, self._published = {}, {}
        values = {"ids": ids, "site": self._site, "small": _SMALL_BYTES}
        with self._database.connection() as connection:
            for number, raw, mode, *rest in connection.cursor(binary=True).execute(_READ_PAYLOADS, values):
                path = decode_path(raw)
                if mode == FOLDER:
                    folders[number].append(path.rstrip("/"))
                    continue
                (*file, saved_at, outdated_by, is_known, base, conflict, content) = rest
                files[number].append(SubmittedFile(path, mode, *file))
                self._published[path] = None if saved_at is None else PublishedVersion(saved_at, outdated_by)
                self._bases[path] = _base_version(base, conflict) if is_known else None
                if content is not None:
                    self._contents[file[0]] = content
        return {str(number): Payload(tuple(files[number]), tuple(folders[number])) for number in ids}

    def content(self, blob: str) -> bytes:
        """Return the content of a blob. Raises LookupError if the database does not have the blob."""
        if (content := self._contents.pop(blob, None)) is not None:
            return content
        with self._database.connection() as connection:
            cursor = connection.cursor(binary=True)
            row = cursor.execute("SELECT content FROM blobs WHERE blob = %s", (blob,)).fetchone()
        if row is None:
            raise LookupError(f"the database has no blob {blob}: the job that it belonged to is gone")
        return bytes(row[0])

    def published(self, paths: Collection[str]) -> Mapping[str, PublishedVersion]:
        """Return the version that was published last, for the paths that ever were."""
        if unread := set(paths) - self._published.keys():
            query = "SELECT path, saved_at, coalesce(outdated_by, '') FROM published"
            rows = self._select(query, unread)
            self._published |= dict.fromkeys(unread)
            self._published |= {path: PublishedVersion(*version) for path, *version in rows}
        return {path: known for path in paths if (known := self._published[path]) is not None}

    def _select(self, query: str, paths: Collection[str]) -> list[list[Any]]:
        """Return rows of the site for these paths; the path is the first column."""
        with self._database.connection() as connection:
            rows = connection.execute(
                f"{query} WHERE site = %s AND path = ANY(%s)".encode(),
                (self._site, [encode_path(path) for path in paths]),
            )
            return [[decode_path(path), *rest] for path, *rest in rows]


def _base_version(base: str | None, conflict: str | None) -> BaseVersion:
    conflicts = json.loads(conflict) if conflict else {}
    return BaseVersion(base, {slug: Conflict(**each) for slug, each in conflicts.items()})


class PostgresBases(PostgresPayloads):
    """Implements also `ports.BaseVersions`, for one drain of one site, the only one that changes them."""

    def __init__(self, database: Database, site: str, *, token: int) -> None:
        super().__init__(database, site)
        self._token = token

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return what is known of these paths."""
        if unread := set(paths) - self._bases.keys():
            rows = self._select("SELECT path, base, conflict FROM base_versions", unread)
            self._bases |= dict.fromkeys(unread)
            self._bases |= {path: _base_version(*version) for path, *version in rows}
        return {path: known for path in paths if (known := self._bases[path]) is not None}

    def conflict_commits(self) -> set[str]:
        """Return the commits that keep the authors' versions of open conflicts."""
        with self._database.connection() as connection:
            query = "SELECT conflict FROM base_versions WHERE site = %s AND conflict IS NOT NULL"
            rows = connection.execute(query, (self._site,)).fetchall()
        return {each["commit"] for (text,) in rows for each in json.loads(text).values()}

    def outdate(self, found: Mapping[str, tuple[str, str | None]], tip: str) -> None:
        """Note commits of ours, up to `tip`, that a restored database does not know: saves are outdated.

        `found`: commit and blob by path. Later saves are edits of these blobs. Raises LockLostError.
        """
        records = [(self._site, encode_path(path), commit) for path, (commit, _) in found.items()]
        with locked(self._database, self._site, self._token) as connection:
            connection.cursor().executemany(_OUTDATE, records)
        self.remember({path: BaseVersion(blob) for path, (_, blob) in found.items()}, {}, tip)

    def remember(
        self, versions: Mapping[str, BaseVersion], contents: Mapping[str, bytes], tip: str | None = None
    ) -> None:
        """Store the versions, each in place of what was known of its path. Raises LockLostError.

        `contents`: by blob, the contents of base versions that the remote does not have.
        """
        records = [
            {
                "path": path_field(path),
                "base": version.blob,
                "conflict": json.dumps({slug: each._asdict() for slug, each in version.conflicts.items()})
                if version.conflicts
                else None,
                "kept": version.blob if version.blob in contents else None,
            }
            for path, version in versions.items()
        ]
        kept = tuple(SubmittedFile("", "", blob, 0.0) for blob in contents)
        values = (tip, self._site, self._token, json.dumps(records))
        self._bases.clear()
        with self._database.transaction() if kept else self._database.connection() as connection:
            store_blobs(connection, PayloadSource(Payload(kept), contents.__getitem__))
            if connection.execute(_REMEMBER, values).fetchone() is None:
                lock_site(connection, self._site, self._token)
