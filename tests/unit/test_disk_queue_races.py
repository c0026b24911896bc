"""A writer in another process, renaming saves over the same name while the queue works on it."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest
from queue_backends import NOW, Disk

from briter_worker.errors import DeclinedError, Failure, FailureCode

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
