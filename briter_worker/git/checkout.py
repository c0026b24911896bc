"""The mirror: bring the local branch, the index and the work tree to what the remote has.

All or nothing, and while nobody can commit in between: under the lock of the index, and with the move of the
branch prepared, the files are written, the new index is put in place, and the branch moves. A crash leaves
files or an index that are newer than the branch, never older: no later commit can take a post back.
"""

from __future__ import annotations

import json
import shlex
import stat
import time
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from enum import Enum, auto
from functools import cached_property, partial
from typing import TYPE_CHECKING

from briter_worker.allowlist import is_safe_to_check_out
from briter_worker.errors import FailureCode, PublishError, describe, os_error_text
from briter_worker.git.index import Index, hash_files
from briter_worker.git.refs import move_line
from briter_worker.git.repository import (
    DIFF_TREE,
    LINK,
    SUBMODULE,
    Entry,
    blob_of,
    read_raw,
)
from briter_worker.git.run import nul_lines
from briter_worker.git.work_tree import WorkTree
from briter_worker.job import count

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.git.command import Command
    from briter_worker.git.refs import Move
    from briter_worker.git.repository import Repository

_TRIES = 3
_OTHERS_S, _OTHERS_POLL_S = 0.3, 0.005
"""Time to wait for other gits that may have read the branch before it moved."""
_OTHERS_AGE_S = 2.0
"""An older one waits for an editor or a network, and has long read what it needs."""
_EXECUTABLE = "100755"
_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class FileBase:
    """The version that a file in the work tree is an edit of. None stands for no file."""

    blob: str | None
    committed: str | None = ""
    """The version of branch and index then: what is committed later is an edit of `blob`. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class MirrorState:
    """The mirror's memory between two drains."""

    late: str | None = None
    """The commit that the local branch could not be moved to."""
    bases: Mapping[str, FileBase] = field(default_factory=dict)
    """The versions that files started from, where the branch has another one."""


