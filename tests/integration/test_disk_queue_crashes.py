"""The queue at every system call that changes the disk: killed there, or refused there.

A forked process runs one operation and dies, without any clean-up, just before its n-th change; the next
worker starts on what is left. And the same operation meets a full disk at its n-th change, and goes on.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from disk_steps import killed_at, refused_at
from queue_engines import NOW, Disk

from briter_worker.errors import Failure
from briter_worker.job import State, format_time
from briter_worker.ports import Plan
from briter_worker.queues.sighting import look

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from briter_worker.job import Job
    from briter_worker.ports import Batch


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: hundreds of small queues, each flushed again and again."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def batch_of(disk: Disk, now: float = NOW) -> Batch:
    batch = disk.queue.claim(now).batch
    assert batch is not None
    return batch


def several(disk: Disk) -> None:
    """One post twice, one on hold twice, a dead letter under a new save, two plain ones, two bad files."""
    disk.save("dead", ["lost"], created=NOW - 20)
    batch = batch_of(disk)
    disk.queue.bury(batch, batch.claims[0], Failure.NETWORK, "down")
    disk.queue.close(batch)
    disk.save("dead", ["d"], created=NOW - 9, name="again")
    disk.save("twice", ["t1"], created=NOW - 9, name="t1")
    disk.save("twice", ["t2"], created=NOW - 8, name="t2")
    disk.save("held", ["h1"], created=NOW - 9, name="h1")
    disk.save("held", ["h2"], created=NOW - 8, name="h2", scheduledFor=format_time(NOW + 1000))
    disk.save("plain", ["p"], created=NOW - 7)
    disk.save("other", ["o"], created=NOW - 6)
    for name, data in (("torn", b"{"), ("wrong", b'{"slug": 3}')):
        path = disk.root / f"{name}.json"
        path.write_bytes(data)
        os.utime(path, (NOW - 60, NOW - 60))


SEVERAL = {
    "dead": {"lost", "d"}, "twice": {"t1", "t2"}, "held": {"h1", "h2"}, "plain": {"p"}, "other": {"o"},
    "torn": set(), "wrong": set(),
}  # fmt: skip


def claim_several(disk: Disk) -> Callable[[], object]:
    several(disk)
    return lambda: disk.queue.claim(NOW)


def _in_flight(disk: Disk) -> Batch:
    several(disk)
    batch = batch_of(disk)
    disk.save("plain", ["p2"], created=NOW - 1, name="p2")
    return batch


def put_off(disk: Disk) -> Callable[[], object]:
    batch = _in_flight(disk)

    def operation() -> None:
        for claim in batch.claims:
            disk.queue.put_off(batch, claim, Failure.LOST_RACE, "busy", NOW + 5)

    return operation


def bury(disk: Disk) -> Callable[[], object]:
    batch = _in_flight(disk)

    def operation() -> None:
        for claim in batch.claims:
            disk.queue.bury(batch, claim, Failure.LOST_RACE, "busy")

    return operation


def release(disk: Disk) -> Callable[[], object]:
    batch = _in_flight(disk)

    def operation() -> None:
        disk.queue.release(batch, batch.claims)
        disk.queue.close(batch)

    return operation


def recover(disk: Disk) -> Callable[[], object]:
    _in_flight(disk)
    disk.die()
    return lambda: [disk.queue.retake(found, NOW) for found in disk.queue.recover(NOW)]


def record(disk: Disk) -> Callable[[], object]:
    batch = _in_flight(disk)
    plan = Plan("1" * 40, "2" * 40, "refs/briter/x", {}, {}, dry_run=False)

    def operation() -> None:
        disk.queue.begin(batch)
        disk.queue.record(batch, plan)

    return operation


def revive(disk: Disk) -> Callable[[], object]:
    several(disk)
    return lambda: disk.queue.revive(NOW)


def retry(disk: Disk) -> Callable[[], object]:
    several(disk)
    return lambda: disk.queue.retry_all(NOW)


OPERATIONS = [claim_several, put_off, bury, release, recover, record, revive, retry]


def _waiting(disk: Disk) -> list[Job]:
    """As the files say: the view shows a job that is in both places once."""
    sightings = [look(path, path.name) for path in disk.root.glob("*.json")]
    return [sighting.job for sighting in sightings if sighting.job is not None]


def everything(disk: Disk) -> dict[str, set[str]]:
    """Let go of all that is in flight, tidy, and see which slugs and paths are there."""
    left = disk.queue.recover(NOW)
    again = {(claim.job.id, claim.job.created_at) for batch in left for claim in batch.claims}
    waiting = {(job.id, job.created_at) for job in _waiting(disk)}
    assert not waiting & again, "settled, and to be done again"
    for batch in left:
        disk.queue.release(batch, batch.claims)
        disk.queue.close(batch)
    for now in (NOW, NOW + 1, NOW + 200):
        taken = disk.queue.claim(now).batch
        if taken is not None:
            disk.queue.release(taken, taken.claims)
            disk.queue.close(taken)
    rows = disk.queue.jobs(NOW)
    pending = Counter(row.job.slug for row in rows if row.state is not State.FAILED)
    assert max(pending.values()) == 1, "a slug has two pending jobs"
    assert State.CLAIMED not in {row.state for row in rows}
    hidden = [p.name for p in (disk.root / ".claimed").iterdir() if p.name != ".lock"]
    assert hidden == [], "left in flight"
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.job.slug, set()).update(row.job.paths)
    return found


def check(disk: Disk, expected: dict[str, set[str]]) -> None:
    found = everything(disk)
    assert {slug: found.get(slug) for slug in expected} == expected
    # A file put aside twice, by a crash in the middle, shows twice; nothing else may be new.
    assert {slug.rstrip("-2") for slug in found} == set(expected)
    kept = {entry.path.read_bytes() for entry in disk.queue.quarantined()}
    assert kept == {b"{", b'{"slug": 3}'}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_dying_at_any_step_loses_no_save_and_no_path(
    folder: Path, operation: Callable[[Disk], Callable[[], object]]
) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        went_on = killed_at(step, operation(disk))
        expected = SEVERAL | ({"plain": {"p", "p2"}} if (disk.root / "p2.json").exists() else {})
        disk.die()
        check(disk, expected)
        if not went_on:
            assert step > 3  # there was something to die at
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_disk_at_any_step_loses_no_save_and_no_path(
    folder: Path, operation: Callable[[Disk], Callable[[], object]], *, lasting: bool
) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        hit = refused_at(step, operation(disk), lasting=lasting)
        expected = SEVERAL | ({"plain": {"p", "p2"}} if (disk.root / "p2.json").exists() else {})
        check(disk, expected)
        if not hit:
            return
    pytest.fail("it never ended")


def test_a_claim_that_a_full_disk_refused_is_made_up_for_by_the_next_one(folder: Path) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        several(disk)
        taken: list[Batch] = []

        def claim(disk: Disk = disk, taken: list[Batch] = taken) -> None:
            taken += filter(None, [disk.queue.claim(NOW).batch])

        hit = refused_at(step, claim, lasting=False)
        claim()
        slugs = sorted(claim.job.slug for batch in taken for claim in batch.claims)
        assert slugs == ["dead", "other", "plain", "twice"], f"step {step}"
        if not hit:
            return


def test_dying_while_finishing_leaves_a_job_in_flight_or_gone(folder: Path) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        batch = _in_flight(disk)

        def finish(disk: Disk = disk, batch: Batch = batch) -> None:
            disk.queue.finish(batch, batch.claims)
            disk.queue.close(batch)

        went_on = killed_at(step, finish)
        disk.die()
        for left in disk.queue.recover(NOW):
            disk.queue.finish(left, left.claims)
            disk.queue.close(left)
        found = everything(disk)
        if any(slug in found for slug in ("dead", "twice", "other")):
            pytest.fail(f"step {step}: {found}")
        assert (found["plain"], found["held"]) == ({"p2"}, {"h1", "h2"})
        if not went_on:
            return


def test_what_a_full_disk_kept_from_being_finished_is_finished_by_the_next_attempt(folder: Path) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        batch = _in_flight(disk)
        hit = refused_at(step, partial(disk.queue.finish, batch, batch.claims), lasting=False)
        again = disk.queue.claim(NOW + 1).batch
        disk.queue.finish(batch, batch.claims)
        disk.queue.close(batch)
        assert again is not None
        assert [claim.job.paths for claim in again.claims] == [("p2",)], f"step {step}"
        disk.queue.finish(again, again.claims)
        disk.queue.close(again)
        disk.die()
        assert list(disk.queue.recover(NOW)) == []
        assert {row.job.slug for row in disk.queue.jobs(NOW)} == {"held", "torn", "wrong"}, f"step {step}"
        if not hit:
            assert step > 3
            return
    pytest.fail("it never ends")


def test_dying_while_dropping_what_was_cancelled_never_cancels_the_next_save(folder: Path) -> None:
    for step in range(1, 100):
        disk = Disk(folder / str(step))
        disk.save("a", ["a"], name="a")
        batch = batch_of(disk)
        disk.queue.cancel("a", NOW)
        died = killed_at(step, partial(disk.queue.drop, batch, batch.claims))
        disk.die()
        for left in disk.queue.recover(NOW):
            disk.queue.drop(left, left.claims)
            disk.queue.close(left)
        disk.save("a", ["again"], name="a")
        again = batch_of(disk)
        assert disk.queue.cancelled(again) == set(), f"step {step}"
        if not died:
            return
    pytest.fail("it never ends")


def test_dying_while_cancelling_leaves_the_job_waiting_or_gone(folder: Path) -> None:
    for step in range(1, 1000):
        disk = Disk(folder / str(step))
        several(disk)
        went_on = killed_at(step, lambda disk=disk: disk.queue.cancel("twice", NOW))  # type: ignore[misc]
        disk.die()
        found = everything(disk)
        assert found.get("twice", {"t2"}) <= {"t1", "t2"}
        assert {slug: found[slug] for slug in ("held", "plain")} == {"held": {"h1", "h2"}, "plain": {"p"}}
        if not went_on:
            assert "twice" not in found
            return
