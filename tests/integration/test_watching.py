"""A worker is woken by the folder, not only by the poll."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sites import eventually

from briter_worker.queues import index, watching
from briter_worker.queues.disk import DiskQueue
from briter_worker.queues.inotify import Inotify
from briter_worker.queues.steering import SteeringError
from briter_worker.queues.watching import FolderWaker

if TYPE_CHECKING:
    from sites import Site


NOW = 1_700_000_000.0


class NeverStop:
    """A worker that nobody stops; the watcher has to wait by itself."""

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        raise AssertionError(f"the folder could not be watched; would have slept {seconds} s")


def is_newest(site: Site, subject: str) -> bool:
    return site.remote_log()[0][1] == subject


def test_what_was_saved_before_the_watch_stood_is_looked_for_at_once(tmp_path: Path) -> None:
    noticed: list[bool] = []
    waker = FolderWaker(tmp_path, lambda: noticed.append(True))
    began = time.monotonic()
    waker.wait(60, NeverStop())
    assert noticed == [True]
    assert time.monotonic() - began < 5


def test_a_change_in_the_folder_ends_the_wait(tmp_path: Path) -> None:
    noticed: list[bool] = []
    waker = FolderWaker(tmp_path, lambda: noticed.append(True))
    waker.wait(60, NeverStop())
    timer = threading.Timer(0.1, (tmp_path / "a.json").touch)
    timer.start()
    waker.wait(60, NeverStop())
    timer.join()
    assert noticed == [True, True]


def test_a_folder_that_takes_the_watched_ones_place_is_watched_in_its_stead(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    folder.mkdir()
    noticed: list[bool] = []
    waker = FolderWaker(folder, lambda: noticed.append(True))
    waker.wait(60, NeverStop())
    folder.rename(tmp_path / "old")
    folder.mkdir()
    waker.wait(60, NeverStop())
    timer = threading.Timer(0.1, (folder / "a.json").touch)
    timer.start()
    began = time.monotonic()
    waker.wait(60, NeverStop())
    timer.join()
    assert noticed == [True, True, True]
    assert time.monotonic() - began < 5


def relied_on(folder: Path) -> list[bool]:
    told: list[bool] = []
    FolderWaker(folder, lambda: None, lambda changes: told.append(changes is not None)).wait(60, NeverStop())
    return told


def test_notices_are_relied_on_only_where_the_kernel_sees_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(watching, "_MOUNTS", mounts)
    answers = {}
    for kind in ("ext4", "tmpfs", "nfs4", "cifs", "9p", "fuse.sshfs", "overlay", "never-heard-of"):
        mounts.write_text(
            f"22 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw,relatime shared:1 - {kind} none rw\n"
            "23 1 250:250 / /elsewhere rw - ext4 none rw\n"
        )
        answers[kind] = relied_on(tmp_path)
    assert answers == {kind: [kind in {"ext4", "tmpfs"}] for kind in answers}
    mounts.unlink()
    assert relied_on(tmp_path) == [False]


def test_a_job_written_in_place_is_found_without_a_notice_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_FULL_SCAN", 0.0)  # the minute is over
    queue = DiskQueue(tmp_path / "queue", tmp_path / "quarantine", max_attempts=8, longest_delay=1800.0)
    file = tmp_path / "queue" / "a.json"
    file.parent.mkdir()
    at_rest = time.time() - 60

    def write(year: int) -> None:
        document = {"slug": "a", "paths": ["content/a.md"], "scheduledFor": f"{year}-01-01T00:00:00Z"}
        with file.open("w") as stream:
            json.dump(document, stream)
        os.utime(file, (at_rest, at_rest))

    def year() -> int:
        return time.gmtime(queue.next_due(time.time()) or 0).tm_year

    write(2040)
    os.utime(file.parent, (at_rest, at_rest))
    eventually(lambda: year() == 2040 and file.stat().st_ctime < time.time() - 0.1)
    assert year() == 2040
    queue.rely_on_notice(lambda _: ())
    assert year() == 2040
    write(2041)
    assert year() == 2040, "the kernel would have given notice"
    queue.notice()
    assert year() == 2041
    queue.rely_on_notice(None)
    write(2042)
    assert year() == 2042


class Watched:
    """A queue that is told by the kernel what changes in its folder."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "queue"
        self.folder.mkdir()
        self.queue = self.fresh(root)
        self.waker = FolderWaker(self.folder, self.queue.notice, self.queue.rely_on_notice)
        self.waker.wait(60, NeverStop())
        self.queue.jobs(NOW)

    def fresh(self, root: Path) -> DiskQueue:
        return DiskQueue(self.folder, root / "quarantine", max_attempts=8, longest_delay=1800.0)

    def write(self, name: str, year: int, *, slug: str = "", in_place: bool = False) -> None:
        document = {"slug": slug or name, "paths": ["content/a.md"], "scheduledFor": f"{year}-01-01"}
        file = self.folder / f"{name}.json"
        other = file if in_place else self.folder / f"{name}.partial"
        with other.open("w") as stream:
            json.dump(document, stream)
        other.rename(file)