@dataclass(eq=False, repr=False)
class Checkout:
    """The CMS's clone, which follows the remote when it can."""

    repository: Repository
    warn: Callable[[str, str], None]
    """Called once per reason for being late, with the fix."""
    _: KW_ONLY
    is_cms_path: Callable[[str], bool] = lambda _path: True
    """Other files are a user's: while one is edited that changed on the remote, the mirror waits."""
    updated: Callable[[str, Sequence[str]], None] = lambda _tip, _paths: None
    """Called with the commit and the files of the site that were written from it."""
    record: Callable[[Mapping[str, Entry | None]], None] = lambda _files: None
    """Called with the files that are about to be written, so that `watch` takes none for the CMS's."""
    late_reason: str = field(default="", init=False)
    """The reason why the last sync was delayed; empty if it was not."""
    is_blocked: bool = field(default=False, init=False)
    """The last sync waits for a user's local changes."""

    def __post_init__(self) -> None:
        self.git = self.repository.git
        self._state_ref = f"{self.repository.own_refs}/mirror"
        self._warned: set[str] = set()

    def find_conflicts(self, tip: str, bases: Mapping[str, str | None]) -> None:
        """Look at the CMS's edits of files that `tip` changed, with the versions that they are edits of."""

    def state(self) -> MirrorState:
        """Return what the mirror remembers below one ref, which moves together with the branch."""
        tree = self.repository.ref(self._state_ref)
        if tree is None:
            return MirrorState()
        try:
            document = json.loads(self.repository.blob(f"{tree}:{_RECORD}"))
            bases = {path: FileBase(**base) for path, base in document["bases"].items()}
            return MirrorState(document["late"], bases)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text, fix = f"{self._state_ref} is damaged: {error}", f"git update-ref -d {self._state_ref}"
            raise PublishError(FailureCode.CORRUPT, text, fix) from error

    def write_state(self, state: MirrorState) -> list[Move]:
        """Store the state beside its blobs, which git keeps. Return the move of the ref, if it is needed."""
        now, new = self.repository.ref(self._state_ref), None
        if state != MirrorState():
            record = json.dumps(asdict(state), sort_keys=True).encode()
            command = ("hash-object", "-w", "--stdin", "--no-filters")
            names = {_RECORD: self.git.run(*command, stdin=record).decode().strip()}
            names |= {base.blob: base.blob for base in state.bases.values() if base.blob}
            lines = (f"100644 blob {blob}\t{name}" for name, blob in names.items())
            new = self.git.run("mktree", "-z", stdin=nul_lines(lines)).decode().strip()
        return [] if new == now else [(self._state_ref, new, now or "")]

    def _save(self, state: MirrorState) -> None:
        if moves := self.write_state(state):
            self.repository.update_refs(*moves)

    def agreed(self, tip: str) -> str:
        """Return the commit where the local branch and the remote's `tip` last agreed, else `tip`."""
        local = self._local()
        if local in ("", tip):
            return tip
        return self.git.attempt("merge-base", local, tip)[1].decode().strip() or tip

    def _local(self) -> str:
        return self.repository.ref(self.repository.branch_ref) or ""

    def sync(self, tip: str, blobs: Mapping[str, str | None]) -> bool:
        """Bring branch, index and files to `tip`, now or later. Return False for later.

        `blobs` are the versions of published files as they were read from the work tree. Raises PublishError
        and OSError: they could not be stored.
        """
        try:
            self.follow(tip, blobs)
        except (PublishError, OSError) as error:
            self._warn_late("Published. " if blobs else "", error)
            self.repository.locks.remove_own()  # a git that was killed has left that of the state
            self.remember(tip, blobs)
            return False
        self._warned.clear()
        self.late_reason, self.is_blocked = "", False
        return True

    def catch_up(self) -> None:
        """Finish what an earlier sync could not do, and remove what a dead worker left."""
        try:
            self._index.clear_leftovers()
            self._recover()
            self._undo_raced_move()
            state = self.state()
            if state.late is not None or state.bases:
                self.follow(state.late or self._local(), {})
        except (PublishError, OSError) as error:
            self._warn_late("", error)

    def follow(self, tip: str, blobs: Mapping[str, str | None], *, left: str | None = None) -> None:
        """Bring branch, index and files to `tip` now. Raises PublishError and OSError: nothing moved.

        `left` is the local commit of which `tip` has the rebased version.
        """
        self.repository.check()
        self._recover()
        index, state = self._index, self.state()
        for tries_left in reversed(range(_TRIES)):
            old, new = self._local(), tip
            if old != left and not self.repository.is_ancestor(old, tip):
                new = old  # a user has pulled
                if not self.repository.is_ancestor(tip, old):
                    text = f"{self.repository.branch} has commits that the remote lacks"
                    raise PublishError(FailureCode.DIVERGED, text, "briter-worker pull --rebase --push")
            try:
                with closing(self._open_work_tree()) as work_tree, index.copied():
                    move = _Move(self, old, new, state, index, work_tree)
                    move.prepare(blobs)
                    move.run()
                    self._save(move.next_state(_Action.KEEP))
                    work_tree.clear_temporary()
                if move.old != move.new:
                    self._check_not_raced()
                break
            except PublishError as failure:
                if failure.code is not FailureCode.LOCKED or not tries_left or index.is_locked():
                    raise
        if move.failed:
            path, error = next(iter(move.failed.items()))
            text = f"{count(len(move.failed), 'file')} from the remote could not be written, such as {path}"
            reason = os_error_text(error, with_path=False)
            self._warn_once(f"{text}: {reason}. The next drain tries again", error)

    def _check_not_raced(self) -> None:
        """Raise PublishError if a git that was running has switched branches: then the move is undone."""
        deadline = time.monotonic() + _OTHERS_S
        while self.repository.locks.is_git_running(younger=_OTHERS_AGE_S) and time.monotonic() < deadline:
            time.sleep(_OTHERS_POLL_S)
        if self._undo_raced_move():
            branch = self.repository.branch
            text = f"another branch was checked out while {branch} moved"
            raise PublishError(FailureCode.WRONG_BRANCH, text, f"git switch {branch}")

    def _undo_raced_move(self) -> bool:
        """Undo the last move if `git switch --create` read the branch before it. Return True if undone.

        Git then makes the new branch from the former commit, and takes the index as it is by now: what the
        move has brought would be staged there. Index and branch go back; the files stay, and count as
        edits of the versions that they have.
        """
        repository = self.repository
        repository.refs.forget()
        head, moved = repository.refs.head(), self._local()
        if head in ("", repository.branch_ref) or not moved:
            return False
        former = self.git.attempt("rev-parse", "--verify", "--quiet", head)[1].decode().strip()
        last = self.git.attempt("log", "--walk-reflogs", "--max-count=1", "--format=%gs", "HEAD", "--")[1]
        if not last.decode(errors="replace").startswith(f"checkout: moving from {repository.branch} to "):
            return False
        if former in ("", moved) or not repository.is_ancestor(former, moved):
            return False
        raw = self.git.fields(*DIFF_TREE, "--raw", "--no-abbrev", former, moved)
        changed = {path: (before, after) for _, path, before, after in read_raw(raw)}
        staged = self._index.entries(changed)[0]
        if not changed or any(staged.get(path) != after for path, (_, after) in changed.items()):
            return False
        bases = {path: FileBase(blob_of(after)) for path, (_, after) in changed.items()}
        state = MirrorState(moved, {**self.state().bases, **bases})
        moves = [*self.write_state(state), (repository.branch_ref, former, moved)]
        with self._index.copied():
            self._index.change({path: before for path, (before, _) in changed.items()})
            with self.moving("briter: undo", moves):
                pass
        return True

    @contextmanager
    def moving(self, reason: str, moves: Sequence[Move]) -> Iterator[None]:
        """Hold index and refs inside, for changes of files; then put the new index in place, move the refs.

        Nobody can switch branches meanwhile: HEAD is locked, too. An exception leaves both as they were.
        """
        update = self.git.open("update-ref", "-m", reason, "--stdin")
        with self._index.locked(), update as command:
            say = partial(_transact, command)
            say("start")
            for each in moves:
                say(move_line(each))
            say("prepare")
            yield
            self._index.place()
            say("commit")
        self.repository.refs.note(moves)

    def _recover(self) -> None:
        """Remember what an unfinished move has written, as edits since are of these versions."""
        with closing(self._open_work_tree()) as work_tree:
            for tip, paths in work_tree.placed().items():
                entries = self.repository.entries(tip, paths)
                self.remember(tip, {path: blob_of(entries.get(path)) for path in paths})
            work_tree.clear_temporary()

    def remember(self, tip: str, blobs: Mapping[str, str | None]) -> None:
        """Store the versions that the published files are edits of from now on; the branch follows `tip`."""
        state, committed = self.state(), dict[str, str | None]()
        if blobs and self._local() and self.repository.refs.head() == self.repository.branch_ref:
            entries = self.repository.entries(self._local(), blobs)
            committed = self._index.committed({path: entries.get(path) for path in blobs})
        bases = {path: FileBase(blob, committed.get(path, "")) for path, blob in blobs.items()}
        self._save(MirrorState(tip, {**state.bases, **bases}))

    @cached_property
    def _index(self) -> Index:
        return Index(self.git)

    def _open_work_tree(self) -> WorkTree:
        return WorkTree(self.git.worktree or self.git.git_dir, self.git.state_dir / "temporary-files")

    def _warn_late(self, prefix: str, error: PublishError | OSError) -> None:
        self.late_reason = describe(error)[0]
        self.is_blocked = isinstance(error, PublishError) and error.code is FailureCode.DIVERGED
        branch = self.repository.branch
        text = f"{prefix}The local branch {branch} is behind: {self.late_reason}. It updates by itself."
        self._warn_once(text, error)

    def _warn_once(self, text: str, error: PublishError | OSError) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.warn(text, describe(error)[1])


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
    temporary: str | None = None
    """The new file, beside its target; None: the file is removed."""


