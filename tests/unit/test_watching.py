"""A worker is woken by the folder, not only by the poll, and reads only what changed."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from queue_backends import NOW, Disk
from sites import eventually

from briter_worker.errors import DeclinedError

if TYPE_CHECKING:
    import pytest
    from sites import Site

    from briter_worker.queues.disk.queue import DiskQueue


def write(folder: Path, name: str, year: int, *, in_place: bool = False) -> None:
    document = {"slug": name, "paths": ["content/a.md"], "scheduledFor": f"{year}-01-01"}
    file = folder / f"{name}.json"
    if in_place:
        file.write_text(json.dumps(document))
    else:
        other = folder / f"{name}.partial"
        other.write_text(json.dumps(document))
        other.rename(file)


class Watched:
    """A queue that the kernel tells what changes in its folder."""

    def __init__(self, root: Path) -> None:
        self.disk = Disk(root)
        self.folder = self.disk.root
        self.queue = self.disk.queue
        self.watcher = self.queue.watcher
        self.queue.jobs(NOW)

    def assert_knows_all(self) -> None:
        self.disk.restart()
        assert rows(self.queue) == rows(self.disk.queue)


def rows(queue: DiskQueue) -> list[tuple[str, str, float | None]]:
    return sorted((row.where, row.state.value, row.job.scheduled_for) for row in queue.jobs(NOW))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(range(8))), max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_the_kernel_names_is_all_that_has_to_be_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    watched = Watched(tmp_path_factory.mktemp("told"))
    for number, (name, what) in enumerate(changes):
        file, year = watched.folder / f"{name}.json", 2040 + number
        match what:
            case 0 | 1:
                write(watched.folder, name, year)
            case 2:
                write(watched.folder, name, year, in_place=True)
            case 3:
                file.unlink(missing_ok=True)
            case 4 if file.exists():
                file.rename(watched.folder / f"{name}-moved.json")
            case 5:
                file.write_text("{ half")
            case 6:
                watched.disk.restart()
                with suppress(DeclinedError):
                    watched.disk.queue.publish_now(name, NOW)  # by another process
            case 7:
                rows(watched.queue)
    watched.assert_knows_all()


def test_more_than_the_kernel_remembers_is_found_all_the_same(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    write(watched.folder, "c", 2040)
    assert rows(watched.queue)
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with (watched.folder / "a").open("wb", 0) as one, (watched.folder / "b").open("wb", 0) as other:
        for _ in range(most // 2 + 10):
            one.write(b".")  # one after the other: the kernel reports the same change once
            other.write(b".")
    write(watched.folder, "c", 2041, in_place=True)
    watched.assert_knows_all()


def is_newest(site: Site, subject: str) -> bool:
    return site.remote_log()[0][1] == subject


def test_a_save_is_published_long_before_the_next_poll(site: Site) -> None:
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        eventually((site.storage / "worker.lock").exists)
        for slug in "abc":
            site.save_post(slug, f"{slug}\n")
            eventually(partial(is_newest, site, f"Publish {slug}"))
