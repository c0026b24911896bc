"""One process of the lock's race and fault tests: takes the lock again and again, or once and stays.

Whether two hold it at once is proven without it: a holder links a marker into place, which fails when there
is one, and the marker names a file on which its process keeps a POSIX lock as long as it lives, stopped or
not, in whatever PID namespace. A marker of a live process met by a holder is an overlap.
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from briter_worker.lock import AnotherWorkerError, SiteLock


def note(folder: Path, log: str, words: str) -> None:
    descriptor = os.open(folder / log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{time.monotonic()} {words}\n".encode())
    os.close(descriptor)


def lives(folder: Path, name: str) -> bool:
    """Whether the process that keeps this name's file locked is there still."""
    with (folder / f"alive-{name}").open("rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def race(folder: Path, name: str) -> None:
    """Until killed: take the lock, mark it, work a little, unmark it, release it."""
    # Opened before the lock and kept: at the end, descriptors close in order, so this one goes first.
    with (folder / f"alive-{name}").open("wb") as alive:
        fcntl.lockf(alive, fcntl.LOCK_EX)
        mine, marker = folder / f"marker-{name}", folder / "marker"
        mine.write_text(name)
        dice = random.Random(name)
        lock = SiteLock(folder / "worker.lock", stale_after=60)
        while True:
            try:
                lock.acquire(time.time())
            except AnotherWorkerError:
                time.sleep(dice.uniform(0.001, 0.004))
                continue
            try:
                marker.hardlink_to(mine)
            except FileExistsError:
                if lives(folder, before := marker.read_text()):
                    note(folder, "overlaps", f"{name} met {before}")
                marker.unlink()
                marker.hardlink_to(mine)
            note(folder, "taken", name)
            time.sleep(dice.uniform(0, 0.004))
            lock.beat(time.time())
            if not lock.still_ours():
                note(folder, "overlaps", f"{name} lost it")
            marker.unlink()
            lock.release()
            time.sleep(dice.uniform(0, 0.004))


def hold(folder: Path, _name: str) -> None:
    """Take the lock once, say so, and stay."""
    lock = SiteLock(folder / "worker.lock", stale_after=60)
    lock.acquire(time.time())
    print(os.getpid(), flush=True)
    signal.pause()


def hold_with_child(folder: Path, _name: str) -> None:
    """As `hold`, with a child that has the descriptor."""
    lock = SiteLock(folder / "worker.lock", stale_after=60)
    lock.acquire(time.time())
    print(subprocess.Popen(["sleep", "600"], pass_fds=[lock.descriptor()]).pid, flush=True)
    signal.pause()


if __name__ == "__main__":
    acts = {f.__name__: f for f in (race, hold, hold_with_child)}
    acts[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
