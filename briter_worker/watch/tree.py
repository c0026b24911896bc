"""The files below the allowed folders, read without following links, and compared with the ledger."""

from __future__ import annotations

import os
import stat
import struct
from contextlib import closing
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import PathRefusedError, is_inside
from briter_worker.errors import os_error_text
from briter_worker.git.folders import OPEN_FILE, Folders
from briter_worker.git.leases import is_open_for_writing
from briter_worker.ports import blob_hash
from briter_worker.watch.ledger import UNPROVEN, Version

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.watch.ledger import Ledger

_PIECE_BYTES = 1 << 20
_STAMP = struct.Struct("<QqqqI")
_TICK_NS = 11_000_000
"""The resolution of time stamps, a tick of the kernel: a file may change once more within it."""
_COARSE_TICK_NS = 2_000_000_000
"""The resolution of file systems that store whole seconds, or every second one."""
_SECOND_NS = 1_000_000_000


class Kind(Enum):
    """Kind of thing found at a path."""

    FILE = auto()
    """A regular file that no program has open for writing, as far as anybody can tell."""
    GONE = auto()
    """Nothing."""
    FOLDER = auto()
    """A folder: a file that was there is gone."""
    OTHER = auto()
    """A link, a special file, or a place below a link or in a nested repository: no job may publish it."""
    WRITING = auto()
    """A file that a program has open for writing, or that changed while it was read."""
    UNCERTAIN = auto()
    """A file of which the kernel does not say whether a program has it open for writing. It was not read."""
    UNREADABLE = auto()


class Seen(NamedTuple):
    """State of one path."""

    kind: Kind
    version: Version | None = None
    """Of a FILE, and of no other kind."""
    stamp: bytes = UNPROVEN
    size: int = 0
    problem: str = ""
    """Why the file is UNREADABLE."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences from the ledger."""

    paths: set[str]
    unreadable: dict[str, str]
    """The reason for each folder that could not be read. The ledger's files below are left alone."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The work tree of one site."""

    root: Path
    id_length: int = 40
    has_modes: bool = True
    """Modes of files count: git's `core.fileMode`."""

    def compare(self, top: str, ledger: Ledger) -> Difference:
        """Return what differs from the ledger below a folder, by names and stat data. No file is read."""
        paths: set[str] = set()
        unreadable: dict[str, str] = {}
        blocked: set[str] = set()
        visited: set[str] = set()
        todo = [top]
        with closing(Folders(self.root)) as folders:
            while todo:
                folder = todo.pop()
                try:
                    found, below = _list(folders, folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except PathRefusedError as refused:  # a link, or a nested repository
                    blocked.add(folder)
                    if ledger.has_files_below(folder):
                        unreadable[folder] = refused.reason
                    continue
                except OSError as error:
                    blocked.add(folder)
                    unreadable[folder] = os_error_text(error, with_path=False)
                    continue
                visited.add(folder)
                todo += below
                known = ledger.stamps(folder)
                if known != found:
                    differing = {name for name, _ in known.items() ^ found.items()}
                    paths.update(f"{folder}/{name}" for name in differing)
        for folder in ledger.folders(top):
            if folder in visited or any(is_inside(each, folder) for each in blocked):
                continue
            paths.update(f"{folder}/{name}" for name in ledger.names(folder))
        return Difference(paths, unreadable)

    def read(
        self, folders: Folders, path: str, now: float, *, is_closed: bool, is_patient: bool = True
    ) -> Seen:
        """Look at a path, and read the file that is there.

        `is_closed`: somebody saw that the last program that wrote the file has closed it. Not `is_patient`:
        that counts even if a program has the file open for writing. `now` is the wall clock's time.
        """
        try:
            return self._read(folders, path, now, is_closed=is_closed, is_patient=is_patient)
        except (FileNotFoundError, NotADirectoryError):
            return Seen(Kind.GONE)
        except PathRefusedError:
            return Seen(Kind.OTHER)
        except (OSError, MemoryError) as error:
            reason = (
                os_error_text(error, with_path=False) if isinstance(error, OSError) else "not enough memory"
            )
            return Seen(Kind.UNREADABLE, problem=reason)

    def _read(self, folders: Folders, path: str, now: float, *, is_closed: bool, is_patient: bool) -> Seen:
        status = folders.status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            return Seen(_kind(status))
        parent, _, name = path.rpartition("/")
        with os.fdopen(os.open(name, OPEN_FILE, dir_fd=folders.open(parent)), "rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                return Seen(Kind.OTHER)
            is_written = is_open_for_writing(file.fileno())
            if is_written and (is_patient or not is_closed):
                return Seen(Kind.WRITING, stamp=_stamp(before), size=before.st_size)
            if is_written is None and not is_closed:
                return Seen(Kind.UNCERTAIN, stamp=_stamp(before), size=before.st_size)
            blob = blob_hash(before.st_size, self.id_length)
            while piece := file.read(_PIECE_BYTES):
                blob.update(piece)
            after = os.fstat(file.fileno())
        if _stamp(before) != _stamp(after):
            return Seen(Kind.WRITING, stamp=_stamp(after), size=after.st_size)
        is_executable = self.has_modes and bool(after.st_mode & stat.S_IXUSR)
        version = Version(blob.hexdigest(), is_executable)
        stamp = UNPROVEN if _is_racy(after, now) else _stamp(after)
        return Seen(Kind.FILE, version, stamp, after.st_size)


def _list(folders: Folders, folder: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the stamps of the files in a folder, and the folders in it."""
    found: dict[str, bytes] = {}
    below: list[str] = []
    pack = _STAMP.pack
    with os.scandir(folders.walk_to(folder)) as entries:
        for entry in entries:
            try:
                each = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # gone since the folder was listed
                continue
            if stat.S_ISREG(each.st_mode):  # as `_stamp`, which 100,000 calls make slow
                found[entry.name] = pack(
                    each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_mode
                )
            elif stat.S_ISDIR(each.st_mode) and _is_text(entry.name):
                below.append(f"{folder}/{entry.name}")
    return found, below


def _kind(status: os.stat_result | None) -> Kind:
    """Return the kind of what is no regular file."""
    if status is None:
        return Kind.GONE
    if stat.S_ISDIR(status.st_mode):
        return Kind.FOLDER
    return Kind.OTHER


def _is_text(name: str) -> bool:
    """Return False for a name that is not UTF-8: the allowlist refuses every path with it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stamp(status: os.stat_result) -> bytes:
    """Return what changes whenever a file is written, replaced, or gets another mode."""
    return _STAMP.pack(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def is_rewritten(before: bytes, after: bytes) -> bool:
    """Return True if the file was written or replaced between two stamps, not only its mode changed."""
    if UNPROVEN in (before, after):
        return False
    old, new = _STAMP.unpack(before), _STAMP.unpack(after)
    return (old[0], old[2]) != (new[0], new[2])


def _is_racy(status: os.stat_result, now: float) -> bool:
    """Return True if the file changed so recently that one more change might leave its stamp as it is."""
    is_coarse = status.st_mtime_ns % _SECOND_NS == 0 and status.st_ctime_ns % _SECOND_NS == 0
    tick = _COARSE_TICK_NS if is_coarse else _TICK_NS
    return now * _SECOND_NS - max(status.st_mtime_ns, status.st_ctime_ns) < tick
