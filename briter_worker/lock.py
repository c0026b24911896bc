"""One worker per site: the kernel's lock on a file, and a record in the file that names the holder.

The kernel's lock decides: while the worker holds it, or a git process that inherited the descriptor, no other
worker starts, however old the record is. The record is read and written only under the kernel's lock. It
covers what the kernel cannot see: a program that only writes its PID, and another host on a network file
system with local locks. The file is written in place and stays: after an unlink, a move or a replacement,
another worker could lock another file of the same name.
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
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import filelock
import psutil

from briter_worker.errors import FailureCode, PublishError, os_error_fix, os_error_text

_MAX_READ_BYTES = 4096
_RECORD_BYTES = 512
"""Records are padded to this size, so that a takeover or a heartbeat overwrites without truncating."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_PID = 2**31 - 1
_PID_LINE = re.compile(rb"\s*(\d{1,10})(?:\s|$)")
_START_TICKS = 19
"""Field 22 of `/proc/<pid>/stat`, counted after the command's name, which may contain anything."""


class Holder(NamedTuple):
    """The holder as the record names it. Another program's record may have nothing but the PID."""

    pid: int
    host: str | None = None
    boot: str | None = None
    started: int | None = None
    """Start time in ticks since boot, which tells a process from a later one with the same PID."""
    namespace: str | None = None
    """PID namespace in which `pid` is valid."""
    token: str | None = None
    dry_run: bool | None = None
    """Whether the worker runs dry: commands and pages may have other settings."""
    heartbeat: float | None = None
    alive: bool = False


_TYPES = {
    **dict.fromkeys(("host", "boot", "namespace", "token"), str),
    "started": int,
    "dry_run": bool,
    "heartbeat": float,
}
"""The JSON types of the record."""


class AnotherWorkerError(Exception):
    """Another worker instance is active; `holder` is the holder that its record names, if any."""

    def __init__(self, holder: Holder | None) -> None:
        self.holder = holder
        super().__init__("another worker instance is active")


