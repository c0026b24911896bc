"""Objects on their way into the repository: a pack, as a push would bring it, handed to `git index-pack`.

Git reads every object again and names it by itself, so nothing comes in that git has not seen to be sound;
what it does not take is refused as a whole.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.errors import PublishError
from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.git.command import Commands
    from briter_worker.git.watch import Process

COMMIT, TREE, BLOB, _DELTA = 1, 2, 3, 7
_KINDS = {COMMIT: b"commit", TREE: b"tree", BLOB: b"blob"}
_SHA1_BYTES = 20
_PROGRESS = re.compile(r"(?:Receiving|Indexing|Resolving) ")
_AT_ONCE = 1 << 24
"""So many bytes are sent in one pack; they are in memory until then, as its first line counts its objects."""
_COPIED = 1 << 16
"""The longest piece that one instruction of a delta copies; git itself writes none that is longer."""
_INSERTED = 127

_COMMAND = ("index-pack", "-v", "--stdin", "--fix-thin")
"""It tells how far it is, which is how a long run is told from one that hangs."""

Piece = tuple[int, int] | bytes
"""A part of a delta: from where to where to copy, or what to insert."""


class Pack:
    """Writes objects; they can be read, and are durable, after `send`."""

    def __init__(self, commands: Commands, size: int) -> None:
        self.size = size
        """Bytes of an object's name."""
        self._commands = commands
        self._hash = hashlib.sha1 if size == _SHA1_BYTES else hashlib.sha256
        self._process: Process | None = None
        self._parts: list[bytes] = []
        self._count = 0
        self._bytes = 0
        self._written: set[str] = set()

    def name(self, kind: int, content: bytes) -> str:
        """The name that git gives this content."""
        digest = self._hash(b"%s %d\0" % (_KINDS[kind], len(content)), usedforsecurity=False)
        digest.update(content)
        return digest.hexdigest()

    def has(self, name: str) -> bool:
        """Whether it was added, or built upon: it is not written again, lest two build on each other."""
        return name in self._written

    def add(self, name: str, kind: int, content: bytes, *, level: int = -1) -> None:
        """Add an object as a whole."""
        self._add(name, _header(kind, len(content)), zlib.compress(content, level))

    def add_delta(self, name: str, base: str, sizes: tuple[int, int], pieces: Sequence[Piece]) -> None:
        """Add an object as another one with changes; `sizes`: of that one, and of this."""
        self._written.add(base)
        delta = b"".join([*map(_length, sizes), *map(_instructions, pieces)])
        self._add(name, _header(_DELTA, len(delta)) + bytes.fromhex(base), zlib.compress(delta))

    def _add(self, name: str, header: bytes, data: bytes) -> None:
        if self._process is None:
            # Starting takes it as long as reading a post takes us: let it begin.
            process = self._process = self._commands.spawn(_COMMAND, feed=True)
            with self._commands.watch.awaiting(process):
                pass
        self._written.add(name)
        self._parts += (header, data)
        self._count += 1
        self._bytes += len(data)
        if self._bytes > _AT_ONCE:
            self.send()

    def send(self) -> None:
        """Have git take what was added: it is durable when this returns."""
        if self._process is None:
            return
        process, self._process = self._process, None
        pack = b"".join([b"PACK", (2).to_bytes(4), self._count.to_bytes(4), *self._parts])
        self._parts, self._count, self._bytes = [], 0, 0
        pack += self._hash(pack, usedforsecurity=False).digest()
        # Where git does not take it, the batch may go on all the same: it was to keep a conflict's version.
        written, self._written = self._written, set()
        with self._commands.watch.watched(process, "index-pack"):
            _, err = self._commands.watch.converse(process, pack)
            process.wait()
        if process.returncode:
            raise causes.from_git(
                "the commits could not be written", _words(err) or causes.wordless(process.returncode)
            )
        self._written = written

    def give_up(self) -> None:
        """Forget what was not sent."""
        if self._process is not None:
            process, self._process = self._process, None
            with suppress(PublishError), self._commands.watch.watched(process, "index-pack"):
                process.kill()
                process.wait()


def _words(err: bytes) -> str:
    """What it says, but for how far it is."""
    lines = err.decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not _PROGRESS.match(line))


def _header(kind: int, size: int) -> bytes:
    first, size = kind << 4 | size & 0xF, size >> 4
    return bytes([first | 0x80]) + _length(size) if size else bytes([first])


def _length(size: int) -> bytes:
    digits = bytearray()
    while size > 0x7F:  # noqa: PLR2004 - seven bits a byte
        digits.append(size & 0x7F | 0x80)
        size >>= 7
    digits.append(size)
    return bytes(digits)


def _instructions(piece: Piece) -> bytes:
    out = bytearray()
    if isinstance(piece, bytes):
        for i in range(0, len(piece), _INSERTED):
            part = piece[i : i + _INSERTED]
            out.append(len(part))
            out += part
        return bytes(out)
    start, end = piece
    for at in range(start, end, _COPIED):
        # A byte that is zero is left out, and its bit; a size of zero stands for all that can be copied.
        numbers = at.to_bytes(4, "little") + (min(_COPIED, end - at) % _COPIED).to_bytes(2, "little")
        out.append(0x80 | sum(1 << i for i, byte in enumerate(numbers) if byte))
        out += bytes(filter(None, numbers))
    return bytes(out)
