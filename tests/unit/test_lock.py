"""One worker per site: who may take the lock, what its file says, and what readers may rely on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.errors import PublishError
from briter_worker.lock import AnotherWorkerError, Holder, SiteLock, read_holder

if TYPE_CHECKING:
    from collections.abc import Iterator

NOW = 1_800_000_000.0
TTL = 60.0
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
HOST = os.uname().nodename
NAMESPACE = str(Path("/proc/self/ns/pid").readlink())
DEAD = 2**22 + 1  # above any PID that Linux gives


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "storage" / "worker.lock"


@pytest.fixture
def lock(path: Path) -> Iterator[SiteLock]:
    lock = SiteLock(path, stale_after=TTL)
    yield lock
    lock.release()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A live process that is not ours."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.send_signal(signal.SIGKILL)


def ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def write(path: Path, content: bytes, touched: float = NOW) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (touched, touched))


def record(path: Path, pid: int, *, touched: float = NOW, **facts: object) -> None:
    """A record as this host's worker `pid` would have left it, but for `facts`."""
    identity: dict[str, object] = {
        "host": HOST,
        "boot": BOOT,
        "started": 1,
        "namespace": NAMESPACE,
        "token": "theirs",
        "dry_run": None,
        "heartbeat": NOW,
    }
    write(path, f"{pid}\n{json.dumps(identity | facts)}\n".encode(), touched)


def is_held(path: Path, **at: float) -> bool:
    holder = read_holder(path, **at)
    return holder is not None and holder.alive


def assert_taken(path: Path, lock: SiteLock, now: float = NOW) -> None:
    lock.acquire(now)
    holder = read_holder(path)
    assert holder is not None
    assert holder.pid == os.getpid()
    assert holder.heartbeat == now
    assert lock.still_ours()


def assert_respected(path: Path, lock: SiteLock, now: float = NOW) -> Holder | None:
    before = path.read_bytes()
    with pytest.raises(AnotherWorkerError) as refusal:
        lock.acquire(now)
    assert path.read_bytes() == before
    assert not lock.still_ours()
    return refusal.value.holder


def test_the_first_line_is_the_pid_alone_and_the_second_a_json_object(path: Path, lock: SiteLock) -> None:
    lock.acquire(NOW)

    first, second, rest = path.read_text().split("\n")

    assert first == str(os.getpid())
    facts: dict[str, Any] = json.loads(second)
    assert facts.pop("token")
    assert facts == {
        "host": HOST,
        "boot": BOOT,
        "started": ticks(os.getpid()),
        "namespace": NAMESPACE,
        "dry_run": None,
        "heartbeat": NOW,
    }
    assert rest == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size == 512  # always: what comes next overwrites it without truncating


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", f"{DEAD}\n".encode(), f"{os.getpid()}\n".encode()],
    ids=["empty", "garbage", "dead", "own"],  # the PID itself would differ between pytest-xdist's workers
)
def test_a_held_kernel_lock_is_never_broken_whatever_the_file_says(
    path: Path, lock: SiteLock, content: bytes
) -> None:
    write(path, content, touched=NOW - 1000 * TTL)
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert_respected(path, lock)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"not a pid\n{}\n",
        b"12ab\n",
        b"-5\n",
        b"0\n",
        b"99999999999999999999\n",
        b"4294967297\n",
        b"\0" * 512,
        b'{"pid": 1}\n',
        f"{2**31}\n".encode(),
        b"x" * 5000,
    ],
)
def test_an_empty_or_unreadable_record_is_free_at_once(path: Path, lock: SiteLock, content: bytes) -> None:
    write(path, content)
    assert read_holder(path) is None
    assert_taken(path, lock)


