"""Several saves of one post become one: the newest, with what the older ones had not published yet.

The caller has the site's lock, so that nobody writes beside it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, Kind
from briter_worker.job import joined
from briter_worker.queues.index import kind_of
from briter_worker.queues.postgres import contents, rows
from briter_worker.queues.postgres.rows import COLUMNS, Save

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from briter_worker.queues.postgres.database import Connection

WAITING, CLAIMED, FAILED, TRIED, ARRIVING = "waiting", "claimed", "failed", "tried", "arriving"

# The state is written out, so that the index for it is used however the statement is planned.
_RIVALS = {
    state: (
        f"SELECT {COLUMNS} FROM publications WHERE site = %s AND state = '{state}' AND slug = ANY(%s)"  # noqa: S608
    ).encode()
    for state in (WAITING, FAILED, TRIED)
}
_TAKE_FILES = """
INSERT INTO delivered AS d (publication, path, mode, blob, base, knows_base, saved_at)
SELECT DISTINCT ON (m.winner, o.path) m.winner, o.path, o.mode, o.blob, o.base, o.knows_base, o.saved_at
FROM unnest(%(losers)s::bigint[], %(winners)s::bigint[]) AS m (loser, winner)
JOIN delivered o ON o.publication = m.loser
ORDER BY m.winner, o.path, o.saved_at DESC, o.publication DESC
ON CONFLICT (publication, path) DO UPDATE SET
    mode = CASE WHEN excluded.saved_at > d.saved_at THEN excluded.mode ELSE d.mode END,
    blob = CASE WHEN excluded.saved_at > d.saved_at THEN excluded.blob ELSE d.blob END,
    base = CASE WHEN excluded.knows_base AND (excluded.saved_at > d.saved_at OR NOT d.knows_base)
                THEN excluded.base ELSE d.base END,
    knows_base = d.knows_base OR excluded.knows_base,
    saved_at = greatest(d.saved_at, excluded.saved_at)
