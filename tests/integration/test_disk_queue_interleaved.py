"""A writer, a worker or a reader that acts just between two steps of another, at each such moment."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_steps import before_change, killed_at
from queue_engines import NOW, Disk
from sites import eventually

from briter_worker.errors import Failure
from briter_worker.job import State
from briter_worker.queues.flight import Flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.ports import Batch


def batch_of(disk: Disk, now: float = NOW) -> Batch:
    batch = disk.queue.claim(now).batch
    assert batch is not None
    return batch


@pytest.mark.parametrize("status", ["pending", "failed"])
@pytest.mark.parametrize("name", ["older", "newer"])
def test_a_save_of_another_post_over_one_of_several_is_published_without_a_restart(
    tmp_path: Path, name: str, status: str
) -> None:
    for step in range(1, 100):
        disk = Disk(tmp_path / str(step))
        disk.save("a", ["content/1.md"], created=NOW - 9, name="older", status=status)
        disk.save("a", ["content/2.md"], created=NOW - 8, name="newer", status=status)
        disk.save("c", ["content/c.md"])
        published: Counter[str] = Counter()

        def claim(disk: Disk = disk, published: Counter[str] = published) -> None:
            batch = disk.queue.claim(NOW).batch
            if batch is not None:
                published.update(claim.job.slug for claim in batch.claims)
                disk.queue.finish(batch, batch.claims)
                disk.queue.close(batch)

        def save_another(disk: Disk = disk) -> None:
            disk.save("b", ["content/b.md"], name=name)

        reached = before_change(step, save_another, claim)
        disk.queue.notice()
        for _ in range(2):
            claim()
        if not reached:
            assert step > 5
            return
        assert published["b"] == 1, f"at step {step}"
    pytest.fail("it never ends")


@pytest.mark.parametrize("settle", ["put_off", "bury"])
def test_a_job_that_says_already_what_became_of_it_is_not_taken_up_again(tmp_path: Path, settle: str) -> None:
    for step in range(1, 100):
        disk = Disk(tmp_path / str(step))
        disk.save("a", ["content/a.md"])
        batch = batch_of(disk)

        def operation(disk: Disk = disk, batch: Batch = batch) -> None:
            if settle == "put_off":
                disk.queue.put_off(batch, batch.claims[0], Failure.LOST_RACE, "busy", NOW + 5)
            else:
                disk.queue.bury(batch, batch.claims[0], Failure.CONFLICT, "both")

        if not killed_at(step, operation):
            assert step > 3
            return
        disk.die()
        again = [claim for found in disk.queue.recover(NOW) for claim in found.claims]
        said = disk.document("a").get("failure")
        assert bool(again) == (said is None), f"at step {step}"
        if said is not None:
            assert disk.document("a")["attempts"] == 1
            assert [state for state, _ in disk.rows("a")] == [
                State.RETRYING if settle == "put_off" else State.FAILED
            ]
    pytest.fail("it never ends")


def changes_of(operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The links, removals and flushes of folders that it makes, in order, with the folder of each."""
    seen: list[tuple[str, str]] = []
    link, unlink, fsync = os.link, os.unlink, os.fsync

    def linked(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.link
        link(source, target, **keys)
        seen.append(("link", str(Path(target).parent)))

    def unlinked(path: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.unlink
        unlink(path, **keys)
        seen.append(("unlink", str(Path(path).parent)))

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        where = Path(f"/proc/self/fd/{descriptor}").readlink()
        if where.is_dir():
            seen.append(("fsync", str(where)))

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", flushed)
    operation()
    monkeypatch.undo()
    return seen


def test_what_is_given_back_is_durable_in_the_queue_before_it_leaves_the_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.save("a", ["content/a.md"])
    batch = batch_of(disk)
    seen = changes_of(lambda: disk.queue.release(batch, batch.claims), monkeypatch)
    here, there = str(disk.root), str(disk.root / ".claimed")
    assert seen[:4] == [("link", here), ("fsync", here), ("unlink", there), ("fsync", there)]


def test_the_joined_paths_of_the_newest_save_are_durable_before_the_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.save("a", ["content/1.md"], created=NOW - 9, name="older")
    disk.save("a", ["content/2.md"], created=NOW - 8, name="newer")
    seen = changes_of(lambda: disk.queue.claim(NOW), monkeypatch)
    there = str(disk.root / ".claimed")
    assert ("unlink", there) in seen
    assert ("fsync", there) in seen[: seen.index(("unlink", there))]


@pytest.mark.parametrize("moves", [1, 3])
def test_a_job_that_moves_while_somebody_looks_is_seen_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """As it goes out of the folder looked at last into the one looked at first, or back."""
    disk = Disk(tmp_path)
    disk.save("a", ["content/a.md"])
    reader, worker = disk.queue, Disk(tmp_path)
    left = moves
    names = Flight.names
    taken: list[Batch] = []

    def then_it_moves(flight: Flight) -> list[str]:
        nonlocal left
        found = names(flight)
        if left and flight is not worker.queue._flight:  # noqa: SLF001 - only the reader is watched
            left -= 1
            if taken:
                batch = taken.pop()
                worker.queue.release(batch, batch.claims)
                worker.queue.close(batch)
            else:
                taken.append(batch_of(worker))
        return found

    monkeypatch.setattr(Flight, "names", then_it_moves)
    assert [row.job.slug for row in reader.jobs(NOW)] == ["a"]
    assert left == 0


def test_a_queue_that_never_rests_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.save("still", ["content/still.md"], name="still")
    names = Flight.names
    looks = 0

    def then_it_moves(flight: Flight) -> list[str]:
        nonlocal looks
        looks += 1
        disk.save("moving", ["content/moving.md"], created=NOW + looks, name="moving")
        os.utime(disk.root, ns=(0, looks))  # however coarse the clock
        return names(flight)

    monkeypatch.setattr(Flight, "names", then_it_moves)
    assert sorted(row.job.slug for row in disk.queue.jobs(NOW)) == ["moving", "still"]
    assert 1 < looks < 50


def test_a_clock_that_is_set_back_far_gives_due_jobs_no_later_time(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    later = "2027-01-15T08:10:00.000Z"  # NOW + 600
    disk.save("a", ["content/a.md"], attempts=1, nextAttemptAt=later, updatedAt="2027-01-15T08:00:00.000Z")
    # A file that was just written is read again at each look, and so gets its time from the new clock anyway.
    written = (disk.root / "job00001.json").stat().st_ctime
    eventually(lambda: time.time() > written + 0.2)
    assert disk.queue.next_due(NOW) == NOW + 600
    assert disk.queue.next_due(NOW - 0.5) == NOW + 600
    assert disk.queue.next_due(NOW - 86_400) == 0.0  # further away than any backoff: due at once
    assert disk.queue.claim(NOW - 86_400).batch is not None