@pytest.mark.parametrize(
    ("who", "facts", "is_respected", "held"),
    [
        ("dead", None, False, False),
        ("dead", {}, False, False),
        ("dead", {"namespace": None}, False, False),
        ("zombie", None, False, False),
        ("zombie", {}, False, False),
        ("me", None, False, True),
        ("other", None, True, True),
        ("other", {}, True, True),
        ("other", {"started": 1}, False, False),
        ("other", {"boot": "an earlier boot"}, False, False),
        ("other", {"boot": None}, True, True),
        ("other", {"namespace": "pid:[1]"}, False, True),
        ("other", {"namespace": "pid:[1]", "host": "a-container-made-anew"}, False, True),
        ("dead", {"host": "elsewhere", "boot": "another"}, True, True),
        ("dead", {"host": "elsewhere", "boot": None}, True, True),
        ("dead", {"host": None, "boot": "another"}, True, True),
    ],
)
def test_a_record_is_respected_while_its_holder_may_live_and_its_heartbeat_is_fresh(
    path: Path,
    lock: SiteLock,
    other: subprocess.Popen[bytes],
    who: str,
    facts: dict[str, Any] | None,
    *,
    is_respected: bool,
    held: bool,
) -> None:
    if who == "zombie":
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # ended, and left unreaped
    pid = {"dead": DEAD, "me": os.getpid()}.get(who, other.pid)
    if facts is None:
        write(path, f'{pid}\n{{"host": "torn'.encode())
    else:
        record(path, pid, **({"started": ticks(pid) if pid == other.pid else 1} | facts))
    assert is_held(path) == held
    if is_respected:
        holder = assert_respected(path, lock, NOW + TTL)
        assert holder is not None
        assert holder.pid == pid
        assert_taken(path, lock, NOW + TTL + 1)
    else:
        assert_taken(path, lock)


@pytest.mark.parametrize("heartbeat", [NOW + 365 * 86400, NOW - 365 * 86400])
def test_a_wrong_clock_neither_wedges_the_lock_nor_gives_it_away(
    path: Path, lock: SiteLock, heartbeat: float
) -> None:
    """The time of the file counts, which is the server's on a network file system."""
    record(path, DEAD, host="elsewhere", boot="another", heartbeat=heartbeat)
    assert_respected(path, lock, NOW - TTL)
    assert_taken(path, lock, NOW + TTL + 1)


def test_a_holder_that_cannot_be_seen_is_held_while_its_heartbeat_is_fresh(path: Path) -> None:
    record(path, DEAD, namespace="pid:[1]")
    assert is_held(path)
    assert is_held(path, now=NOW + TTL, stale_after=TTL)
    assert not is_held(path, now=NOW + TTL + 1, stale_after=TTL)


@pytest.mark.parametrize("way", ["gone", "a copy", "a link"])
def test_the_lock_is_not_ours_when_its_file_is_replaced(path: Path, lock: SiteLock, way: str) -> None:
    lock.acquire(NOW)
    moved = path.rename(path.with_name("moved"))
    if way == "a copy":
        shutil.copy(moved, path)
    elif way == "a link":
        path.symlink_to(moved.name)
    assert not lock.still_ours()


@pytest.mark.parametrize("content", [b"", b"4242\n"])
def test_the_lock_is_not_ours_when_another_program_wrote_over_it_and_a_heartbeat_hides_nothing(
    path: Path, lock: SiteLock, content: bytes
) -> None:
    lock.acquire(NOW)
    path.write_bytes(content)
    lock.beat(NOW + 1)
    assert not lock.still_ours()
    lock.release()
    assert path.read_bytes() == content


def test_a_symlink_is_refused_and_its_target_is_untouched(path: Path, lock: SiteLock, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text(f"{DEAD}\n")
    path.parent.mkdir()
    path.symlink_to(target)
    assert read_holder(path) is None
    with pytest.raises(PublishError, match=r"worker\.lock cannot be locked: .*symbolic link") as refused:
        lock.acquire(NOW)
    assert refused.value.fix == "remove it"
    assert target.read_text() == f"{DEAD}\n"