class SiteLock:
    """The right to publish one site, held until `release` or until this process and its children have ended.

    Any thread may call the methods.
    """

    def __init__(self, path: Path, *, stale_after: float, dry_run: bool | None = None) -> None:
        self._path = path.absolute()
        self._dry_run = dry_run
        self._stale_after = stale_after
        self._kernel: filelock.BaseFileLock | None = None
        self._descriptor = -1
        self._record: Holder | None = None
        # Without the mutex, a beat during release could write into whatever file got the descriptor's number.
        self._mutex = threading.Lock()

    def acquire(self, now: float) -> None:
        """Acquire the lock without waiting. Raises AnotherWorkerError, and PublishError for a bad file."""
        kernel = filelock.FileLock(
            self._path,
            timeout=0,
            mode=0o600,
            thread_local=False,  # another thread may release it
            preserve_lock_file=True,
            on_acquired=partial(self._claim, now=now),  # an exception gives the kernel's lock back
        )
        try:
            kernel.acquire()
        except filelock.Timeout:
            raise AnotherWorkerError(read_holder(self._path)) from None
        except OSError as error:
            text = os_error_text(error, with_path=False)
            message = f"{self._path} cannot be locked: {text}"
            raise PublishError(FailureCode.DISK, message, os_error_fix(error)) from error
        self._kernel = kernel

    def _claim(self, locked: int, now: float) -> None:
        status = os.fstat(locked)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EISDIR, "not a regular file")
        recorded = _parse(os.pread(locked, _MAX_READ_BYTES, 0))
        record = _this_process()._replace(token=uuid.uuid4().hex, dry_run=self._dry_run, heartbeat=now)
        # Each heartbeat sets the file's time: on a network file system by the clock that all hosts share.
        is_fresh = abs(now - status.st_mtime) <= self._stale_after
        if recorded is not None and is_fresh and _must_respect(recorded):
            raise AnotherWorkerError(recorded)
        # filelock closes its own descriptor in every forked child, also before exec when Popen has a
        # preexec_fn. A duplicate shares the kernel's lock and is unknown to filelock. Above 2: never stdio.
        descriptor = fcntl.fcntl(locked, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            _write(descriptor, record)
        except OSError:
            # Half a record may name another process; an empty one names nobody.
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
            raise
        self._descriptor, self._record = descriptor, record

    def beat(self, now: float) -> None:
        """Store `now` as the heartbeat if the record is still ours. Ignore errors: the kernel decides."""
        with self._mutex, suppress(OSError):
            # Overwriting another program's record would hide that the lock was lost.
            if self._record is not None and self._has_own_record():
                self._record = self._record._replace(heartbeat=now)
                _write(self._descriptor, self._record)

    def still_ours(self) -> bool:
        """Return True if the path names the file we locked, with our record, under our kernel lock."""
        with self._mutex, suppress(OSError):
            return (
                self._has_own_record()
                and os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
                # Locking again what is locked changes nothing; it fails if another process got the lock.
                and filelock.lock_descriptor(self._descriptor, blocking=False)
            )
        return False

    def descriptor(self) -> int:
        """Return the descriptor for `Popen(pass_fds=...)`, by which a child keeps the lock held."""
        return self._descriptor

    def release(self) -> None:
        """Clear the record, then free the lock, also from children that still have the descriptor."""
        kernel, self._kernel = self._kernel, None
        if kernel is None:
            return
        with self._mutex:
            if self._has_own_record():
                with suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor, self._record = -1, None
        kernel.release()

    def _has_own_record(self) -> bool:
        if self._record is None:
            return False
        with suppress(OSError):
            recorded = _parse(os.pread(self._descriptor, _MAX_READ_BYTES, 0))
            return recorded is not None and recorded.token == self._record.token
        return False


def read_holder(path: Path, *, now: float | None = None, stale_after: float = 60.0) -> Holder | None:
    """Return the holder that the record names, alive or not. Never waits.

    A holder of another container or host counts as alive if its heartbeat is fresh. The kernel's lock is not
    probed: that could turn away a worker that starts at that moment.
    """
    recorded = None
    with suppress(OSError), FileIO(path, opener=lambda name, _: os.open(name, _READ)) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            recorded = _parse(file.read(_MAX_READ_BYTES))
    if recorded is None:
        return None
    is_alive = _is_alive(recorded, _this_process())
    if is_alive is None:
        beat = recorded.heartbeat
        is_alive = now is None or beat is None or abs(now - beat) <= stale_after
    return recorded._replace(alive=is_alive)


def _must_respect(recorded: Holder) -> bool:
    """Return True if a fresh record stands although no process holds the kernel's lock."""
    here = _this_process()
    # Another PID namespace shares the kernel's lock, so its holder is dead. Alive without the kernel's lock
    # is another program, or a worker whose lock file was replaced and which stops before its next push.
    if _is_same_kernel(recorded, here):
        return recorded.pid != here.pid and bool(_is_alive(recorded, here))
    return _is_alive(recorded, here) is None


def _is_alive(recorded: Holder, here: Holder) -> bool | None:
    """Return whether the recorded process runs; None if it cannot be seen from here."""
    if not _is_same_kernel(recorded, here):
        return False if recorded.host == here.host else None  # the same name: before a reboot
    return _is_running(recorded) if _is_same_namespace(recorded, here) else None


def _is_same_kernel(recorded: Holder, here: Holder) -> bool:
    if recorded.boot is None and recorded.host is None:
        return True  # a bare PID
    # The boot id before the name: a container that is created again has a new name on the same kernel.
    both_known = recorded.boot is not None and here.boot is not None
    return recorded.boot == here.boot if both_known else recorded.host == here.host


def _is_same_namespace(recorded: Holder, here: Holder) -> bool:
    return None in (recorded.namespace, here.namespace) or recorded.namespace == here.namespace


def _is_running(recorded: Holder) -> bool:
    """Return True if the process exists, is no zombie, and is not a later process with the same PID."""
    try:
        if psutil.Process(recorded.pid).status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return False
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # pragma: no cover - another user's process, where /proc is mounted so
        pass
    # psutil's create_time() follows the wall clock; the ticks do not.
    started = _start_ticks(str(recorded.pid))
    return started is None or recorded.started in {None, started}


def _this_process() -> Holder:
    namespace = boot = None
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Holder(os.getpid(), os.uname().nodename, boot, _start_ticks("self"), namespace)


def _start_ticks(process: str) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[_START_TICKS])
    except (OSError, ValueError, IndexError):  # pragma: no cover - no /proc, or the process has just ended
        return None


def _write(descriptor: int, holder: Holder) -> None:
    identity = holder._asdict()
    pid, heartbeat, _ = (identity.pop(name) for name in ("pid", "heartbeat", "alive"))
    # The heartbeat comes last with a fixed width: a reader during a beat sees the rest of the record whole.
    text = f'{pid}\n{json.dumps(identity)[:-1]}, "heartbeat": {heartbeat:18.6f}}}'
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
    bare = Holder(int(leading[1]))
    try:
        record = json.loads(rest.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return bare
    if not isinstance(record, dict):
        return bare
    known = {name: record[name] for name, kind in _TYPES.items() if type(record.get(name)) is kind}
    return bare._replace(**{name: value for name, value in known.items() if str(value).isprintable()})
