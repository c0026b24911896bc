"""Work tree → changes: reads what jobs declare, and nothing else.

A declared path passes the allowlist, then every part of it is opened without following links, and what was
opened is what is read. So a link or a nested repository that is swapped in meanwhile is refused, too.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist, PathRefusedError
from briter_worker.errors import Failure, PublishError
from briter_worker.git.folders import Folders, Refused, kind_of
from briter_worker.git.objects import LINK, NESTED, Entry
from briter_worker.ports import Change, Request, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from briter_worker.git.attributes import Attributes
    from briter_worker.git.command import Commands
    from briter_worker.git.commits import Writer
    from briter_worker.git.objects import Tree

_TELL_EVERY = 100
_TRIES = 5
_PAUSE = 0.02
"""How often a file that changes while it is read is read again, and how long to wait before."""


@dataclass(slots=True)
class _Draft:
    """One request while it is being staged."""

    request: Request
    files: dict[str, None] = field(default_factory=dict)
    gone: dict[str, None] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """For each declared path that the allowlist accepts, where it is."""


class Staging:
    """Stages a batch of requests against one commit's tree. Used once, by one thread."""

    def __init__(
        self,
        commands: Commands,
        *,
        allowlist: Allowlist,
        attributes: Attributes,
        tree: Tree,
        writer: Writer,
        max_file_bytes: int,
        keep_modes: bool,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._commands = commands
        self._allowlist = allowlist
        self._attributes = attributes
        self._tree = tree
        self._writer = writer
        self._max_file_bytes = max_file_bytes
        self._keep_modes = keep_modes
        self._progress = progress
        self._folders = Folders(commands.worktree)
        self._read: dict[str, tuple[Entry, tuple[int, ...]] | PublishError | None] = {}
        self._held: frozenset[str] = frozenset()

    def stage(self, requests: Sequence[Request], *, held: Collection[str]) -> dict[str, Staged]:
        """What each request publishes, by its key. Contents are written as blobs on the way."""
        self._held = frozenset(self._resolved(held))
        try:
            drafts = [self._draft(request) for request in requests]
            self._drop_ignored(drafts)
            self._drop_left_out(drafts)
            paths = dict.fromkeys(path for draft in drafts for path in draft.files)
            self._hash(paths)
            self._look_again()
            return {draft.request.key: self._staged(draft) for draft in drafts}
        finally:
            self._folders.close()

    def _resolved(self, held: Iterable[str]) -> Iterable[str]:
        for path in held:
            try:
                yield self._allowlist.resolve(path)
            except PathRefusedError:
                continue

    # What is declared

    def _draft(self, request: Request) -> _Draft:
        draft = _Draft(request)
        for declared in request.paths:
            self._commands.touch()
            try:
                path = draft.places[declared] = self._allowlist.resolve(declared)
                self._look(path, draft)
            except (PathRefusedError, Refused) as refusal:
                draft.rejected[declared] = refusal.reason
        return draft

    def _look(self, path: str, draft: _Draft) -> None:
        parent, _, name = path.rpartition("/")
        self._no_nested(path)
        try:
            mode = kind_of(self._folders.open(parent), name)
        except (FileNotFoundError, NotADirectoryError):
            mode = None
        if mode is None:
            was = self._tree.entry(path)
            if was is None:
                draft.missing.append(path)
            elif was.is_folder:
                draft.gone.update(dict.fromkeys(p for p, _ in self._tree.files(path) if not self._is_held(p)))
            else:
                draft.gone[path] = None
        elif stat.S_ISDIR(mode):
            self._expand(path, draft)
        elif stat.S_ISREG(mode):
            draft.files[path] = None
        else:
            raise Refused.of(mode)

    def _no_nested(self, path: str) -> None:
        for i, c in enumerate(path + "/"):
            if c == "/":
                entry = self._tree.entry(path[:i])
                if entry is None:
                    return
                if entry.mode == NESTED:
                    raise Refused("it is inside a nested repository (a submodule)")

    def _expand(self, folder: str, draft: _Draft) -> None:
        here: set[str] = set()
        blocked: list[str] = []
        todo = [folder]
        while todo:
            current = todo.pop()
            self._commands.touch()
            try:
                listing = self._folders.listing(current)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except Refused as refusal:
                if current == folder:
                    raise
                blocked.append(current)
                draft.rejected[current] = refusal.reason
                continue
            for name, mode in listing:
                path = f"{current}/{name}"
                try:
                    self._allowlist.resolve(path)
                    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                        raise Refused.of(mode)
                except (PathRefusedError, Refused) as refusal:
                    blocked.append(path)
                    draft.rejected[path] = refusal.reason
                    continue
                if stat.S_ISDIR(mode):
                    todo.append(path)
                else:
                    here.add(path)
        was = self._tree.entry(folder)
        if was is not None and not was.is_folder:
            draft.gone[folder] = None
        shut = tuple(f"{path}/" for path in blocked)
        for path, _ in self._tree.files(folder):
            if (
                path not in here
                and path not in blocked
                and not path.startswith(shut)
                and not self._is_held(path)
            ):
                draft.gone[path] = None
        draft.files.update(dict.fromkeys(sorted(path for path in here if not self._is_held(path))))

    def _is_held(self, path: str) -> bool:
        """Whether a job on hold declares it, itself or by a folder above it."""
        if not self._held:
            return False
        return path in self._held or any(path[:i] in self._held for i, c in enumerate(path) if c == "/")

    # What git says of it

    def _drop_ignored(self, drafts: Sequence[_Draft]) -> None:
        new = sorted({p for draft in drafts for p in draft.files if self._tree.entry(p) is None})
        if not new:
            return
        ignored = self._ignored(new)
        for draft in drafts:
            for path in ignored & draft.files.keys():
                del draft.files[path]
                if path in draft.places.values():
                    draft.rejected[path] = "git ignores it; see git check-ignore -v, and change .gitignore"

    def _ignored(self, paths: Sequence[str]) -> set[str]:
        try:
            out = self._commands.run("check-ignore", "-z", "--stdin", stdin=_lines(paths), ok=(0, 1))
        except PublishError:
            # Git gives up at the first path it does not like (one in a submodule, say): find that one.
            if len(paths) == 1:
                return {paths[0]}
            middle = len(paths) // 2
            return self._ignored(paths[:middle]) | self._ignored(paths[middle:])
        return set(os.fsdecode(out).split("\0")[:-1])

    def _drop_left_out(self, drafts: Sequence[_Draft]) -> None:
        """What a sparse checkout leaves out of the work tree was not deleted by anybody."""
        if not any(draft.gone for draft in drafts):
            return
        out = self._commands.run(
            *("--literal-pathspecs", "ls-files", "-z", "-t", "--"),
            *self._allowlist.folders,
            doing="the index could not be read",
        )
        left_out = {os.fsdecode(line[2:]) for line in out.split(b"\0") if line.startswith(b"S ")}
        for draft in drafts:
            for path in left_out & draft.gone.keys():
                del draft.gone[path]

    # What is in it

    def _hash(self, paths: Collection[str]) -> None:
        filtered = self._attributes.filtered(paths)
        for done, path in enumerate(paths):
            self._commands.touch()
            if done % _TELL_EVERY == 0:
                self._progress("stage", done, len(paths))
            if path not in filtered:
                self._read[path] = self._tried(path, None)
        if filtered:
            self._hash_by_git(sorted(filtered))

    def _tried(self, path: str, sha: str | None) -> tuple[Entry, tuple[int, ...]] | PublishError | None:
        try:
            return self._read_still(path, sha)
        except (FileNotFoundError, NotADirectoryError):
            return None  # it has just been deleted
        except Refused as refusal:
            return PublishError(Failure.NO_PATHS, f"{path}: {refusal.reason}")
        except PublishError as error:
            return error
        except OSError as error:
            return PublishError(
                Failure.DISK,
                f"{path} cannot be read: {error.strerror}. Fix: make it readable for the worker's user",
            )

    def _read_still(self, path: str, sha: str | None) -> tuple[Entry, tuple[int, ...]]:
        """Read a file that holds still. With `sha`, git has read it; only see that it held still."""
        parent, _, name = path.rpartition("/")
        for _ in range(_TRIES):
            with self._folders.file(parent, name) as fd:
                before = os.fstat(fd)
                if before.st_size > self._max_file_bytes:
                    raise PublishError(
                        Failure.TOO_LARGE,
                        f"{path} has {before.st_size} bytes, more than the {self._max_file_bytes} allowed. "
                        "Fix: make it smaller, or raise BRITER_WORKER_MAX_FILE_BYTES",
                    )
                if sha is None:
                    content = _all(fd, before.st_size)
                    if _signature(os.fstat(fd)) != _signature(before) or len(content) != before.st_size:
                        time.sleep(_PAUSE)
                        continue
                    return self._entry(path, before, content), _signature(before)
                return Entry(self._mode(path, before), sha), _signature(before)
        raise PublishError(
            Failure.UNSETTLED, f"{path} keeps changing while it is read. Fix: write it elsewhere, then rename"
        )

    def _entry(self, path: str, status: os.stat_result, content: bytes) -> Entry:
        sha = self._writer.hash(content)
        was = self._tree.entry(path)
        if was is None or was.sha != sha:
            self._writer.blob(sha, content)
        return Entry(self._mode(path, status), sha)

    def _mode(self, path: str, status: os.stat_result) -> str:
        was = self._tree.entry(path)
        if self._keep_modes and was is not None and was.mode not in (LINK, NESTED):
            return was.mode
        executable = status.st_mode & stat.S_IXUSR and not self._keep_modes
        return "100755" if executable else "100644"

    def _hash_by_git(self, paths: Sequence[str]) -> None:
        """Contents that a filter changes on their way in: read by git itself, between two looks."""
        before = {path: self._tried(path, "") for path in paths}
        sound = [path for path in paths if isinstance(before[path], tuple)]
        self._read.update({path: before[path] for path in paths})
        for path, sha in self._hashes(sound).items():
            after = self._tried(path, sha) if isinstance(sha, str) else sha
            first = before[path]
            if isinstance(after, tuple) and isinstance(first, tuple) and after[1] != first[1]:
                after = PublishError(Failure.UNSETTLED, f"{path} changed while git read it")
            self._read[path] = after

    def _hashes(self, paths: Sequence[str]) -> dict[str, str | PublishError]:
        if not paths:
            return {}
        lines = b"".join(os.fsencode(path) + b"\n" for path in paths)
        try:
            out = self._commands.run(
                "hash-object", "-w", "--stdin-paths", stdin=lines, doing=f"git could not read {paths[0]}"
            )
        except PublishError as failure:
            # One file that a filter cannot take stops git: find it, and let the others through.
            if len(paths) == 1:
                return {paths[0]: failure}
            middle = len(paths) // 2
            return self._hashes(paths[:middle]) | self._hashes(paths[middle:])
        return dict(zip(paths, out.decode().split(), strict=True))

    def _look_again(self) -> None:
        """A file that was rewritten while the others were read is read again."""
        filtered = self._attributes.known_filtered
        for path, known in list(self._read.items()):
            if not isinstance(known, tuple):
                continue
            parent, _, name = path.rpartition("/")
            try:
                now = _signature(os.stat(name, dir_fd=self._folders.open(parent), follow_symlinks=False))
            except (OSError, Refused):
                now = ()
            if now != known[1]:
                if path in filtered:
                    self._hash_by_git([path])
                else:
                    self._read[path] = self._tried(path, None)

    # What comes of it

    def _staged(self, draft: _Draft) -> Staged:
        changes: list[Change] = []
        for path in [*draft.gone, *draft.files]:
            was = self._tree.entry(path)
            base = None if was is None or was.is_folder else was.sha
            known = self._read.get(path) if path in draft.files else None
            if isinstance(known, PublishError):
                if known.failure is Failure.NO_PATHS:
                    draft.rejected[path] = known.text
                    continue
                return Staged(rejected=draft.rejected, failure=known.failure, text=known.text)
            if known is None:
                changes.append(Change(path, "", None, base))
                continue
            above = self._file_above(path)
            if above is not None and above not in draft.gone:
                draft.rejected[path] = f"it would replace the file {above}; declare that path, too"
                continue
            changes.append(Change(path, known[0].mode, known[0].sha, base))
        if all(self._is_rejected(draft, declared) for declared in draft.request.paths):
            return Staged(rejected=draft.rejected, failure=Failure.NO_PATHS, text=self._why(draft.rejected))
        return Staged(tuple(changes), draft.rejected, tuple(draft.missing))

    def _is_rejected(self, draft: _Draft, declared: str) -> bool:
        return declared in draft.rejected or draft.places.get(declared) in draft.rejected

    def _why(self, rejected: dict[str, str]) -> str:
        if not rejected:
            return "the job declares no paths. Fix: list what to publish"
        first = "; ".join(f"{path}: {reason}" for path, reason in list(rejected.items())[:3])
        more = f" (and {len(rejected) - 3} more)" if len(rejected) > 3 else ""  # noqa: PLR2004
        allowed = ", ".join(f"{folder}/" for folder in self._allowlist.folders)
        return f"none of its paths may be published: {first}{more}. Fix: declare files under {allowed}"

    def _file_above(self, path: str) -> str | None:
        for i, c in enumerate(path):
            if c == "/":
                entry = self._tree.entry(path[:i])
                if entry is None:
                    return None
                if not entry.is_folder:
                    return path[:i]
        return None


def _signature(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


def _all(fd: int, size: int) -> bytes:
    """The whole file; a file that grows is read to one byte past `size`, which shows."""
    parts: list[bytes] = []
    left = size + 1
    while left > 0 and (part := os.read(fd, min(left, 1 << 22))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _lines(paths: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(path) + b"\0" for path in paths)
