"""The mirror: bring the local branch, the index and the work tree to what the remote has.

All or nothing, and while nobody can commit in between: under the lock of the index, and with the move of the
branch prepared, the files are written, the new index is put in place, and the branch moves. A crash leaves
files or an index that are newer than the branch, never older: no later commit can take a post back.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from typing import IO, TYPE_CHECKING, cast

from briter_worker.allowlist import is_safe_to_check_out
from briter_worker.errors import FailureCode, PublishError, os_error_fix, os_error_text
from briter_worker.git.index import Index
from briter_worker.git.mirror_state import FileBase, MirrorState, StateRef
from briter_worker.git.repository import LINK, SUBMODULE, Entry
from briter_worker.git.work_tree import Temporary, WorkTree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from briter_worker.git.index import IndexEntry
    from briter_worker.git.repository import Repository

_TRIES = 3
_FEW_PATHS = 100
_PIECE_BYTES = 1 << 20
_EXECUTABLE = "100755"
_CONVERSIONS = ("filter", "text", "eol", "crlf", "ident", "working-tree-encoding")


class _Action(Enum):
    NONE = auto()
    """The file is the branch's new version, or an edit of it."""
    WRITE = auto()
    """The file is still its base version: bring it to the branch's."""
    KEEP = auto()
    """The file is something else, or cannot be written: remember its base version."""
    LEAVE_OUT = auto()
    """A link, a submodule, or a file that a sparse checkout leaves out: only the index has it."""


@dataclass(slots=True)
class _File:
    """A path whose version the move changes, or whose file still had another base version before."""

    old: Entry | None
    new: Entry | None
    base: str | None
    """The version that the file in the work tree started from."""
    is_published: bool
    """`base` was published, or is remembered: what the index has of the path counts for nothing."""
    action: _Action = _Action.NONE
    status: os.stat_result | None = None
    temporary: Temporary | None = None
    former: tuple[str | None, ...] = ()
    """The versions that branch and index had."""
    is_marked: bool = False
    """Git ignores the file in the work tree."""

    @property
    def blob(self) -> str | None:
        return self.new.blob if self.new else None


@dataclass(slots=True)
class _Step:
    """One move of the branch."""

    old: str
    new: str
    state: MirrorState
    files: dict[str, _File]
    failed: dict[str, OSError] = field(default_factory=dict)

    def paths(self, *actions: _Action) -> list[str]:
        return [path for path, file in self.files.items() if file.action in actions]

    def next_state(self, *actions: _Action) -> MirrorState:
        """Return the state after the move, with the bases of the files that have one of these actions."""
        kept = {path: self.files[path] for path in self.paths(*actions)}
        bases = {path: FileBase(each.base, each.blob, is_unstaged=True) for path, each in kept.items()}
        return MirrorState(bases=bases)


