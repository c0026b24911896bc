"""Other file-based queues, each doing with one job what ours does: put it in, take it, have it done.

Run by `benchmarks.queue` in an environment of their own: peers.py FOLDER JOBS; prints seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import persistqueue  # type: ignore[import-not-found]  # not of this project
from huey.storage import FileStorage, SqliteStorage  # type: ignore[import-not-found]  # as above

if TYPE_CHECKING:
    from collections.abc import Callable


def measure(folder: Path, jobs: int) -> dict[str, float]:
    """Seconds for all jobs, one after the other, by each."""
    document = {"id": "job", "slug": "post", "paths": ["content/posts/post.md"], "message": "Publish"}
    data = json.dumps(document).encode()
    stores = {
        "huey, files": FileStorage("bench", path=str(folder / "huey")),
        "huey, SQLite": SqliteStorage("bench", filename=str(folder / "huey.db")),
    }
    ways: dict[str, Callable[[], None]] = {}
    for name, store in stores.items():

        def through_huey(store: FileStorage | SqliteStorage = store) -> None:
            store.enqueue(data)
            if store.dequeue() is None:
                raise RuntimeError("the job is lost")

        ways[name] = through_huey
    rows = persistqueue.SQLiteAckQueue(str(folder / "rows"), auto_commit=True)
    files = persistqueue.Queue(str(folder / "files"), autosave=True)

    def through_rows() -> None:
        rows.put(document)
        rows.ack(rows.get())

    def through_files() -> None:
        files.put(document)
        files.get()
        files.task_done()

    ways |= {"persist-queue, SQLite": through_rows, "persist-queue, files": through_files}
    taken = {}
    for name, way in ways.items():
        began = time.perf_counter()
        for _ in range(jobs):
            way()
        taken[name] = time.perf_counter() - began
    return taken


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
