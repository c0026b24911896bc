"""What the kernel tells of a folder, by name, without being asked again and again.

By the C library, as Python has no way of its own to inotify. watchfiles looks at what it was told 200 times a
second to be as quick; inotify_simple starts `ldconfig`, or a compiler, to find the C library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_MODIFY, _ATTRIB, _CLOSE_WRITE = 0x2, 0x4, 0x8
_MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _MOVE_SELF, _ONLY_FOLDER = 0x400, 0x800, 0x0100_0000
_WANTED = (
    *(_MODIFY, _ATTRIB, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE),
    *(_DELETE_SELF, _MOVE_SELF, _ONLY_FOLDER),
)
_HEAD = struct.Struct("iIII")
_PIECE = 1 << 16


class Inotify:
    """A watch of one folder, not of those below it. Raises OSError where there is none to be had."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = -1
        library = ctypes.CDLL(None, use_errno=True)
        try:
            begin, watch = library.inotify_init1, library.inotify_add_watch
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no inotify") from None
        self._descriptor = _checked(begin(os.O_CLOEXEC | os.O_NONBLOCK))
        _checked(watch(self._descriptor, os.fsencode(folder), sum(_WANTED)))
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """The kernel tells nothing more."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def wait(self, seconds: float) -> bool:
        """Sleep until the kernel has something to tell, for so long at most; whether it has."""
        return bool(self._poll.poll(max(0, round(seconds * 1000))))

    def read(self) -> set[str] | None:
        """The names of what has changed since the last time; None where that may be anything.

        So it is when too much has changed for the kernel to remember, or the folder itself is no more.
        """
        names: set[str] = set()
        lost = False
        while True:
            try:
                data = os.read(self._descriptor, _PIECE)
            except BlockingIOError:
                return None if lost else names
            place = 0
            while place < len(data):
                _, _, _, length = _HEAD.unpack_from(data, place)
                place += _HEAD.size + length
                name = data[place - length : place].rstrip(b"\0")
                names.add(os.fsdecode(name))
                lost = lost or not name


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
