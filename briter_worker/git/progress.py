"""Measure the progress of a running git command: bytes of objects, and git's own counters."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOVERS = frozenset({"pack-objects", "index-pack", "unpack-objects", "fast-import"})
"""Git's commands whose input or output is objects. What the remote says passes through none of them.

The other commands also carry the remote's messages and its signs of life, which are no progress.
"""
_LFS_FILTERS = frozenset({"clean", "smudge", "filter-process"})
_OPTIONS = 8
"""Number of first words of a command line in which the command's name is looked for."""
_COUNTER = re.compile(
    rb"(?:^|[\r\n])((?:remote: )?"
    rb"(?:Counting|Compressing|Writing|Receiving|Unpacking|Checking|Uploading LFS|Downloading LFS)"
    rb" objects|(?:remote: )?Resolving deltas|Updating files):\s+\d+% \((\d+)/\d+\)"
)
_LINE = 200
"""The part of an unfinished line that is kept, in bytes."""


_SIGN_OF_LIFE = 4096
"""Bytes in a send queue from which on it holds objects; ssh's keepalive messages are smaller."""


class Progress:
    """The progress of one command and everything that it started. One thread reads, another one looks.

    What ssh and curl have taken from git may wait in their buffers for long. /proc/PID/io does not count what
    curl sends, so that the send queues of the sockets are looked at, too.
    """

    def __init__(self, pid: int) -> None:
        self.has_moved = False
        """Something has risen since the start."""
        self._pid = pid
        self._bytes: dict[psutil.Process, int] = {}
        self._queues: dict[str, int] = {}
        self._counters: dict[bytes, int] = {}
        self._unfinished = b""
        self._has_risen = False

    def read(self, text: bytes) -> None:
        """Note the counters in what the command printed. Other text is no progress."""
        text = self._unfinished + text
        for label, count in _COUNTER.findall(text):
            if int(count) > self._counters.get(label, 0):
                self._counters[label] = int(count)
                self._has_risen = self.has_moved = True
        end = max(text.rfind(b"\r"), text.rfind(b"\n"), 0)
        self._unfinished = text[end:][-_LINE:]

    def has_risen(self) -> bool:
        """Return True if there was progress since the last call."""
        for process in self._processes():
            with suppress(psutil.Error, AttributeError, NotImplementedError, OSError):
                self._look_at_objects(process)
                self._look_at_queues(process)
        risen, self._has_risen = self._has_risen, False
        return risen

    def _look_at_objects(self, process: psutil.Process) -> None:
        if not _is_mover(process.cmdline()):
            return
        counters = process.io_counters()
        moved = counters.read_chars + counters.write_chars
        if moved > self._bytes.get(process, 0):
            self._bytes[process] = moved
            self._has_risen = self.has_moved = True

    def _look_at_queues(self, process: psutil.Process) -> None:
        for socket, queued in _send_queues(process.pid).items():
            known = self._queues.get(socket, 0)
            if queued != known and max(queued, known) > _SIGN_OF_LIFE:
                self._has_risen = self.has_moved = True
            self._queues[socket] = queued

    def _processes(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []


def _send_queues(pid: int) -> dict[str, int]:
    """Return how many bytes wait in each TCP socket of the process to be acknowledged by the other end."""
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    found: dict[str, int] = {}
    for family in ("tcp", "tcp6") if own else ():
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            queue, inode = words[4], words[9]
            if inode in own:
                found[inode] = int(queue.partition(":")[0], 16)
    return found


def _is_mover(command: Sequence[str]) -> bool:
    """Return True for such as `git --git-dir=X pack-objects …`, and for an upload of git-lfs."""
    words = {Path(word).name for word in command[:1]} | set(command[1:_OPTIONS])
    if "git-lfs" in words:
        return _LFS_FILTERS.isdisjoint(words)
    return not _MOVERS.isdisjoint(words)
