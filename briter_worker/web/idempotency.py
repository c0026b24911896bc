"""The same request twice is one job: also at once, also after a crash, also after a restart.

What a key stands for is written down before the job is, with the job itself. So whoever comes again with the
key finds either the job, or what is still to be written.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any

from briter_worker.client import submit
from briter_worker.queues import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEPT = 7 * 86400.0
_FOLDER = "requests"
_SWEEP_EVERY = 3600.0


class OtherBodyError(Exception):
    """The key was used for another request."""


class Requests:
    """The keys of the last days, each in a file of its own."""

    def __init__(self, storage: Path, queue: Path, is_known: Callable[[str], bool]) -> None:
        self._folder = storage / _FOLDER
        self._queue = queue
        self._is_known = is_known
        self._swept = 0.0

    def submit(self, key: str, body: Any, compose: Callable[[], dict[str, Any]]) -> tuple[str, bool]:  # noqa: ANN401
        """The id of the key's job, and whether it was there before. Raises OtherBodyError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        print_of_body = _digest(json.dumps(body, sort_keys=True))
        path = self._folder / f"{_digest(key)}.json"
        with files.exclusively(self._folder / ".lock"):
            self._sweep()
            record = self._read(path)
            if record is None:
                record = {"body": print_of_body, "job": compose(), "done": False}
                self._write(path, record)
                known = False
            elif record["body"] != print_of_body:
                raise OtherBodyError
            else:
                known = True
            job = record["job"]
            if not record["done"]:
                # Nobody else is at it, as we hold the lock: it is new, or its maker died.
                if not known or not self._is_known(job["id"]):
                    submit(job, queue=self._queue)
                self._write(path, {**record, "done": True})
            return job["id"], known

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            record = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return record if isinstance(record, dict) and {"body", "job", "done"} <= record.keys() else None

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        files.replace(path, json.dumps(record).encode())
        files.sync_folder(self._folder)

    def _sweep(self) -> None:
        now = time.time()
        if now - self._swept < _SWEEP_EVERY:
            return
        self._swept = now
        for path in self._folder.glob("*.json"):
            if path.stat().st_mtime < now - KEPT:
                path.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
