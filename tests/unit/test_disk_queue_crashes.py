"""The queue at every system call that changes the disk: killed there, refused there, or met by a producer.

A forked process runs one operation and dies, without any clean-up, just before its n-th change; the next
worker starts on what is left. The same operation meets a full disk at its n-th change, and goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import stat
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from queue_backends import NOW, Disk

from briter_worker.errors import DeclinedError, Failure, FailureCode
from briter_worker.job import State, format_time
from briter_worker.queues.disk.files import Folder, JobFile, read_queue_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from briter_worker.job import Job
    from briter_worker.ports import Claim
    from briter_worker.queues.disk.queue import DiskQueue

    Claims = Sequence[Claim]


_CHANGES = ("rename", "replace", "link", "unlink", "write", "fsync", "mkdir")
_DIED = 77
_NO_MORE = 78


@contextmanager
def at_each_change(strike: Callable[[], None]) -> Iterator[None]:
    """`strike` is called before each call that changes the disk."""
    originals = {name: getattr(os, name) for name in _CHANGES} | {"open": os.open}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:  # noqa: ANN401 - any call of os
            if name != "open" or args[1] & os.O_CREAT:
                strike()
            return originals[name](*args, **keys)

        return call

    for name in originals:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def before_change(
    step: int, act: Callable[[], object], operation: Callable[[], object], *, lasting: bool = False
) -> bool:
    """Run it, and `act` just before its change number `step` (and each later one); whether it has so many."""
    left = step

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0 or (lasting and left < 0):
            act()

    with at_each_change(strike):
        operation()
    return left <= 0


def killed_at(step: int, operation: Callable[[], object]) -> bool:
    """Run it in a process that dies before its change number `step`; whether it got that far."""
    child = os.fork()
    if child == 0:
        try:
            before_change(step, lambda: os._exit(_DIED), operation)
        except BaseException:  # noqa: BLE001 - reported by the exit code
            os._exit(1)
        os._exit(_NO_MORE)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {_DIED, _NO_MORE}
    return code == _DIED


def refused_at(step: int, operation: Callable[[], object], *, lasting: bool) -> bool:
    """Run it on a disk that is full at its change number `step`, and maybe from then on."""

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        return before_change(step, refuse, operation, lasting=lasting)
    except OSError as error:
        assert error.errno == errno.ENOSPC  # noqa: PT017 - which of the two it was
        return True


# Killed and refused


STEPS = range(1, 1000)
LOST_RACE = Failure(FailureCode.LOST_RACE, "lost")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: hundreds of small queues, each synced again and again."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def several(disk: Disk) -> Claims:
    """One post twice, one scheduled twice, a dead letter under a new save, a plain one, a bad file."""
    disk.save("dead", ["lost"], created=NOW - 20)
    disk.queue.dead_letter(disk.queue.claim(NOW).claims[0], Failure(FailureCode.NETWORK, "down"))
    disk.save("dead", ["d"], created=NOW - 9, name="again")
    disk.save("twice", ["t1"], created=NOW - 9, name="t1")
    disk.save("twice", ["t2"], created=NOW - 8, name="t2")
    disk.save("held", ["h1"], created=NOW - 9, name="h1")
    disk.save("held", ["h2"], created=NOW - 8, name="h2", scheduledFor=format_time(NOW + 1000))
    disk.save("plain", ["p"], created=NOW - 7)
    disk.put("torn.json", b"{", age=60)
    return ()


SEVERAL = {"dead": {"lost", "d"}, "twice": {"t1", "t2"}, "held": {"h1", "h2"}, "plain": {"p"}, "torn": set()}


def in_flight(disk: Disk) -> Claims:
    several(disk)
    claims = disk.queue.claim(NOW).claims
    disk.save("plain", ["p2"], created=NOW - 1, name="p2")
    return claims


def held(disk: Disk) -> Claims:
    several(disk)
    disk.queue.release(disk.queue.claim(NOW).claims)
    return ()


def crashed(disk: Disk) -> Claims:
    in_flight(disk)
    disk.restart()
    return ()


OPERATIONS: dict[str, tuple[Callable[[Disk], Claims], Callable[[DiskQueue, Claims], object]]] = {
    "claim": (several, lambda queue, _: queue.claim(NOW)),
    "retry_later": (
        in_flight,
        lambda queue, claims: [queue.retry_later(each, LOST_RACE, at=NOW) for each in claims],
    ),
    "dead_letter": (in_flight, lambda queue, claims: [queue.dead_letter(each, LOST_RACE) for each in claims]),
    "mark_tried": (in_flight, lambda queue, claims: queue.mark_tried(claims, NOW)),
    "release": (in_flight, lambda queue, claims: queue.release(claims)),
    "recover": (crashed, lambda queue, _: [queue.reclaim(each, NOW) for each in queue.recover(NOW)]),
    "requeue": (several, lambda queue, _: queue.requeue(NOW)),
    "retry": (several, lambda queue, _: queue.retry_all(NOW)),
    "publish_now": (held, lambda queue, _: queue.publish_now("held", NOW)),
}
"""What comes before each operation, and the operation on what is in flight."""


def prepared(disk: Disk, name: str) -> Callable[[], object]:
    before, operation = OPERATIONS[name]
    claims = before(disk)
    return lambda: operation(disk.queue, claims)


def waiting(disk: Disk) -> list[Job]:
    """As the files say: the list shows a job that is in both places once."""
    with Folder.open(disk.root) as root:
        files = [read_queue_file(root, path.name) for path in disk.root.glob("*.json")]
    return [file.job for file in files if isinstance(file, JobFile)]


def everything(disk: Disk) -> dict[str, set[str]]:
    """Release all that is in flight, tidy, and see which slugs and paths are there."""
    left = disk.queue.recover(NOW)
    again = {(claim.job.id, claim.job.created_at) for claim in left}
    assert not again & {(job.id, job.created_at) for job in waiting(disk)}, "settled, and to be done again"
    disk.queue.release(left)
    for now in (NOW, NOW + 1, NOW + 200):
        disk.queue.release(disk.queue.claim(now).claims)
    rows = disk.queue.jobs(NOW)
    pending = Counter(row.job.slug for row in rows if row.state is not State.FAILED)
    assert max(pending.values()) == 1, "a slug has two pending jobs"
    assert State.CLAIMED not in {row.state for row in rows}
    assert [p.name for p in (disk.root / ".claimed").iterdir() if p.name != ".lock"] == [], "left in flight"
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.job.slug, set()).update(row.job.paths)
    return found


def check(disk: Disk) -> None:
    expected = SEVERAL | ({"plain": {"p", "p2"}} if (disk.root / "p2.json").exists() else {})
    found = everything(disk)
    assert {slug: found.get(slug) for slug in expected} == expected
    # A file quarantined twice, by a crash in the middle, shows twice; nothing else may be new.
    assert {slug.rstrip("-2") for slug in found} == set(expected)
    assert {path.read_bytes() for path in disk.queue.quarantined()} == {b"{"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_dying_at_any_step_loses_no_save_and_no_path(folder: Path, operation: str) -> None:
    for step in STEPS:
        disk = Disk(folder / str(step))
        went_on = killed_at(step, prepared(disk, operation))
        disk.restart()
        check(disk)
        if not went_on:
            assert step > 3  # there was something to die at
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_full_disk_at_any_step_loses_no_save_and_no_path(
    folder: Path, operation: str, *, lasting: bool
) -> None:
    for step in STEPS:
        disk = Disk(folder / str(step))
        hit = refused_at(step, prepared(disk, operation), lasting=lasting)
        check(disk)
        if not hit:
            return
    pytest.fail("it never ended")


@pytest.mark.parametrize("settle", ["retry_later", "dead_letter"])
def test_a_job_whose_result_is_stored_is_not_tried_again(folder: Path, settle: str) -> None:
    for step in STEPS:
        disk = Disk(folder / str(step))
        disk.save("a", ["content/a.md"], attempts=1, commitMessage="Old")
        (claim,) = disk.queue.claim(NOW).claims
        if settle == "retry_later":
            operation = partial(disk.queue.retry_later, claim, LOST_RACE, at=NOW + 5)
        else:
            operation = partial(disk.queue.dead_letter, claim, LOST_RACE)
        if not killed_at(step, operation):
            assert step > 3
            return
        disk.restart()
        again = disk.queue.recover(NOW)
        document = disk.document("a")
        assert bool(again) == (document.get("failure") is None), f"step {step}"
        assert document["attempts"] == 2
        if not again:
            assert [state for state, _ in disk.rows("a")] == [
                State.RETRYING if settle == "retry_later" else State.FAILED
            ]
    pytest.fail("it never ends")


# A producer in another process


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


def save_in_a_burst(disk: Disk, numbers: range, name: str) -> None:
    """Save one post over and over, by rename, as fast as it can."""
    for number in numbers:
        disk.save("post", [f"{number}"], created=NOW - 10_000 + number, name=name)
        time.sleep(random.choice([0, 0, 0.0001, 0.0005]))


@pytest.mark.parametrize(("name", "bursts"), [("post", 150), ("", 25)], ids=["one name", "many names"])
def test_no_save_is_lost_to_a_producer_that_renames_over_the_same_name(
    tmp_path: Path, name: str, bursts: int
) -> None:
    disk, dice, seen = Disk(tmp_path), random.Random(1), set[str]()
    saves = 20
    for first in range(0, bursts * saves, saves):
        producer = threading.Thread(target=save_in_a_burst, args=(disk, range(first, first + saves), name))
        producer.start()
        while producer.is_alive():
            one_round(disk, seen, dice)
        producer.join()
        disk.queue.requeue(NOW)
        while claims := disk.queue.claim(NOW).claims:
            disk.queue.acknowledge(claims, {})
            seen.update(path for claim in claims for path in claim.job.paths)
        assert f"{first + saves - 1}" in seen, "the newest save is lost"
        assert disk.rows("post") == []
    if not name:
        # The producer itself replaced none of them: each save's path must have come out.
        assert seen == {str(number) for number in range(bursts * saves)}


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


@pytest.mark.parametrize("names", [("a",), ("a1", "a2"), ()], ids=["one", "two saves", "torn"])
def test_what_somebody_removes_at_any_step_of_a_claim_is_in_nobodys_way(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        for number, name in enumerate(names):
            disk.save("a", [name], created=NOW - 9 + number, name=name)
        if not names:
            disk.put("a.json", b"{")
        disk.save("other", ["x"], name="other")
        published: Counter[str] = Counter()

        def run(disk: Disk = disk, published: Counter[str] = published) -> None:
            found = disk.queue.claim(NOW)
            published.update(claim.job.slug for claim in found.claims)
            published["a"] += len(found.quarantined)
            disk.queue.acknowledge(found.claims, {})

        def remove(disk: Disk = disk) -> None:
            for path in disk.root.glob("a*.json"):
                path.unlink()

        reached = before_change(step, remove, run)
        assert published["other"] == 1, f"at step {step}"
        for _ in range(2):  # what nobody was told of is found, too
            run()
        assert [path.name for path in (disk.root / ".claimed").iterdir() if path.name != ".lock"] == []
        assert published["other"] == 1, f"at step {step}"
        assert published["a"] <= 1, f"at step {step}"
        if not reached:
            assert published["a"] == 1
            assert step > 5
            return
    pytest.fail("it never ends")


def bind(path: Path) -> None:
    # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
        sock.bind(path.name)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), bind, os.mkfifo, os.mkdir])
def test_what_takes_the_place_of_a_file_before_it_is_read_is_never_followed_nor_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    disk.save("a", ["a"], name="a")
    opened = os.open

    def then_another(path: Any, flags: int, *rest: Any, **keys: Any) -> int:  # noqa: ANN401 - as os.open
        if os.path.basename(path).removeprefix(".") == "a.json" and not flags & (os.O_CREAT | os.O_WRONLY):  # noqa: PTH119
            monkeypatch.undo()
            folder = keys.get("dir_fd")
            there = Path(path) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / path
            there.unlink()
            make(there)
        return opened(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", then_another)
    assert disk.queue.unusable_files(NOW) == {"a.json": "it is not a regular file"}
    (aside,) = disk.queue.claim(NOW).quarantined
    assert "it is not a regular file" in aside.error
    assert not stat.S_ISREG(Path(aside.file).lstat().st_mode)