class Checkout:
    """The CMS's clone, which follows the remote when it can."""

    def __init__(
        self,
        repository: Repository,
        warn: Callable[[str, str], None],
        *,
        is_cms_path: Callable[[str], bool] = lambda _path: True,
    ) -> None:
        """Warn once per reason for being late, with the fix. Files that are not the CMS's are a person's.

        While a person has edited a file that changed on the remote, the mirror waits.
        """
        self._repository = repository
        self._git = repository.git
        self._state = StateRef(repository)
        self._warn = warn
        self._warned: set[str] = set()
        self._is_cms_path = is_cms_path
        self._index: Index | None = None

    # For the publisher

    def bases(self, paths: Collection[str]) -> Mapping[str, str | None]:
        """Return the remembered base versions of these paths; a path without one has that of `agreed`."""
        bases = self._state.read().bases
        return {path: bases[path].blob for path in paths if path in bases}

    def agreed(self, tip: str) -> str | None:
        """Return the commit where the local branch and the remote's `tip` last agreed."""
        local = self._repository.ref(self._repository.branch_ref)
        if local in (None, tip):
            return local
        return self._git.attempt("merge-base", str(local), tip)[1].decode().strip() or None

    def state(self) -> MirrorState:
        """Return what the mirror remembers: for a late one, `late` and `reason`."""
        return self._state.read()

    def sync(self, tip: str, blobs: Mapping[str, str | None]) -> bool:
        """Bring branch, index and files to `tip`, now or later. Return False for later.

        `blobs` are the versions of published files as they were read from the work tree.
        """
        try:
            self._follow(tip, blobs, self._state.read())
        except (PublishError, OSError) as error:
            self._warn_late("Published. ", error)
            try:
                self._repository.clear_own_locks()  # a git that was killed has left the lock of the state
                self.remember(tip, blobs, reason=_text(error))
            except (PublishError, OSError) as second:
                text = f"The base versions of published files could not be stored: {_text(second)}"
                self._warn_once(text, _fix(second))
            return False
        self._warned.clear()
        return True

    def catch_up(self) -> None:
        """Finish what an earlier sync could not do, and remove what a dead worker left."""
        try:
            self._open_index().clear_leftovers()
            with self._work_tree() as work_tree:
                work_tree.clear_temporary()
            state = self._state.read()
            if state.late is not None or state.bases:
                self._follow(state.late or self._local(), {}, state)
        except (PublishError, OSError) as error:
            self._warn_late("", error)

    # For `pull`

    def has_version(self, path: str, blob: str | None) -> bool:
        """Return True if the file in the work tree is this version."""
        with self._work_tree() as work_tree:
            found = work_tree.read(path, id_length=len(self._local()))[1]
        return found == blob or (found is not None and self._hash_files([path])[0] == blob)

    def replace_commits(self, old: str, new: str) -> None:
        """Move the branch from local commits to their rebased version. Raises PublishError: nothing moved."""
        self._follow(new, {}, replace(self._state.read(), rebased=(old, new)))

    def remember_rebased(self, old: str, new: str) -> None:
        """Have later syncs leave the commit `old` for `new`, its rebased version, which is on the remote."""
        self._state.save(replace(self._state.read(), late=new, rebased=(old, new)))

    # One move

    def _follow(self, tip: str, blobs: Mapping[str, str | None], state: MirrorState) -> None:
        self._repository.check()
        index = self._open_index()
        for left in reversed(range(_TRIES)):
            old = self._local()
            new = tip if old == tip or self._may_move(old, tip, state) else old
            step = _Step(old, new, state, self._list_files(old, new, blobs, state))
            try:
                with self._work_tree() as work_tree, index.copied():
                    self._prepare(step, index, work_tree)
                    self._move(step, index, work_tree)
                break
            except PublishError as failure:
                if failure.code is not FailureCode.LOCKED or not left or index.is_locked():
                    raise
        self._state.save(step.next_state(_Action.KEEP))
        self._warn_failed(step.failed)

    def _may_move(self, old: str, tip: str, state: MirrorState) -> bool:
        """Return True if `tip` contains the local branch; False if a person has pulled and it is contained.

        Raises PublishError if there are local commits that the remote lacks.
        """
        contains = self._repository.is_ancestor
        if contains(old, tip):
            return True
        if state.rebased and state.rebased[0] == old and contains(state.rebased[1], tip):
            return True
        if contains(tip, old):
            return False
        raise PublishError(
            FailureCode.DIVERGED,
            f"{self._repository.branch} has commits that the remote lacks",
            "briter-worker pull --rebase --push",
        )

    def _list_files(
        self, old: str, new: str, blobs: Mapping[str, str | None], state: MirrorState
    ) -> dict[str, _File]:
        bases = {path: base.blob for path, base in state.bases.items()} | dict(blobs)
        files = {}
        for path, (before, after) in self._differences(old, new).items():
            base = before.blob if before and not _is_special(before) else None
            files[path] = _File(before, after, bases.get(path, base), path in bases)
        others = [path for path in state.bases if path not in files]
        entries = self._repository.entries(new, others)
        for path in others:
            files[path] = _File(entries.get(path), entries.get(path), bases[path], is_published=True)
        return files

    def _differences(self, old: str, new: str) -> dict[str, tuple[Entry | None, Entry | None]]:
        if old == new:
            return {}
        out = self._git.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", old, new)
        # The index takes no path that git would not write: one such path must not stop the others.
        return {path: (before, after) for path, before, after in _read_raw(out) if is_safe_to_check_out(path)}

    def _former_versions(self, step: _Step, paths: Collection[str]) -> set[tuple[str, str]]:
        """Return the versions of these paths that the remote had between the two commits.

        A sync that was killed, or whose branch a person has set back, wrote such a file: it is no edit.
        """
        if not 0 < len(paths) <= _FEW_PATHS:
            return set()
        out = self._git.run(
            *("log", "-z", "-m", "--raw", "--format=", "--no-renames", "--no-abbrev"),
            *(f"{step.old}..{step.new}", "--", *(f":(top,literal){path}" for path in paths)),
        )
        return {(path, after.blob) for path, _, after in _read_raw(out) if after}

    def _prepare(self, step: _Step, index: Index, work_tree: WorkTree) -> None:
        """Do everything that takes time: compare the files, write the new ones aside, build the index."""
        entries = index.entries(step.files)
        for path, each in step.files.items():
            self._check_unstaged(path, each, entries.get(path))
            found = entries.get(path)
            each.former = (each.old.blob if each.old else None, found.entry.blob if found else None)
            each.is_marked = found is not None and found.skips_worktree
            if each.is_marked and path not in step.state.bases and not _is_special(each.old):
                each.action = _Action.LEAVE_OUT
        self._compare(step, work_tree)
        for path in [each for each in step.paths(_Action.KEEP) if each not in step.failed]:
            if step.old != step.new and path not in step.state.bases and not self._is_cms_path(path):
                raise PublishError(
                    FailureCode.DIVERGED,
                    f"{path} has local changes, and the remote has another version",
                    f"commit it, or drop the changes: git restore {shlex.quote(path)}",
                )
        self._write_temporaries(step, work_tree)
        changed = {
            path: each.new
            for path, each in step.files.items()
            if each.old != each.new or (each.is_marked and each.action in (_Action.NONE, _Action.WRITE))
        }
        index.change_copy(changed, null="0" * len(step.new))
        index.skip_in_copy([p for p in step.paths(_Action.KEEP, _Action.LEAVE_OUT) if step.files[p].new])

    def _check_unstaged(self, path: str, each: _File, found: IndexEntry | None) -> None:
        if found and found.stage:
            raise PublishError(
                FailureCode.UNFINISHED, f"{path} is unmerged in the index", "resolve the merge, or abort it"
            )
        if each.is_published or (found.entry if found else None) in (each.old, each.new):
            return
        raise PublishError(
            FailureCode.DIVERGED,
            f"{path} is staged, and the remote has another version",
            f"commit it, or git restore --staged {shlex.quote(path)}",
        )

    def _move(self, step: _Step, index: Index, work_tree: WorkTree) -> None:
        wanted = step.paths(_Action.WRITE)
        if step.old == step.new and not wanted and not index.has_changes:
            return
        moves = [self._state.move_to(step.next_state(_Action.KEEP, _Action.WRITE))]
        if step.old != step.new:
            moves.append((self._repository.branch_ref, step.new, step.old))
        what = f"{self._repository.branch} could not be moved"
        update = self._git.open("update-ref", "-m", "briter: sync", "--stdin", what=what)
        with index.locked(), update as process:
            say = partial(_transact, process.stdin, process.stdout)
            say("start")
            for name, new, old in filter(None, moves):
                must = old or "0" * len(step.new)
                say(f"update {name} {new} {must}" if new else f"delete {name} {must}")
            say("prepare")
            self._repository.check()  # nobody can switch branches any more: HEAD is locked, too
            self._put_files(step, work_tree)
            index.skip_in_copy([path for path in wanted if step.files[path].action is _Action.KEEP])
            index.place()
            say("commit")

    def _put_files(self, step: _Step, work_tree: WorkTree) -> None:
        """Give the new files their names, after removals: a file may take a folder's place."""
        wanted = step.paths(_Action.WRITE)
        for path in sorted(wanted, key=lambda path: step.files[path].new is not None):
            each, is_done = step.files[path], True
            try:
                if each.temporary is not None:
                    is_done = work_tree.put(each.temporary, path, each.status)
                elif each.status is not None:
                    is_done = work_tree.remove(path, each.status)
            except OSError as error:
                step.failed[path] = error
                is_done = False
            if not is_done:
                each.action = _Action.KEEP

    # The files

    @contextmanager
    def _work_tree(self) -> Iterator[WorkTree]:
        root = self._git.worktree or self._git.git_dir
        work_tree = WorkTree(root, self._git.state_dir / "temporary-files")
        try:
            yield work_tree
        finally:
            work_tree.clear_temporary()
            work_tree.close()

    def _compare(self, step: _Step, work_tree: WorkTree) -> None:
        """Decide what happens to each file."""
        unknown, edited = [], {}
        for path, each in step.files.items():
            if each.action is _Action.LEAVE_OUT:
                continue
            try:
                each.status, found = work_tree.read(path, id_length=len(step.new))
            except OSError as error:
                each.action = _Action.KEEP if each.new else _Action.NONE
                if not _is_special(each.new):
                    step.failed[path] = error
                continue
            each.action = self._decide(each, found)
            if found not in (None, each.base, each.blob) and not _is_special(each.new):
                unknown.append(path)  # git may convert the file
        for path, found in zip(unknown, self._hash_files(unknown), strict=True):
            each = step.files[path]
            each.action = self._decide(each, found)
            if each.action is _Action.KEEP and not each.is_published:
                edited[path] = found
        for path, _ in self._former_versions(step, edited) & edited.items():
            step.files[path].action = _Action.WRITE

    def _decide(self, each: _File, found: str | None) -> _Action:
        """Return what happens to a file whose version `found` is."""
        if _is_special(each.new):
            return _Action.LEAVE_OUT if found is None else _Action.KEEP
        if found == each.blob:
            return _Action.WRITE if self._lacks_mode(each) else _Action.NONE
        if each.old != each.new and each.is_published and each.base == each.blob:
            # Published as it was. An edit since is committed as any other. But the branch's former version
            # may also come from git: of a person who committed the post elsewhere, or stashed it.
            return _Action.KEEP if each.is_marked or found in each.former else _Action.NONE
        return _Action.WRITE if found == each.base else _Action.KEEP

    def _lacks_mode(self, each: _File) -> bool:
        """Return True if the mode changed on the remote, and the file still has the former one."""
        if not (each.old and each.new and each.status) or each.old.mode == each.new.mode:
            return False
        is_executable = bool(each.status.st_mode & stat.S_IXUSR)
        has_modes = self._git.config("core.fileMode") != "false"
        return has_modes and is_executable != (each.new.mode == _EXECUTABLE)

    def _hash_files(self, paths: Collection[str]) -> list[str]:
        """Return the blob of each file, as git would add it."""
        if not paths:
            return []
        # git unquotes a name as JSON does; a line break in a name would end the line.
        lines = (
            json.dumps(path, ensure_ascii=False) if '"' in path or "\n" in path else path for path in paths
        )
        stdin = os.fsencode("".join(f"{line}\n" for line in lines))
        what = "the site's files could not be read"
        return self._git.run("hash-object", "--stdin-paths", stdin=stdin, what=what).decode().splitlines()

    def _write_temporaries(self, step: _Step, work_tree: WorkTree) -> None:
        """Write the wanted files beside their targets, so that only names change under the locks."""
        wanted = {
            path: each for path, each in step.files.items() if each.action is _Action.WRITE and each.blob
        }
        for path, pieces in self._contents({path: str(each.blob) for path, each in wanted.items()}):
            each = wanted[path]
            is_executable = each.new is not None and each.new.mode == _EXECUTABLE
            try:
                each.temporary = work_tree.write_beside(
                    path, pieces, executable=is_executable, like=each.status
                )
            except OSError as error:
                step.failed[path] = error
                each.action = _Action.KEEP

    def _contents(self, blobs: Mapping[str, str]) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Yield each path and its content in pieces, as git writes it into a work tree."""
        converted = self._converted(blobs)
        plain = [path for path in blobs if path not in converted]
        contents = self._repository.blobs(blobs[path] for path in plain)
        for path, (_, pieces) in zip(plain, contents, strict=True):
            yield path, pieces
        for path in converted:
            with self._git.open("cat-file", "--filters", f"--path={path}", blobs[path]) as process:
                pieces = iter(partial(cast("IO[bytes]", process.stdout).read, _PIECE_BYTES), b"")
                yield path, pieces
                for _ in pieces:  # those that the caller left: git would wait for a reader
                    pass

    def _converted(self, paths: Collection[str]) -> list[str]:
        """Return the paths of files that git converts: line endings, filters, encodings."""
        if self._git.config("core.autocrlf", "false") != "false":
            return list(paths)
        if not paths:
            return []
        stdin = os.fsencode("".join(f"{path}\0" for path in paths))
        out = os.fsdecode(self._git.run("check-attr", "-z", "--stdin", *_CONVERSIONS, stdin=stdin)).split(
            "\0"
        )
        found = {path for path, value in zip(out[::3], out[2::3], strict=False) if value != "unspecified"}
        return [path for path in paths if path in found]

    # Later

    def remember(self, tip: str, blobs: Mapping[str, str | None], *, reason: str = "") -> None:
        """Store the versions that the published files are edits of from now on; `tip` is to be followed."""
        state, committed = self._state.read(), self._unstaged_versions(blobs)
        bases = {
            path: FileBase(blob, committed.get(path), is_unstaged=path in committed)
            for path, blob in blobs.items()
        }
        self._state.save(replace(state, late=tip, reason=reason, bases={**state.bases, **bases}))

    def _unstaged_versions(self, paths: Collection[str]) -> dict[str, str | None]:
        """Return the local branch's version of the paths of which the index has no other one."""
        index = self._open_index()
        before = index.stamp()
        if not paths or before is None or index.is_locked() or not self._repository.is_checked_out():
            return {}
        staged, branch = index.entries(paths), self._repository.entries(self._local(), paths)
        if index.is_locked() or index.stamp() != before:
            return {}
        versions = {path: branch.get(path) for path in paths}
        return {
            path: entry.blob if entry else None
            for path, entry in versions.items()
            if (staged[path].entry if path in staged else None) == entry
        }

    def _open_index(self) -> Index:
        self._index = self._index or Index(self._git, self._repository.branch_ref)
        return self._index

    def _local(self) -> str:
        tip = self._repository.ref(self._repository.branch_ref)
        if tip is None:
            raise PublishError(FailureCode.WRONG_BRANCH, f"{self._repository.branch} has no commit yet")
        return tip

    def _warn_late(self, prefix: str, error: PublishError | OSError) -> None:
        branch = self._repository.branch
        text = f"{prefix}The local branch {branch} is behind: {_text(error)}. It updates by itself."
        self._warn_once(text, _fix(error))

    def _warn_failed(self, failed: Mapping[str, OSError]) -> None:
        if failed:
            path, error = next(iter(failed.items()))
            self._warn_once(
                f"{len(failed)} files from the remote could not be written, such as {path}: "
                f"{os_error_text(error, with_path=False)}. The next drain tries again",
                os_error_fix(error),
            )

    def _warn_once(self, text: str, fix: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text, fix)


