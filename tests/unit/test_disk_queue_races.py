"""A writer in another process, renaming saves over the same name while the queue works on it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from disk_steps import before_change
from queue_backends import NOW, Disk

from briter_worker.errors import DeclinedError, Failure, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.events import Quarantined
    from briter_worker.ports import Claim


_WRITER = Path(__file__).with_name("race_writer.py")


def one_round(disk: Disk, seen: set[str], dice: random.Random) -> None:
    """Claim, and settle in any of the ways; what is acknowledged counts as published."""
    claims = disk.queue.claim(NOW).claims
    for claim in claims:
        match dice.randrange(5):
            case 0:
                disk.queue.retry_later(claim, Failure(FailureCode.LOST_RACE, "lost"), at=NOW)
            case 1:
                disk.queue.dead_letter(claim, Failure(FailureCode.NETWORK, "down"))
            case 2:
                disk.queue.release([claim])
            case _:
                disk.queue.acknowledge([claim], {})
                seen.update(claim.job.paths)
    if claims and dice.randrange(4) == 0:
        disk.queue.requeue(NOW)
    if claims and dice.randrange(6) == 0:
        disk.restart()  # what is in memory must not matter
        disk.queue.release(disk.queue.recover(NOW))


def _listen(output: IO[str], said: list[str]) -> None:
    said.append(output.readline())


@pytest.mark.parametrize(("name", "bursts"), [("post", 150), ("-", 25)], ids=["one name", "many names"])
def test_no_save_is_lost_to_a_writer_that_renames_over_the_same_name(
    tmp_path: Path, name: str, bursts: int
) -> None:
    disk, dice, seen = Disk(tmp_path), random.Random(1), set[str]()
    saves = 20
    command = [sys.executable, str(_WRITER), str(disk.root), str(bursts), str(saves), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(bursts):
            said: list[str] = []
            listener = threading.Thread(target=_listen, args=(writer.stdout, said))
            listener.start()
            while listener.is_alive():
                one_round(disk, seen, dice)
            listener.join()
            last = said[0].strip()
            disk.queue.requeue(NOW)
            while claims := disk.queue.claim(NOW).claims:
                disk.queue.acknowledge(claims, {})
                seen.update(path for claim in claims for path in claim.job.paths)
            assert last in seen, f"the newest save, {last}, is lost"
            assert disk.rows("post") == []
            writer.stdin.write("\n")
            writer.stdin.flush()
    if name == "-":
        # The writer itself replaced none of them: each save's path must have come out.
        assert seen == {str(number) for number in range(1, bursts * saves + 1)}


def test_a_command_line_beside_the_worker_neither_loses_nor_doubles_a_job(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    person = Disk(tmp_path)
    count = 300
    for number in range(count):
        disk.save(f"s{number}", ["x"])
    cancelled: list[str] = []

    def cancel_many() -> None:
        for number in range(count):
            try:
                cancelled.extend(job.slug for job in person.queue.cancel(f"s{number}", NOW).removed)
            except DeclinedError:
                person.queue.jobs(NOW)

    thread = threading.Thread(target=cancel_many)
    thread.start()
    finished: list[str] = []
    while thread.is_alive():
        claims = disk.queue.claim(NOW).claims
        disk.queue.acknowledge(claims[::2], {})
        finished += [claim.job.slug for claim in claims[::2]]
        cancelled += [claim.job.slug for claim in disk.queue.release(claims[1::2])]
    while claims := disk.queue.claim(NOW).claims:
        disk.queue.acknowledge(claims, {})
        finished += [claim.job.slug for claim in claims]
    assert sorted(finished + cancelled) == sorted(f"s{number}" for number in range(count))


STEPS = range(1, 200)


def claimed(disk: Disk, now: float = NOW) -> Sequence[Claim]:
    claims = disk.queue.claim(now).claims
    assert claims
    return claims


class Run:
    """A worker that publishes all it claims, and notes it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.published: Counter[str] = Counter()
        self.paths: set[str] = set()
        self.quarantined: list[Quarantined] = []

    def __call__(self, now: float = NOW) -> None:
        found = self.disk.queue.claim(now)
        self.quarantined += found.quarantined
        self.published.update(claim.job.slug for claim in found.claims)
        self.paths.update(path for claim in found.claims for path in claim.job.paths)
        self.disk.queue.acknowledge(found.claims, {})

    def go_on(self, *moments: float) -> None:
        """What nobody was told of is found, too."""
        for now in moments:
            self(now)
        hidden = [path.name for path in (self.disk.root / ".claimed").iterdir() if path.name != ".lock"]
        assert hidden == [], "left in flight"


# Gone


def one(disk: Disk) -> None:
    disk.save("a", ["a"], name="a")


def several(disk: Disk) -> None:
    disk.save("a", ["a1"], created=NOW - 9, name="a1")
    disk.save("a", ["a2"], created=NOW - 8, name="a2")


def torn(disk: Disk) -> None:
    disk.put("a.json", b"{")


@pytest.mark.parametrize("made", [one, several, torn])
def test_what_somebody_removes_at_any_step_of_a_claim_is_in_nobodys_way(
    tmp_path: Path, made: Callable[[Disk], None]
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        made(disk)
        disk.save("other", ["x"], name="other")
        run = Run(disk)

        def remove(disk: Disk = disk) -> None:
            for path in disk.root.glob("a*.json"):
                path.unlink()

        reached = before_change(step, remove, run)
        assert run.published["other"] == 1, f"at step {step}"
        run.go_on(NOW, NOW)
        assert run.published["other"] == 1, f"at step {step}"
        assert run.published["a"] + len(run.quarantined) <= 1, f"at step {step}"
        if not reached:
            assert run.published["a"] + len(run.quarantined) == 1
            assert step > 5
            return
    pytest.fail("it never ends")


# Not to be read


def path_of(name: Any, folder: int | None) -> Path:  # noqa: ANN401 - as os.open
    return Path(name) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / name


def bind(path: Path) -> None:
    # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
        sock.bind(path.name)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), bind, os.mkfifo, os.mkdir])
def test_what_takes_the_place_of_a_file_before_it_is_read_is_never_followed_nor_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    one(disk)
    opened = os.open

    def then_another(path: Any, flags: int, *rest: Any, **keys: Any) -> int:  # noqa: ANN401 - as os.open
        if os.path.basename(path).removeprefix(".") == "a.json" and not flags & (os.O_CREAT | os.O_WRONLY):  # noqa: PTH119
            monkeypatch.undo()
            there = path_of(path, keys.get("dir_fd"))
            there.unlink()
            make(there)
        return opened(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", then_another)
    assert disk.queue.unusable_files(NOW) == {"a.json": "it is not a regular file"}
    (aside,) = disk.queue.claim(NOW).quarantined
    assert "it is not a regular file" in aside.error
    assert not stat.S_ISREG(Path(aside.file).lstat().st_mode)
