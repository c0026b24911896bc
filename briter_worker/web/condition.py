"""The site's condition in one sentence, from what the snapshot shows: what matters most, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.errors import for_people
from briter_worker.web import words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.web.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Condition:
    """How the site is, in one sentence. `tone` is good, busy, warn or bad."""

    tone: str
    headline: str
    detail: str = ""
    fix: str = ""


def condition_of(snapshot: Snapshot, problem: str | None) -> Condition:
    """What matters most."""
    return next(_conditions(snapshot, problem))


def obstacle(snapshot: Snapshot, problem: str | None) -> Condition | None:
    """What keeps any post from going live, whichever page one looks at."""
    return next(_obstacles(snapshot, problem), None)


def _conditions(snapshot: Snapshot, problem: str | None) -> Iterator[Condition]:
    waiting, again, dead = len(snapshot.pending), len(snapshot.retrying), len(snapshot.failed)
    if snapshot.is_first and problem is None:
        yield Condition("busy", "The queue is being looked at", "This page shows it in a moment.")
    yield from _obstacles(snapshot, problem)
    if snapshot.in_flight:
        yield Condition("busy", f"{words.count(len(snapshot.in_flight), 'post')} on the way to the remote")
    if dead:
        yield Condition("warn", f"{words.count(dead, 'post')} {'need' if dead > 1 else 'needs'} a hand")
    if again:
        yield Condition("warn", f"{words.count(again, 'post')} will be tried again soon")
    if waiting:
        yield Condition("busy", f"{words.count(waiting, 'post')} about to be published")
    yield _nothing_to_do(dry_run=snapshot.standing.dry_run)


def _obstacles(snapshot: Snapshot, problem: str | None) -> Iterator[Condition]:
    standing, waiting = snapshot.standing, len(snapshot.pending)
    if problem is not None:
        yield Condition("bad", "The queue cannot be read", problem)
    if standing.paused is not None:
        yield Condition("warn", words.pause_in_words(standing.paused), for_people(standing.paused.reason))
    if standing.condition is not None:
        why = words.reason(standing.failure, standing.condition)
        yield Condition("bad", f"Nothing goes live: {why.headline}", why.detail, why.fix)
    if waiting and not standing.has_worker:
        verb = "wait" if waiting > 1 else "waits"
        text = f"{words.count(waiting, 'post')} {verb}, and no worker is running"
        where = "on the server" if standing.hosts is None else "on a host of the cluster"
        yield Condition("bad", text, "", f"Start the worker {where}: briter-worker run")


def _nothing_to_do(*, dry_run: bool) -> Condition:
    if not dry_run:
        return Condition("good", "Everything that was saved is live")
    fix = "Set BRITER_WORKER_DRY_RUN=false on the server: what was tried so far goes live then, too."
    return Condition(
        "busy", "Everything that was saved was tried, but in a dry run nothing goes live", "", fix
    )
