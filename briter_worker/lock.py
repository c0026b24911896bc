"""One worker per site: the kernel's lock under a PID file, and proof of death before reclaiming.

The kernel's lock decides: while anything holds it, the worker or a git child that inherited it, nobody else
gets in, however old the file looks. The record in the file is judged and written only under the kernel's
lock; it tells people who holds the lock, and covers what the kernel cannot see: a program that only writes
its PID, and another host on a network file system whose locks stay local.

The file is written in place and stays: unlinking, moving or replacing it each let a second holder in.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import threading
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from briter_worker.errors import explained

if TYPE_CHECKING:
    from filelock import FileLock

_MAX_READ = 4096
_RECORD_BYTES = 512
"""Records are padded to this size, so that a takeover or a heartbeat overwrites without truncating."""
_MAX_PID = 2**31 - 1
_MAX_TIME = 1e11
_MAX_WORD = 255
_PID_LINE = re.compile(rb"\s*(\d{1,10})(?:\s|$)")
_START_TICKS = 19
"""Field 22 of `/proc/<pid>/stat`, counted after the command's name, which may contain anything."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who the record says holds the lock. Only `pid` is known of a program that writes no more than that."""

    pid: int
    host: str | None
    boot: str | None
    started: int | None
    """The start time in ticks since boot: with `boot`, it tells a process from a later one of that PID."""
    namespace: str | None
    """The PID namespace in which `pid` means something."""
    token: str | None
    heartbeat: float | None


class AnotherWorkerError(Exception):
    """Another worker instance is active; `holder` is what its record says, if it says anything."""

    def __init__(self, holder: Holder | None) -> None:
        self.holder = holder
        whose = f": PID {holder.pid}" if holder else ""
        where = f" on {holder.host}" if holder and holder.host else ""
        super().__init__(f"another worker instance is active{whose}{where}")


class UnusableLockError(OSError):
    """The lock file cannot be used: no regular file, no permission, a full or read-only disk."""


