"""After the push: bring the local branch, the index and the work tree up to what the remote has.

Everything here may be done twice, and none of it may fail a job: the posts are on the remote. Order matters
for a crash at any line: the branch moves together with the bases (so no later publication can revert what
came from the remote), then the index follows, then the files that the CMS has not touched.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.attributes import Attributes
from briter_worker.git.bases import Base, Bases, read_bases, write_bases
from briter_worker.git.folders import Folders, Refused, kind_of
from briter_worker.git.objects import FOLDER, LINK, NESTED, Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from briter_worker.git.objects import Objects
    from briter_worker.git.site import Site
    from briter_worker.ports import Plan


@dataclass(frozen=True, slots=True)
class Difference:
    """One path that differs between two commits."""

    old: Entry | None
    new: Entry | None


class Adoption:
    """Takes over what was pushed. Used within one batch."""

    def __init__(self, site: Site, objects: Objects) -> None:
        self._site = site
        self._commands = site.commands
        self._objects = objects

    def adopt(self, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:
        """Take over `plan.new`. `known`: all that it changes, where nothing came from the remote.

        Raises PublishError when something could not be done; it is done by a later adoption or `heal`.
        """
        foreign: dict[str, Difference] = {}
        if known is None:
            foreign = {
                path: each
                for path, each in self.differences(plan.old, plan.new).items()
                if path not in plan.staged or plan.staged[path] != (each.new.sha if each.new else None)
            }
        bases = read_bases(self._site, self._objects)
        kept = {path: base for path, base in bases.items() if path not in plan.staged or path in foreign}
        for path, each in foreign.items():
            started = plan.staged.get(path, each.old.sha if each.old else None)
            if path in plan.staged or path not in kept:
                kept[path] = Base(started)
        self._move(plan, bases, kept)
        try:
            if known is None:
                self._index_differences(plan.old, plan.new, own=plan.staged.keys())
            else:
                self._index(known)
        except PublishError:
            self._site.update(
                (self._site.unindexed_ref, self._site.ref(self._site.unindexed_ref) or plan.old, None),
                log="briter",
            )
            raise
        finally:
            if foreign:
                self._files(foreign, kept)

    def heal(self) -> None:
        """Finish what an earlier adoption could not do to the index."""
        old, tip = self._site.ref(self._site.unindexed_ref), self._site.ref(self._site.branch_ref)
        if old is not None and tip is not None:
            self._index_differences(old, tip, own=())
            self._site.update((self._site.unindexed_ref, None, None), log="briter")

    def differences(self, old: str, new: str) -> dict[str, Difference]:
        """What changed between two commits, by path."""
        return _differences(
            self._commands.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new)
        )

    def _move(self, plan: Plan, before: Bases, after: Bases) -> None:
        tip = self._site.ref(self._site.branch_ref)
        if tip not in (plan.old, plan.new):
            raise PublishError(
                Failure.DIVERGED,
                f"it is published, but {self._site.branch} was changed by somebody meanwhile. "
                f"Fix: git pull --rebase {self._site.remote} {self._site.branch}",
            )
        changes: list[tuple[str, str | None, str | None]] = []
        if tip != plan.new:
            changes.append((self._site.branch_ref, plan.new, plan.old))
        on_remote = plan.remote if plan.dry_run else plan.new
        if on_remote is not None and self._site.ref(self._site.tracking_ref) != on_remote:
            changes.append((self._site.tracking_ref, on_remote, None))
        if plan.dry_run:
            changes.append((self._site.dry_run_ref, plan.new, None))
        elif self._site.ref(self._site.dry_run_ref) is not None:
            changes.append((self._site.dry_run_ref, None, None))
        if before != after:
            changes.append((self._site.bases_ref, write_bases(self._commands, after), None))
        if self._site.ref(plan.ref) is not None:
            changes.append((plan.ref, None, None))
        if changes:
            self._site.update(*changes, log="briter: publish")

    # The index

    def _index(self, entries: Mapping[str, Entry | None]) -> None:
        gone = "0" * len(next((e.sha for e in entries.values() if e), "0" * 40))
        lines = b"".join(
            (f"0 {gone}\t" if entry is None else f"{entry.mode} {entry.sha}\t").encode()
            + os.fsencode(path)
            + b"\0"
            for path, entry in sorted(entries.items(), key=lambda item: item[1] is not None)
        )
        if lines:
            self._commands.run(
                "update-index",
                *("-z", "--add", "--replace", "--index-info"),
                stdin=lines,
                doing="it is published, but the index could not be written",
            )

    def _index_differences(self, old: str, new: str, *, own: Iterable[str]) -> None:
        """Bring the index from one commit to the other, but for what somebody else has staged."""
        differences = self.differences(old, new)
        out = self._commands.run("diff-index", "--cached", "-z", "--raw", "--no-renames", "--no-abbrev", old)
        staged = _differences(out).keys() - set(own)
        marks = self._commands.run("ls-files", "-z", "-t")
        left_out = {os.fsdecode(line[2:]) for line in marks.split(b"\0") if line.startswith(b"S ")}
        self._index({path: each.new for path, each in differences.items() if path not in staged})
        again = sorted(path for path, each in differences.items() if path in left_out and each.new)
        if again:
            self._commands.run(
                "update-index",
                *("-z", "--skip-worktree", "--stdin"),
                stdin=b"".join(os.fsencode(path) + b"\0" for path in again),
            )

    # The files

    def _files(self, foreign: Mapping[str, Difference], bases: Bases) -> None:
        """Write what came from the remote where the work tree still has the version it replaces."""
        marks = self._commands.run("ls-files", "-z", "-t")
        left_out = {os.fsdecode(line[2:]) for line in marks.split(b"\0") if line.startswith(b"S ")}
        folders = Folders(self._commands.worktree)
        written: set[str] = set()
        try:
            for path, each in foreign.items():
                base = bases.get(path)
                if path in left_out or base is None or _is_special(each):
                    continue
                with suppress(OSError, Refused):
                    if self._write(folders, path, each.new, base.start):
                        written.add(path)
        finally:
            folders.close()
        left = {path: base for path, base in bases.items() if path not in written or base.conflict}
        if left != bases:
            self._site.update((self._site.bases_ref, write_bases(self._commands, left), None), log="briter")

    def _write(self, folders: Folders, path: str, entry: Entry | None, expected: str | None) -> bool:
        """Whether the file is now as `entry` says; a file that is not as expected is not touched."""
        parent, _, name = path.rpartition("/")
        full = self._commands.worktree / path
        before = self._version(folders, parent, name, path)
        wanted = None if entry is None else entry.sha
        if before is not None and before[0] == wanted:
            return True
        if (before[0] if before else None) != expected:
            return False
        if entry is None:
            if before is not None and self._unchanged(folders, parent, name, before[1]):
                full.unlink()
                self._remove_empty(full.parent)
            return True
        content = self._smudged(path, entry.sha)
        full.parent.mkdir(parents=True, exist_ok=True)
        folders.open(parent)  # refuses a link on the way
        fd, temporary = tempfile.mkstemp(prefix=".briter-", dir=full.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            self._like_a_checkout(Path(temporary), full.parent, executable=entry.mode == "100755")
            # As late as can be: what the CMS has saved meanwhile stays.
            if not self._unchanged(folders, parent, name, before[1] if before else None):
                return False
            Path(temporary).replace(full)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return True

    def _version(
        self, folders: Folders, parent: str, name: str, path: str
    ) -> tuple[str, os.stat_result] | None:
        """The blob that the file in the work tree would be, and its status; None where there is none."""
        try:
            if kind_of(folders.open(parent), name) is None:
                return None
            with folders.file(parent, name) as fd:
                status = os.fstat(fd)
        except (FileNotFoundError, NotADirectoryError):
            return None
        out = self._commands.run("hash-object", "--stdin-paths", stdin=os.fsencode(path) + b"\n")
        return out.decode().strip(), status

    def _unchanged(self, folders: Folders, parent: str, name: str, before: os.stat_result | None) -> bool:
        try:
            now = os.stat(name, dir_fd=folders.open(parent), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return before is None
        return before is not None and (now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
            before.st_ctime_ns,
        )

    def _smudged(self, path: str, sha: str) -> bytes:
        tip = self._site.ref(self._site.branch_ref)
        if tip is None:
            return self._objects.blob(sha)
        if path not in Attributes(self._commands, self._objects.tree(tip)).filtered([path]):
            return self._objects.blob(sha)
        return self._commands.run("cat-file", "--filters", f"--path={path}", sha)

    def _like_a_checkout(self, file: Path, folder: Path, *, executable: bool) -> None:
        """The mode git gives, and the folder's owner: the CMS has to be able to edit it."""
        mask = os.umask(0)
        os.umask(mask)
        file.chmod((0o777 if executable else 0o666) & ~mask)
        if os.geteuid() == 0:
            owner = folder.stat()
            os.chown(file, owner.st_uid, owner.st_gid)

    def _remove_empty(self, folder: Path) -> None:
        with suppress(OSError):
            while folder != self._commands.worktree:
                folder.rmdir()
                folder = folder.parent


def _is_special(each: Difference) -> bool:
    return any(entry is not None and entry.mode in (LINK, NESTED, FOLDER) for entry in (each.old, each.new))


def _differences(raw: bytes) -> dict[str, Difference]:
    fields = raw.split(b"\0")[:-1]
    found: dict[str, Difference] = {}
    for header, name in zip(fields[::2], fields[1::2], strict=True):
        old_mode, new_mode, old, new, _ = header[1:].decode().split(" ")
        found[os.fsdecode(name)] = Difference(
            None if set(old_mode) == {"0"} else Entry(old_mode, old),
            None if set(new_mode) == {"0"} else Entry(new_mode, new),
        )
    return found
