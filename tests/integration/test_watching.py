"""A worker is woken by the folder, not only by the poll."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from sites import eventually

from briter_worker.queues.watching import FolderWaker

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site


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


def test_a_save_is_published_long_before_the_next_poll(site: Site) -> None:
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        eventually((site.storage / "worker.lock").exists)
        for slug in "abc":
            site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
            site.save(slug, [f"content/posts/{slug}.md"])
            eventually(partial(is_newest, site, f"Publish {slug}"))