def rows(queue: DiskQueue) -> list[tuple[str, str, float | None]]:
    return sorted((row.name, row.state.value, row.job.scheduled_for) for row in queue.jobs(NOW))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(range(8))), max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_the_kernel_tells_is_all_that_has_to_be_looked_at(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("told")
    watched = Watched(root)
    for number, (name, what) in enumerate(changes):
        file, year = watched.folder / f"{name}.json", 2040 + number
        match what:
            case 0 | 1:
                watched.write(name, year)
            case 2:
                watched.write(name, year, in_place=True)
            case 3:
                file.unlink(missing_ok=True)
            case 4 if file.exists():
                file.rename(watched.folder / f"{name}-moved.json")
            case 5:
                file.write_text("{ half")
            case 6:
                with suppress(SteeringError):
                    watched.fresh(root).publish_now(name, NOW)  # by another process, as far as it can tell
            case 7:
                rows(watched.queue)
    assert rows(watched.queue) == rows(watched.fresh(root))


def test_more_than_the_kernel_remembers_is_found_all_the_same(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("c", 2040)
    assert rows(watched.queue)
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with (watched.folder / "a").open("wb", 0) as one, (watched.folder / "b").open("wb", 0) as other:
        for _ in range(most // 2 + 10):
            one.write(b".")  # one after the other: the same again is not told again
            other.write(b".")
    watched.write("c", 2041, in_place=True)
    assert rows(watched.queue) == rows(watched.fresh(tmp_path)) != []


def test_a_folder_that_takes_the_told_ones_place_is_looked_at(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("a", 2040)
    assert rows(watched.queue)
    watched.folder.rename(tmp_path / "old")
    watched.folder.mkdir()
    for year in (2041, 2042):
        watched.write("a", year)
        assert rows(watched.queue) == rows(watched.fresh(tmp_path)) != []
    watched.waker.wait(60, NeverStop())
    watched.write("a", 2043)
    assert rows(watched.queue) == rows(watched.fresh(tmp_path)) != []


def test_a_pause_ends_the_wait_and_a_half_written_file_does_not(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    (watched.folder / ".a.tmp").touch()
    began = time.monotonic()
    watched.waker.wait(0.2, NeverStop())
    assert time.monotonic() - began >= 0.2
    watched.fresh(tmp_path).pause(NOW)
    watched.waker.wait(60, NeverStop())
    assert time.monotonic() - began < 30


def test_what_a_look_has_heard_already_still_ends_the_next_wait(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("a", 2040)
    rows(watched.queue)
    began = time.monotonic()
    watched.waker.wait(60, NeverStop())
    assert time.monotonic() - began < 30


def test_files_that_are_saved_together_end_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_QUIET", 1.0)
    monkeypatch.setattr(watching, "_LONGEST_GATHERING", 5.0)
    noticed: list[bool] = []
    waker = FolderWaker(tmp_path, lambda: noticed.append((tmp_path / "b.json").exists()))
    waker.wait(60, NeverStop())
    timer = threading.Timer(0.2, (tmp_path / "b.json").touch)
    (tmp_path / "a.json").touch()
    timer.start()
    waker.wait(60, NeverStop())
    timer.join()
    assert noticed == [False, True]


class Polled:
    """A worker that has to do with the poll; it notes how long each wait would have been."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_where_no_folder_is_yet_the_poll_does_until_it_can_be_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noticed: list[bool] = []
    told: list[bool] = []
    folder = tmp_path / "queue"
    stop = Polled()
    waker = FolderWaker(folder, lambda: noticed.append(True), lambda changes: told.append(bool(changes)))
    waker.wait(5, stop)
    folder.mkdir()
    waker.wait(6, stop)  # it is not tried again at once
    assert (stop.slept, noticed, told) == ([5, 6], [], [])
    assert waker.changes(watching._identity(folder) or (0, 0)) is None  # noqa: SLF001 - as the queue asks
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    waker.wait(60, NeverStop())
    assert noticed == [True]


def test_a_system_without_inotify_has_the_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())  # a C library of another system
    stop = Polled()
    FolderWaker(tmp_path, lambda: None).wait(5, stop)
    assert stop.slept == [5]
    with pytest.raises(OSError, match="this system has no inotify"):
        Inotify(tmp_path)


def test_a_worker_that_is_stopped_waits_no_longer_and_looks_at_nothing_more(tmp_path: Path) -> None:
    class Stopped(NeverStop):
        def is_set(self) -> bool:
            return True

    noticed: list[bool] = []
    waker = FolderWaker(tmp_path, lambda: noticed.append(True))
    waker.wait(60, NeverStop())
    began = time.monotonic()
    waker.wait(60, Stopped())
    assert noticed == [True]
    assert time.monotonic() - began < 5


def test_a_save_is_published_long_before_the_next_poll(site: Site) -> None:
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        eventually((site.storage / "worker.lock").exists)
        for slug in "abc":
            site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
            site.save(slug, [f"content/posts/{slug}.md"])
            eventually(partial(is_newest, site, f"Publish {slug}"))