"""
_TAKE_FOLDERS = """
INSERT INTO folders AS f (publication, path, saved_at)
SELECT m.winner, o.path, max(o.saved_at)
FROM unnest(%(losers)s::bigint[], %(winners)s::bigint[]) AS m (loser, winner)
JOIN folders o ON o.publication = m.loser
GROUP BY m.winner, o.path
ON CONFLICT (publication, path) DO UPDATE SET saved_at = greatest(f.saved_at, excluded.saved_at)
"""
# A folder was sent whole: a file below it that is older was not in it any more.
_DROP_GONE = """
DELETE FROM delivered d USING folders f
WHERE d.publication = ANY(%(winners)s) AND f.publication = d.publication AND d.saved_at < f.saved_at
AND substring(d.path FROM 1 FOR length(rtrim(f.path, '/')) + 1) = rtrim(f.path, '/') || '/'
"""


def rivals(connection: Connection, site: str, slugs: Collection[str], state: str) -> dict[str, list[Save]]:
    """The saves of these slugs that are in this state, by slug."""
    found: dict[str, list[Save]] = defaultdict(list)
    for row in connection.execute(_RIVALS[state], (site, list(slugs))):
        save = Save.read(row)
        found[save.job.slug].append(save)
    return found


def place(
    connection: Connection,
    site: str,
    saves: Sequence[Save],
    state: str,
    now: float,
    *,
    others: Mapping[str, list[Save]] | None = None,
) -> None:
    """These rows of the site are in this state now, each joined with the slug's `others` that are in it.

    What gives way is gone, and noted for the next claim to report; but what a dry run has published has
    been reported already.
    """
    if not saves:
        return
    if others is None:
        others = rivals(connection, site, {save.job.slug for save in saves}, state)
    crowds: dict[str, list[Save]] = defaultdict(list)
    ready: list[Save] = []
    for save in saves:
        crowds[save.job.slug].append(save)
    losers: list[tuple[Save, Save]] = []
    for slug, crowd in crowds.items():
        known = {save.id for save in crowd}
        crowd += [other for other in others.get(slug, ()) if other.id not in known]
        if state == FAILED:
            # One that names a file put aside stands for nothing but itself.
            ready += [save for save in crowd if _names_a_file(save) and save.id in known]
        rivalry = [save for save in crowd if state != FAILED or not _names_a_file(save)]
        if rivalry:
            winner, older = join(rivalry)
            ready.append(winner)
            losers += [(loser, winner) for loser in older]
    if losers:
        gone = [loser.id for loser, _ in losers]
        blobs = _blobs(connection, [*gone, *(winner.id for _, winner in losers)])
        _hand_over(connection, [(loser.id, winner.id) for loser, winner in losers])
        connection.execute("DELETE FROM publications WHERE id = ANY(%s)", (gone,))
        if state != TRIED:
            _note(connection, site, losers)
        rows.update(connection, ((save, state) for save in ready), now)
        contents.forget(connection, blobs)
    else:
        rows.update(connection, ((save, state) for save in ready), now)


def join(crowd: Iterable[Save]) -> tuple[Save, list[Save]]:
    """The newest of these, declaring what all of them do, and the older ones."""
    winner, *older = sorted(crowd, key=lambda save: save.order, reverse=True)
    return declaring(winner, older), older


def lost_by(save: Save, letters: Iterable[Save]) -> list[Save]:
    """The older dead letters that bad luck made, whose paths this save's publication brings along.

    What was refused is not carried on: it would have the newer save refused, too.
    """
    return [
        letter
        for letter in letters
        if letter.job.created_at <= save.job.created_at
        and kind_of(letter.job) in {Kind.TRANSIENT, Kind.ENVIRONMENT}
    ]


def declaring(save: Save, others: Sequence[Save]) -> Save:
    """The save, declaring what these do, too."""
    return save.with_paths(joined(save.job.paths, *(other.job.paths for other in others)))


def redeclare(connection: Connection, saves: Sequence[Save]) -> None:
    """These rows declare the paths that the saves do now, and are otherwise as they were."""
    connection.execute(
        "UPDATE publications p SET document = n.document,"
        " paths = ARRAY(SELECT json_array_elements_text(n.paths::json))"
        " FROM unnest(%s::bigint[], %s::text[], %s::text[]) AS n (id, document, paths) WHERE p.id = n.id",
        (
            [save.id for save in saves],
            [save.text for save in saves],
            [json.dumps(save.job.paths) for save in saves],
        ),
    )


def hand_over(connection: Connection, pairs: Sequence[tuple[int, int]]) -> None:
    """What came with the first of each pair is the second's, too, but for what that one has newer."""
    blobs = _blobs(connection, [winner for _, winner in pairs])
    _hand_over(connection, pairs)
    contents.forget(connection, blobs)


def _hand_over(connection: Connection, pairs: Sequence[tuple[int, int]]) -> None:
    pairing = {"losers": [loser for loser, _ in pairs], "winners": [winner for _, winner in pairs]}
    connection.execute(_TAKE_FILES, pairing)
    connection.execute(_TAKE_FOLDERS, pairing)
    connection.execute(_DROP_GONE, pairing)


def discard(connection: Connection, ids: Sequence[int]) -> None:
    """These rows are gone, with what came with them, as far as no other needs it."""
    if not ids:
        return
    blobs = _blobs(connection, ids)
    connection.execute("DELETE FROM publications WHERE id = ANY(%s)", (list(ids),))
    contents.forget(connection, blobs)


def _blobs(connection: Connection, ids: Sequence[int]) -> list[str]:
    rows = connection.execute(
        "SELECT DISTINCT blob FROM delivered WHERE publication = ANY(%s) AND blob IS NOT NULL", (list(ids),)
    )
    return [blob for (blob,) in rows]


def _note(connection: Connection, site: str, losers: Iterable[tuple[Save, Save]]) -> None:
    told = [(loser.job, winner.job) for loser, winner in losers if loser.job.id != winner.job.id]
    connection.execute(
        "INSERT INTO superseded (site, job_id, slug, by_job)"
        " SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::text[])",
        (
            site,
            [loser.id for loser, _ in told],
            [loser.slug for loser, _ in told],
            [winner.id for _, winner in told],
        ),
    )


def _names_a_file(save: Save) -> bool:
    return save.job.failure in {Failure.UNREADABLE, Failure.MALFORMED}