class SiteLock:
    """The right to publish one site; held until `release`, or until this process and its heirs are gone.

    Safe to use from several threads. A forked child keeps the lock held as long as it lives, but has no say:
    there, `beat` does nothing, `still_ours` is false, and `release` only gives up the child's own share.
    """

    def __init__(self, path: Path, *, stale_after: float) -> None:
        self._path = path.absolute()
        self._stale_after = stale_after
        self._kernel: FileLock | None = None
        self._descriptor = -1
        self._record: Holder | None = None
        self._owner = -1
        # Without it, a beat that loses a race with release could write into whatever file got the descriptor.
        self._mutex = threading.Lock()

    def acquire(self, now: float) -> None:
        """Hold the lock at return, at once or not at all.

        Raises:
            AnotherWorkerError: something live holds it, or its record must be respected still.
            UnusableLockError: the file cannot be locked or written.
        """
        import filelock  # noqa: PLC0415 - 26 ms that status and health need not pay

        if self._kernel is not None:
            return
        # From 4.2.1 on: earlier ones empty the file before anybody can judge the record.
        kernel = filelock.FileLock(
            self._path,
            timeout=0,
            mode=0o600,
            thread_local=False,  # another thread may release it
            preserve_lock_file=True,
            on_acquired=partial(self._claim, now=now),  # what it raises gives the kernel's lock back
        )
        try:
            kernel.acquire()
        except filelock.Timeout:
            raise AnotherWorkerError(read_holder(self._path)) from None
        except OSError as error:
            raise UnusableLockError(
                f"{self._path} cannot be locked: {explained(error, where=False)}"
            ) from error
        self._kernel = kernel

    def _claim(self, locked: int, now: float) -> None:
        about = os.fstat(locked)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("not a regular file")
        recorded = _parse(os.pread(locked, _MAX_READ, 0))
        me = _myself(uuid.uuid4().hex, now)
        if recorded is not None and _is_respected(recorded, me, about.st_mtime, now, self._stale_after):
            raise AnotherWorkerError(recorded)
        # A duplicate shares the kernel's lock but is unknown to filelock, which closes its own descriptor in
        # every forked child, also between fork and exec when Popen has a preexec_fn. Above 2: never stdio.
        descriptor = fcntl.fcntl(locked, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            _write(descriptor, me)
        except OSError:
            # Half a record may name another process: an empty one is anybody's.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
            raise
        self._descriptor, self._record, self._owner = descriptor, me, os.getpid()

    def beat(self, now: float) -> None:
        """The record says `now`, if it is still ours. Never fails: the kernel's lock does not need it."""
        if self._owner != os.getpid():
            return
        with self._mutex, suppress(OSError):
            # Over another program's claim it would only hide that the lock was lost.
            if self._record is not None and self._is_recorded():
                self._record = replace(self._record, heartbeat=now)
                _write(self._descriptor, self._record)

    def still_ours(self) -> bool:
        """Whether the path still names the file we locked, with our record, and the kernel's lock is ours."""
        import filelock  # noqa: PLC0415 - loaded already, as the lock was acquired

        if self._owner != os.getpid():
            return False
        with self._mutex:
            try:
                named = self._path.lstat()
                # Locking again what is locked changes nothing; it fails if the lock was lost to someone.
                return (
                    self._is_recorded()
                    and os.path.samestat(named, os.fstat(self._descriptor))
                    and filelock.lock_descriptor(self._descriptor, blocking=False)
                )
            except OSError:
                return False

    def descriptor(self) -> int:
        """For `Popen(pass_fds=...)`: a child that has it keeps the lock held after this process is killed."""
        if self._descriptor < 0:
            raise RuntimeError("the lock is not held")
        return self._descriptor

    def release(self) -> None:
        """Clear the record, then free the lock, also from children that still have the descriptor."""
        inherited = self._owner != os.getpid()
        # A fork may have copied the mutex while another thread held it.
        with nullcontext() if inherited else self._mutex:
            kernel, descriptor, self._kernel = self._kernel, self._descriptor, None
            if kernel is None:
                return
            try:
                if not inherited and self._is_recorded():
                    with suppress(OSError):
                        os.ftruncate(descriptor, 0)
            finally:
                self._descriptor, self._record = -1, None
                os.close(descriptor)
                kernel.release()  # in a forked child, filelock has let go already: this does nothing

    def _is_recorded(self) -> bool:
        if self._record is None:
            return False
        with suppress(OSError):
            recorded = _parse(os.pread(self._descriptor, _MAX_READ, 0))
            return recorded is not None and recorded.token == self._record.token
        return False


def read_holder(path: Path) -> Holder | None:
    """Who the record names, dead or alive; None when it names nobody. Never waits, never touches the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return _parse(os.pread(descriptor, _MAX_READ, 0)) if regular else None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def is_held(path: Path, *, now: float | None = None, stale_after: float = 60.0) -> bool:
    """Whether the recorded worker lives, as far as can be told without touching the lock.

    The record decides: even a shared, non-blocking probe of the kernel's lock would turn away a worker that
    starts in that instant, and `/proc/locks` hides other PID namespaces. A holder whose process cannot be
    seen from here (another container or host) counts as alive; with `now`, only while its heartbeat is fresh.
    """
    recorded = read_holder(path)
    if recorded is None:
        return False
    match _place(recorded, _myself(None, None)):
        case _Place.HERE:
            return _runs(recorded)
        case _Place.BEFORE_REBOOT:
            return False
        case _Place.OTHER_NAMESPACE | _Place.OTHER_HOST:
            return now is None or recorded.heartbeat is None or abs(now - recorded.heartbeat) <= stale_after
        case unreachable:
            assert_never(unreachable)


class _Place(Enum):
    """Where a recorded process ran, seen from here."""

    HERE = auto()
    OTHER_NAMESPACE = auto()
    BEFORE_REBOOT = auto()
    OTHER_HOST = auto()


def _place(recorded: Holder, me: Holder) -> _Place:
    if recorded.boot is None and recorded.host is None:
        return _Place.HERE  # a bare PID
    boots_known = recorded.boot is not None and me.boot is not None
    # The boot id before the name: a container that is made anew has another name on the same kernel.
    same_kernel = recorded.boot == me.boot if boots_known else recorded.host == me.host
    if same_kernel:
        namespaces_known = recorded.namespace is not None and me.namespace is not None
        elsewhere = namespaces_known and recorded.namespace != me.namespace
        return _Place.OTHER_NAMESPACE if elsewhere else _Place.HERE
    return _Place.BEFORE_REBOOT if recorded.host == me.host else _Place.OTHER_HOST


def _is_respected(recorded: Holder, me: Holder, touched: float, now: float, stale_after: float) -> bool:
    """Whether a record stands although nobody holds the kernel's lock."""
    match _place(recorded, me):
        case _Place.BEFORE_REBOOT | _Place.OTHER_NAMESPACE:
            return False  # of another namespace: one kernel, one lock, and nothing live holds it
        case _Place.OTHER_HOST:
            return _is_fresh(recorded, touched, now, stale_after)
        case _Place.HERE:
            # Alive without the kernel's lock: another program, or a worker under whose feet the file was
            # replaced. That one may be in a push; it stops before the next, as the lock is not its own now.
            fresh = recorded.pid != me.pid and _is_fresh(recorded, touched, now, stale_after)
            return fresh and _runs(recorded)
        case unreachable:
            assert_never(unreachable)


def _is_fresh(recorded: Holder, touched: float, now: float, stale_after: float) -> bool:
    # A heartbeat far in the future says that a clock was wrong; the file's own time, on a network file system
    # the server's, is the second witness. If that is in the future too, nothing can be told, and a lock that
    # nobody could ever take again would be worse than a push that git refuses as not a fast-forward.
    said = recorded.heartbeat
    last = touched if said is None or said > now + stale_after else said
    return abs(now - last) <= stale_after


def _runs(recorded: Holder) -> bool:
    """Whether the process is there: no zombie, and no later process that was given its PID."""
    import psutil  # noqa: PLC0415 - 16 ms that a free lock need not pay

    try:
        if psutil.Process(recorded.pid).status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return False
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # pragma: no cover - only of others' processes, where /proc is mounted so
        pass  # it is there, but another user's
    # psutil's create_time() follows the wall clock; the ticks do not.
    started = _start_ticks(str(recorded.pid))
    return started is None or recorded.started in {None, started}


def _myself(token: str | None, now: float | None) -> Holder:
    namespace = None
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    boot = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    host = _word(os.uname().nodename)
    return Holder(os.getpid(), host, boot, _start_ticks("self"), namespace, token, now)


def _start_ticks(process: str) -> int | None:
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        return int(fields[_START_TICKS])
    except (OSError, ValueError, IndexError):  # pragma: no cover - no /proc, or it ended just now
        return None


def _write(descriptor: int, holder: Holder) -> None:
    identity = {
        "host": holder.host,
        "boot": holder.boot,
        "started": holder.started,
        "namespace": holder.namespace,
        "token": holder.token,
    }
    # The heartbeat comes last and with a fixed width: a reader in the middle of a beat sees the same record.
    text = f'{holder.pid}\n{json.dumps(identity)[:-1]}, "heartbeat": {holder.heartbeat or 0.0:18.6f}}}'
    record = (text.ljust(_RECORD_BYTES - 1) + "\n").encode("ascii")
    if os.pwrite(descriptor, record, 0) < len(record):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # Only after the record: a reader never finds the file without a PID.
    os.ftruncate(descriptor, len(record))


def _parse(raw: bytes) -> Holder | None:
    first, _, rest = raw.partition(b"\n")
    leading = _PID_LINE.match(first)
    if leading is None or not 0 < int(leading[1]) <= _MAX_PID:
        return None
    try:
        facts = json.loads(rest.partition(b"\n")[0])
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        facts = {}
    started, heartbeat = facts.get("started"), facts.get("heartbeat", -1)
    timed = isinstance(heartbeat, int | float) and 0 <= heartbeat <= _MAX_TIME
    return Holder(
        pid=int(leading[1]),
        host=_word(facts.get("host")),
        boot=_word(facts.get("boot")),
        started=started if isinstance(started, int) else None,
        namespace=_word(facts.get("namespace")),
        token=_word(facts.get("token")),
        heartbeat=float(heartbeat) if timed else None,
    )


def _word(value: object) -> str | None:
    """A string that is safe to show; anything else is as good as absent."""
    return value if isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_WORD else None
