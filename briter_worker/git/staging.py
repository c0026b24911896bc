"""Work tree → changes: reads what jobs declare, and nothing else.

A declared path passes the allowlist, then every part of it is opened without following links, and what was
opened is what is read. So a link or a nested repository that is swapped in meanwhile is refused, too.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from typing import TYPE_CHECKING

from briter_worker.allowlist import holds
from briter_worker.errors import Failure, PublishError, explained
from briter_worker.git.declared import Declared
from briter_worker.git.folders import Folders, Refused, read_all
from briter_worker.git.objects import FOLDER, LINK, NESTED, Entry
from briter_worker.ports import Change, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.attributes import Attributes
    from briter_worker.git.command import Commands
    from briter_worker.git.commits import Writer
    from briter_worker.git.declared import Draft
    from briter_worker.git.objects import Objects, Tree
    from briter_worker.ports import Request

_TELL_EVERY = 100
_TRIES = 5
_PAUSE = 0.02
"""How often a file that changes while it is read is read again, and how long to wait before."""


class Staging:
    """Stages a batch of requests against one commit's tree. Used once, by one thread."""

    def __init__(
        self,
        commands: Commands,
        *,
        allowlist: Allowlist,
        attributes: Attributes,
        objects: Objects,
        tree: Tree,
        writer: Writer,
        max_file_bytes: int,
        keep_modes: bool,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._commands = commands
        self._allowlist = allowlist
        self._attributes = attributes
        self._objects = objects
        self._tree = tree
        self._writer = writer
        self._max_file_bytes = max_file_bytes
        self._keep_modes = keep_modes
        self._progress = progress
        self._folders = Folders(commands.worktree)
        self._read: dict[str, tuple[Entry, tuple[int, ...]] | PublishError | None] = {}

    def stage(self, requests: Sequence[Request], *, held: Collection[str]) -> dict[str, Staged]:
        """What each request publishes, by its key. Contents are written as blobs on the way."""
        try:
            declared = Declared(
                self._commands,
                allowlist=self._allowlist,
                tree=self._tree,
                folders=self._folders,
                held=held,
            )
            drafts = declared.drafts(requests)
            self._hash(dict.fromkeys(path for draft in drafts for path in draft.files))
            self._look_again(drafts)
            return {draft.request.key: self._staged(draft) for draft in drafts}
        finally:
            self._folders.close()

    def _hash(self, paths: Collection[str]) -> None:
        filtered = self._attributes.filtered(paths)
        filtered -= {path for path in filtered & self._attributes.automatic if self._has_crlf(path)}
        for done, path in enumerate(paths):
            self._commands.watch.touch()
            if done % _TELL_EVERY == 0:
                self._progress("stage", done, len(paths))
            if path not in filtered:
                self._read[path] = self._tried(path, None)
        if filtered:
            self._hash_by_git(sorted(filtered))
        self._progress("stage", len(paths), len(paths))

    def _has_crlf(self, path: str) -> bool:
        """Whether the committed version has CRLF: git then leaves line ends alone that it has to guess."""
        was = self._tree.entry(path)
        return was is not None and not was.is_folder and b"\r\n" in self._objects.blob(was.sha)

    def _tried(self, path: str, sha: str | None) -> tuple[Entry, tuple[int, ...]] | PublishError | None:
        try:
            return self._read_still(path, sha)
        except (FileNotFoundError, NotADirectoryError):
            return None  # it has just been deleted
        except IsADirectoryError:
            return PublishError(Failure.UNSETTLED, f"{path} has just become a folder; it is tried again")
        except Refused as refusal:
            return PublishError(Failure.NO_PATHS, refusal.reason)
        except PublishError as error:
            return error
        except OSError as error:
            return PublishError(Failure.DISK, f"{path} cannot be read: {explained(error, where=False)}")

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
                    content = read_all(fd, before.st_size)
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
        if self._keep_modes and was is not None and was.mode not in (FOLDER, LINK, NESTED):
            return was.mode
        executable = status.st_mode & stat.S_IXUSR and not self._keep_modes
        return "100755" if executable else "100644"

    def _hash_by_git(self, paths: Sequence[str]) -> None:
        """Contents that a filter changes on their way in: read by git itself, between two looks."""
        before = {path: self._tried(path, "") for path in paths}
        sound = [path for path in paths if isinstance(before[path], tuple)]
        self._read.update({path: before[path] for path in paths})
        guessed = self._attributes.guessed
        by_index = {
            path: None
            for path in sound
            if self._attributes.is_unseen(path) or (path in guessed and self._has_crlf(path))
        }
        others = [path for path in sound if path not in by_index]
        found = self._hashes(others, self._by_hash_object) | self._hashes([*by_index], self._by_index)
        for path, sha in found.items():
            after = self._tried(path, sha) if isinstance(sha, str) else sha
            first = before[path]
            if isinstance(after, tuple) and isinstance(first, tuple) and after[1] != first[1]:
                after = PublishError(Failure.UNSETTLED, f"{path} changed while git read it")
            self._read[path] = after

    def _hashes(
        self, paths: Sequence[str], by: Callable[[Sequence[str]], Sequence[str]]
    ) -> dict[str, str | PublishError]:
        if not paths:
            return {}
        try:
            return dict(zip(paths, by(paths), strict=True))
        except PublishError as failure:
            # One file that a filter cannot take stops git: find it, and let the others through.
            if len(paths) == 1:
                return {paths[0]: failure}
            middle = len(paths) // 2
            return self._hashes(paths[:middle], by) | self._hashes(paths[middle:], by)

    def _by_hash_object(self, paths: Sequence[str]) -> Sequence[str]:
        lines = b"".join(os.fsencode(path) + b"\n" for path in paths)
        doing = f"git could not read {paths[0]}"
        return (
            self._commands.run("hash-object", "-w", "--stdin-paths", stdin=lines, doing=doing)
            .decode()
            .split()
        )

    def _by_index(self, paths: Sequence[str]) -> Sequence[str]:
        """As `git add` does, which knows what is committed: attributes, and line ends that it spares.

        hash-object does not. The index here has what matters to these files, not all of the tree: in that
        may be what git refuses.
        """
        with tempfile.TemporaryDirectory(prefix="briter-index-") as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            known = b"".join(
                f"{entry.mode} {entry.sha}\t".encode() + os.fsencode(path) + b"\0"
                for path in {*paths, *self._attributes.above(paths)}
                if (entry := self._tree.entry(path)) is not None and entry.mode not in (FOLDER, NESTED)
            )
            self._commands.run("update-index", "--add", "-z", "--index-info", stdin=known, extra=index)
            lines = b"".join(os.fsencode(path) + b"\0" for path in paths)
            add = ("update-index", "--add", "--replace", "-z", "--stdin")
            doing = f"git could not read {paths[0]}"
            self._commands.run(*add, stdin=lines, extra=index, doing=doing)
            out = self._commands.run("ls-files", "--stage", "-z", extra=index)
        found = {
            name: about.split()[1]
            for about, _, name in (each.partition(b"\t") for each in out.split(b"\0"))
            if name
        }
        return [found[os.fsencode(path)].decode() for path in paths]

    def _look_again(self, drafts: Sequence[Draft]) -> None:
        """What was rewritten, or came back, while the others were read is read again."""
        for draft in drafts:
            back = [path for path in draft.gone if self._signature(path) is not None]
            for path in back:
                # Removed and written anew is how some editors save: that is no deletion.
                del draft.gone[path]
                draft.files[path] = None
        changed = {
            path: None
            for draft in drafts
            for path in draft.files
            if not isinstance(self._read.get(path), PublishError)
            and self._signature(path) != self._known(path)
        }
        if changed:
            self._hash(changed)

    def _known(self, path: str) -> tuple[int, ...] | None:
        known = self._read.get(path)
        return known[1] if isinstance(known, tuple) else None

    def _signature(self, path: str) -> tuple[int, ...] | None:
        """What tells one state of a file from another; None where no regular file is."""
        parent, _, name = path.rpartition("/")
        try:
            status = os.stat(name, dir_fd=self._folders.open(parent), follow_symlinks=False)
        except (OSError, Refused):
            return None
        return _signature(status) if stat.S_ISREG(status.st_mode) else None

    def _staged(self, draft: Draft) -> Staged:
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
            if was is not None and was.is_folder and (stays := self._stays_below(path, draft)):
                draft.rejected[path] = (
                    f"it would take the place of a folder in which {stays} stays, as that is on hold, "
                    "left out or not allowed"
                )
                # So what it alone would have removed stays, too; not what the job itself says is gone.
                below = [place for place in draft.places.values() if place.startswith(f"{path}/")]
                changes = [
                    each
                    for each in changes
                    if not each.path.startswith(f"{path}/") or any(holds(place, each.path) for place in below)
                ]
                continue
            base_mode = "" if was is None or was.is_folder else was.mode
            changes.append(Change(path, known[0].mode, known[0].sha, base, base_mode))
        if all(self._is_rejected(draft, declared) for declared in draft.request.paths):
            return Staged(rejected=draft.rejected, failure=Failure.NO_PATHS, text=self._why(draft.rejected))
        return Staged(tuple(changes), draft.rejected, tuple(draft.missing))

    def _stays_below(self, folder: str, draft: Draft) -> str | None:
        return next(
            (path for path, _ in self._tree.files(folder, nested=True) if path not in draft.gone), None
        )

    def _is_rejected(self, draft: Draft, declared: str) -> bool:
        return declared in draft.rejected or draft.places.get(declared) in draft.rejected

    def _why(self, rejected: dict[str, str]) -> str:
        if not rejected:
            return "the job declares no paths. Fix: list what to publish"
        # No colon behind a path: after such as `config/secret`, what follows would be taken for the secret.
        first = "; ".join(f"{path}, as {reason}" for path, reason in list(rejected.items())[:3])
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