@dataclass(slots=True)
class _Move:
    """One move of the branch, of the index and of the files."""

    checkout: Checkout
    old: str
    new: str
    state: MirrorState
    index: Index
    work_tree: WorkTree
    failed: dict[str, OSError] = field(default_factory=dict)
    """Files that could not be read or written."""
    files: dict[str, _File] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)
    staged: dict[str, Entry] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    """Files that git ignores in the work tree."""

    def _list_files(self, blobs: Mapping[str, str | None]) -> dict[str, _File]:
        bases = {path: base.blob for path, base in self.state.bases.items()} | dict(blobs)
        changed, files = list[str](), dict[str, _File]()
        if self.old != self.new:
            changed = self.checkout.git.fields(*DIFF_TREE, "--raw", "--no-abbrev", self.old, self.new)
        for _, path, before, after in read_raw(changed):
            # The index takes no path that git would not write: one such path must not stop the others.
            if is_safe_to_check_out(path):
                base = None if _is_special(before) else blob_of(before)
                files[path] = _File(before, after, bases.get(path, base), path in bases)
        others = [path for path in self.state.bases if path not in files]
        entries = self.checkout.repository.entries(self.new, others)
        for path in others:
            files[path] = _File(entries.get(path), entries.get(path), bases[path], is_published=True)
        return files

    def paths(self, *actions: _Action) -> list[str]:
        return [path for path, file in self.files.items() if file.action in actions]

    def next_state(self, *actions: _Action) -> MirrorState:
        """Return the state after the move, with the bases of the files that have one of these actions."""
        kept = {path: self.files[path] for path in self.paths(*actions)}
        return MirrorState(
            bases={path: FileBase(each.base, blob_of(each.new)) for path, each in kept.items()}
        )

    def prepare(self, blobs: Mapping[str, str | None]) -> None:
        """Do everything that takes time: compare the files, write the new ones aside, build the index."""
        self.files = self._list_files(blobs)
        self.staged, self.skipped = self.index.entries(self.files)
        for path, each in self.files.items():
            if not each.is_published and self.staged.get(path) not in (each.old, each.new):
                raise PublishError(
                    FailureCode.DIVERGED,
                    f"{path} is staged, and the remote has another version",
                    f"commit it, or git restore --staged {shlex.quote(path)}",
                )
        self._compare()
        for path in self.paths(_Action.KEEP):
            is_new = self.old != self.new and path not in self.state.bases and path not in self.failed
            if is_new and not self.checkout.is_cms_path(path):
                raise PublishError(
                    FailureCode.DIVERGED,
                    f"{path} has local changes, and the remote has another version",
                    f"commit it, or drop the changes: git restore {shlex.quote(path)}",
                )
        changed = {
            path: each.new
            for path, each in self.files.items()
            if each.old != each.new
            or each.action is _Action.WRITE
            or (path in self.skipped and each.action is _Action.NONE)
        }
        self.index.change(changed)
        self._write_temporaries()
        marked = [path for path in self.paths(_Action.KEEP, _Action.LEAVE_OUT) if self.files[path].new]
        self.index.skip([path for path in marked if path in changed or path not in self.skipped])

    def _compare(self) -> None:
        """Decide what happens to each file."""
        unknown = []
        for path, each in self.files.items():
            if path in self.skipped and path not in self.state.bases and not _is_special(each.old):
                each.action = _Action.LEAVE_OUT
                continue
            try:
                each.status, found = self.work_tree.read(path, len(self.new))
            except OSError as error:
                each.action = _Action.KEEP if each.new else _Action.NONE
                if not _is_special(each.new):
                    self.failed[path] = error
                continue
            each.action = self._decide(path, each, found)
            if found not in (None, each.base, blob_of(each.new)) and not _is_special(each.new):
                unknown.append(path)  # git may convert the file
        for path, found in zip(unknown, hash_files(self.checkout.git, unknown), strict=True):
            self.files[path].action = self._decide(path, self.files[path], found)

    def _decide(self, path: str, each: _File, found: str | None) -> _Action:
        """Return what happens to a file whose version `found` is."""
        new = blob_of(each.new)
        if _is_special(each.new):
            return _Action.LEAVE_OUT if found is None else _Action.KEEP
        if found == new:
            return _Action.WRITE if self._lacks_mode(each) else _Action.NONE
        if each.is_published and each.base == new:
            # Published as it was. An edit since is committed as any other. But the branch's former version
            # may also come from git: of a user who committed the post elsewhere, or stashed it.
            former = (blob_of(each.old), blob_of(self.staged.get(path)))
            return _Action.KEEP if path in self.skipped or found in former else _Action.NONE
        return _Action.WRITE if found == each.base else _Action.KEEP

    def _lacks_mode(self, each: _File) -> bool:
        """Return True if the mode changed on the remote, and the file still has the former one."""
        if not (each.old and each.new and each.status) or each.old.mode == each.new.mode:
            return False
        is_executable = bool(each.status.st_mode & stat.S_IXUSR)
        has_modes = self.checkout.git.config("core.fileMode") != "false"
        return has_modes and is_executable != (each.new.mode == _EXECUTABLE)

    def _write_temporaries(self) -> None:
        """Write the wanted files beside their targets, so that only names change under the locks."""
        wanted = [path for path in self.paths(_Action.WRITE) if self.files[path].new]
        for path, content in self.index.check_out(wanted):
            each = self.files[path]
            is_executable = each.new is not None and each.new.mode == _EXECUTABLE
            try:
                with content.open("rb") as source:
                    each.temporary = self.work_tree.copy_beside(
                        path, source, executable=is_executable, like=each.status
                    )
            except OSError as error:
                self.failed[path] = error
                each.action = _Action.KEEP

    def run(self) -> None:
        """Make the move, unless there is nothing to do."""
        wanted = self.paths(_Action.WRITE)
        if self.old == self.new and not wanted and not self.index.is_changed:
            return
        moves = self.checkout.write_state(self.next_state(_Action.KEEP, _Action.WRITE))
        if self.old != self.new:
            moves.append((self.checkout.repository.branch_ref, self.new, self.old))
        try:
            with self.checkout.moving("briter: sync", moves):
                self.checkout.repository.check()
                self._put_files(wanted)
                self.index.skip([path for path in wanted if self.files[path].action is _Action.KEEP])
        finally:
            if self.written:
                self.checkout.updated(self.new, self.written)
        kept = {path: self.files[path] for path in self.paths(_Action.KEEP) if path not in self.failed}
        if bases := {path: each.base for path, each in kept.items() if each.old != each.new}:
            self.checkout.find_conflicts(self.new, bases)

    def _put_files(self, wanted: Collection[str]) -> None:
        """Give the new files their names, after removals: a file may take a folder's place."""
        self.checkout.record({path: self.files[path].new for path in wanted})
        for path in sorted(wanted, key=lambda path: self.files[path].new is not None):
            each, is_done = self.files[path], False
            try:
                is_done = self.work_tree.put(each.temporary, path, each.status, self.new)
            except OSError as error:
                self.failed[path] = error
            if is_done:
                self.written.append(path)
            else:
                each.action = _Action.KEEP


def _transact(command: Command, line: str) -> None:
    """Send one line to `git update-ref --stdin`; of a step of the transaction, await the answer."""
    command.send.write(f"{line}\n".encode())
    if line in {"start", "prepare", "commit"}:
        command.send.flush()
        if command.answers.readline() != f"{line}: ok\n".encode():
            raise EOFError  # `Git.open` raises git's own words


def _is_special(entry: Entry | None) -> bool:
    return entry is not None and entry.mode in (LINK, SUBMODULE)