def _transact(stdin: IO[bytes] | None, stdout: IO[bytes] | None, line: str) -> None:
    """Send one line to `git update-ref --stdin`; of a step of the transaction, await the answer."""
    if stdin is None or stdout is None:
        raise EOFError
    stdin.write(f"{line}\n".encode())
    if line in {"start", "prepare", "commit"}:
        stdin.flush()
        if stdout.readline() != f"{line}: ok\n".encode():
            raise EOFError  # `Git.open` raises git's own words


def _read_raw(out: bytes) -> Iterator[tuple[str, Entry | None, Entry | None]]:
    """Yield path, old and new entry of what git prints with `--raw -z`."""
    fields = os.fsdecode(out).split("\0")[:-1]
    for header, path in zip(fields[::2], fields[1::2], strict=True):
        old_mode, new_mode, old_blob, new_blob, _ = header[1:].split(" ")
        before = Entry(old_mode, old_blob) if old_mode.strip("0") else None
        yield path, before, Entry(new_mode, new_blob) if new_mode.strip("0") else None


def _is_special(entry: Entry | None) -> bool:
    return entry is not None and entry.mode in (LINK, SUBMODULE)


def _text(error: Exception) -> str:
    return os_error_text(error) if isinstance(error, OSError) else str(error)


def _fix(error: PublishError | OSError) -> str:
    return error.fix if isinstance(error, PublishError) else os_error_fix(error)
