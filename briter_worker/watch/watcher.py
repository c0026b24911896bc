"""The loop of `watch`: look where something may have changed, and enqueue what is saved."""

from __future__ import annotations

import math
import os
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import filelock

from briter_worker.allowlist import PathRefusedError, is_inside, normalized, objection_to, parents
from briter_worker.errors import FailureCode, FixableError, PublishError, describe, failure_of, one_line
from briter_worker.git.folders import Folders
from briter_worker.git.index import hash_files
from briter_worker.git.repository import LINK, SUBMODULE, blob_of
from briter_worker.git.staging import ignored_paths, sparse_paths
from briter_worker.git.undo import LOCK_NAME
from briter_worker.job import Program, State
from briter_worker.watch import LEDGER_NAME
from briter_worker.watch.kernel import Writer, open_source
from briter_worker.watch.ledger import UNPROVEN, Known, Ledger, LedgerDamagedError, Version, remove
from briter_worker.watch.saves import (
    EMPTY_BLOBS,
    Change,
    Posts,
    Save,
    decide,
    is_declared,
    renames_of,
    replaced_by,
)
from briter_worker.watch.tree import Kind, Tree, is_rewritten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.repository import Entry, Repository
    from briter_worker.ports import ListedJob
    from briter_worker.sinks.earlier import Cancellation
    from briter_worker.watch.kernel import Look, Source
    from briter_worker.watch.tree import Seen

_LOCK_NAME = "watch.lock"
_WAITING = frozenset({State.PENDING, State.SCHEDULED, State.RETRYING, State.QUIET, State.TRIED})
"""States of jobs that will read their files later."""
_AGAIN_NAME = "watch.again"
STILL_S = 0.015
"""A closed file is read when it had no event for this long."""
LONGEST_STILL_S = 0.2
"""Longest time from the first close of a file to its read, if the file is closed then."""
GONE_S = 1.0
"""A file that is gone, or empty, may come back: many programs save so. A rename may take so long."""
ARRIVAL_S = 0.5
"""The files of a new folder are one bundle, in whatever order they come, if none comes later than this."""
LONGEST_ARRIVAL_S = 10.0
MAX_ARRIVING = 1000
"""With more files than this, new folders are an import, and nobody waits for the last one."""
UNCERTAIN_S = 2.0
"""A file counts as closed when it did not change for this long, where the kernel cannot say so."""
_WRITING_LOOK_S = 0.1
_NAMED_AFTER_S = 60.0
"""A file that is open for writing for longer than this is named."""
_RETRY_S = 5.0
_UNREADABLE_RETRY_S = 60.0
_WAIT_S = 0.5
_OPERATION_S = 10.0
"""A git command holds the index for less; an older lock is an editor's, or stale."""
_INDEX_LOOK_S = 0.05
_UNDO_WAIT_S = 30.0
_BATCH_S = 0.005
"""Events within this time are one: a large upload makes thousands a second."""
_EXECUTABLE = "100755"
_RESTS = "watch rests"
_NOT_OURS = frozenset({FailureCode.WRONG_BRANCH, FailureCode.UNFINISHED})
"""The files are git's rather than the CMS's."""
_FEW_FILES = 10
"""With more files than this in the ledger, an allowed folder that is empty is taken for one not mounted."""


@dataclass(slots=True)
class _Pending:
    """A path where something may have changed. All times are of the monotonic clock."""

    first: float
    """The first event since the path was settled."""
    last: float
    writer: Writer
    look_at: float
    closed_at: float = math.inf
    """The first time that a program has closed the file, since it was seen to be written."""
    is_found: bool = False
    """The comparison at the start found the path, and no event told of it since."""
    kind: Kind | None = None
    """The kind of what was seen last, with its stamp, and since when."""
    stamp: bytes = UNPROVEN
    since: float = math.inf

    def is_still(self, now: float) -> bool:
        """Return True if the file did not change for so long that it counts as closed; nobody saw that."""
        return (
            self.kind is Kind.UNCERTAIN and self.writer is Writer.UNKNOWN and now - self.since >= UNCERTAIN_S
        )

    def note(self, seen: Seen, now: float) -> None:
        """Note what was seen."""
        if (seen.kind, seen.stamp) != (self.kind, self.stamp):
            self.since = now
        self.kind, self.stamp = seen.kind, seen.stamp


class _Ready(NamedTuple):
    """A path whose version is certain."""

    path: str
    known: Known | None
    new: Version | None
    stamp: bytes


@dataclass(kw_only=True, eq=False)
class PostWatcher:
    """Enqueues the posts of one site whose files differ from the ledger. One a site: see `acquire`."""

    root: Path
    repository: Repository
    allowlist: Allowlist
    enqueue: Callable[[str, tuple[str, ...], str | None], object]
    """Writes a job durably, given slug, paths and message. Raises ValueError for too many paths."""
    scheduled_paths: Callable[[float], Iterable[str]]
    list_jobs: Callable[[float], Iterable[ListedJob]]
    cancelled_at: Callable[[str], float]
    """Returns when a job of this slug was last cancelled; 0 if never."""
    cancellations: Callable[[], Iterable[Cancellation]]
    """Returns the paths of the posts that were cancelled, and when."""
    warn: Callable[[str, str], None]
    _pending: dict[str, _Pending] = field(default_factory=dict, init=False)
    _folders: set[str] = field(default_factory=set, init=False)
    """Folders to compare with the ledger."""
    _ledger: Ledger | None = field(default=None, init=False)
    _tree: Tree | None = field(default=None, init=False)
    _lock: filelock.BaseFileLock | None = field(default=None, init=False)
    _named: set[str] = field(default_factory=set, init=False)
    """Reports that were made already."""
    _is_starting: bool = field(default=True, init=False)
    """Nothing was compared yet."""
    _resting: str = field(default="", init=False)
    _checked: tuple[int, ...] = field(default=(), init=False)
    """The state of the git folder when the site was checked last."""
    _tip: str | None = field(default=None, init=False)
    """The branch's tip then."""
    _settled_tip: str | None = field(default=None, init=False)
    """The branch's tip when all files were as the ledger has them."""
    _look_again_at: float = field(default=-math.inf, init=False)
    _was_lost: bool = field(default=False, init=False)
    _is_new_ledger: bool = field(default=False, init=False)
    """This watcher has filled the ledger, which does not know of cancelled posts: they are left alone."""

    # One watcher a site

    def acquire(self) -> bool:
        """Become the site's only watcher. Return False if another process is."""
        path = self._state / _LOCK_NAME
        self._was_lost = path.exists()
        lock = filelock.FileLock(path, timeout=0, mode=0o600, thread_local=False, preserve_lock_file=True)
        try:
            lock.acquire()
        except filelock.Timeout:
            return False
        self._lock = lock
        return True

    def order_comparison(self) -> None:
        """Have the site's watcher, this one or another, compare everything with the remote once."""
        (self._state / _AGAIN_NAME).touch()

    def close(self) -> None:
        """Let another process watch the site."""
        self._close_ledger()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @cached_property
    def _state(self) -> Path:
        return self.repository.git.own_dir

    # The loop

    def run(self, is_stopping: Callable[[], bool], poll: float) -> None:
        """Watch until stopped. Where the kernel reports no changes, compare every `poll` seconds."""
        source: Source | None = None
        try:
            while not is_stopping():
                try:
                    if source is None:
                        source = open_source(self.root, self.allowlist.folders, poll, self._warn_once)
                        self.look_everywhere()
                    wait = min(_WAIT_S, max(0.0, self.next_look() - time.monotonic()))
                    look = source.wait(wait)
                    self.note(look, time.monotonic())
                    self.step(time.monotonic(), time.time())
                    if look.paths:
                        time.sleep(_BATCH_S)
                except OSError as error:
                    if source is not None:
                        source.close()
                    source = None
                    self._fail(error, is_stopping)
                except Exception as error:  # noqa: BLE001 - the watch goes on after any error
                    self._fail(error, is_stopping)
        finally:
            if source is not None:
                source.close()
            self.close()

    def _fail(self, error: Exception, is_stopping: Callable[[], bool]) -> None:
        """Report what stops all posts, and begin again a little later."""
        self.repository.git.end_begun()
        self._close_ledger()
        self.look_everywhere()
        failure = error if isinstance(error, FixableError) else failure_of(error)
        self._warn_once(f"changes cannot be watched: {failure.message}. Watch tries again", failure.fix)
        deadline = time.monotonic() + _RETRY_S
        while not is_stopping() and time.monotonic() < deadline:
            time.sleep(_WAIT_S / 5)

    def look_everywhere(self) -> None:
        """Compare all files at the next step."""
        self._folders.update(self.allowlist.folders)

    def next_look(self) -> float:
        """Return when the next step is due, by the monotonic clock."""
        if self._folders:
            return self._look_again_at
        return max(
            min((each.look_at for each in self._pending.values()), default=math.inf), self._look_again_at
        )

    def note(self, look: Look, now: float) -> None:
        """Take in where something may have changed."""
        if look.is_everything:
            self.look_everywhere()
            for each in self._pending.values():
                each.writer = Writer.UNKNOWN
        self._folders |= look.folders
        for path, writer in look.paths.items():
            each = self._pending.setdefault(path, _Pending(now, now, writer, now))
            each.last = now
            each.is_found = False
            if writer is not Writer.UNKNOWN:
                each.writer = writer
            if writer in {Writer.CLOSED, Writer.MOVED}:
                each.closed_at = min(each.closed_at, now)
            each.look_at = min(now + STILL_S, max(now, each.closed_at + LONGEST_STILL_S))

    def step(self, now: float, wall: float) -> None:
        """Enqueue what is saved by `now` of the monotonic clock, which is `wall` of the wall clock."""
        has_order = (self._state / _AGAIN_NAME).exists()
        if not self._folders and not self._pending and not self._resting and not has_order:
            return
        if now < self._look_again_at:
            return
        is_due = self._folders or any(each.look_at <= now for each in self._pending.values())
        if not is_due and not self._resting and not has_order:
            return
        if self._rest(now, wall) or not self._open_ledger(now, has_order=has_order):
            return
        try:
            self._compare(now)
            if any(each.look_at <= now for each in self._pending.values()):
                self._settle(now, wall)
            if not self._pending:
                self._settled_tip = self._tip
        except LedgerDamagedError as error:
            self._rebuild(str(error))

    # When not to look

    def _rest(self, now: float, wall: float) -> bool:
        """Return True while the files are git's rather than the CMS's; compare everything afterwards."""
        if self._is_index_held(wall):
            self._look_again_at = now + _INDEX_LOOK_S
            return True
        reason = self._busy_reason()
        if not reason:
            if self._resting:
                self._named = {text for text in self._named if not text.startswith(_RESTS)}
            self._resting = ""
            return False
        if reason != self._resting:
            self._warn_once(f"{_RESTS}: {reason}", "it compares all files when that is over")
        self._resting = reason
        self._pending.clear()
        self.look_everywhere()
        self._look_again_at = now + _WAIT_S
        return True

    def _is_index_held(self, wall: float) -> bool:
        """Return True while a git command is at work: `git switch` writes files before it moves HEAD."""
        with suppress(FileNotFoundError):
            age = wall - (self.repository.git.git_dir / "index.lock").stat().st_mtime
            return 0 <= age < _OPERATION_S
        return False

    def _busy_reason(self) -> str:
        """Return why the files are not the branch's now: another branch, a merge and the like."""
        place = self._place()
        if place == self._checked:
            return self._resting
        reason = ""
        try:
            with self.repository.refs.kept():
                self.repository.check()
                self._tip = self.repository.ref(self.repository.branch_ref)
                if self._tip == self.repository.ref(self.repository.pushed_ref):
                    self._settled_tip = self._tip  # the worker has moved it, and recorded the files
        except PublishError as error:
            if error.code in _NOT_OURS:
                reason = error.message
            elif error.code is not FailureCode.REMOTE_MISSING:  # which the jobs' attempts report
                raise
        self._checked = place
        return reason

    def _place(self) -> tuple[int, ...]:
        """Return what changes whenever git switches branches, or begins a merge and the like."""
        found: list[int] = []
        for name in ("", "HEAD", "index"):
            with suppress(FileNotFoundError):
                status = (self.repository.git.git_dir / name).stat()
                found += [status.st_ino, status.st_mtime_ns]
        return tuple(found)

    def _has_moved(self) -> bool:
        """Return True if another branch was checked out since the last step began, if only for a moment."""
        try:
            with self.repository.refs.kept():
                self.repository.check_unmoved()
        except PublishError as error:
            if error.code in _NOT_OURS:
                self._checked = ()
                return True
            raise
        return False

    # The ledger

    def _open_ledger(self, now: float, *, has_order: bool) -> bool:
        """Return True if the ledger can be used. Fill it from the remote's tip if it is new."""
        path = self._state / LEDGER_NAME
        try:
            if self._ledger is not None and not self._ledger.is_there():
                self._close_ledger()
                self._was_lost = True
            if self._ledger is None:
                self._ledger = Ledger(path)
            if self._ledger.is_filled() and not has_order:
                return True
        except LedgerDamagedError as error:
            self._rebuild(str(error))
            self._ledger = Ledger(path)
        try:
            self._fill(self._ledger, is_fresh=has_order)
        except PublishError as error:
            text, fix = describe(error)
            self._warn_once(f"watch waits for the remote's version, to compare with: {text}", fix)
            self._look_again_at = now + _RETRY_S
            return False
        (self._state / _AGAIN_NAME).unlink(missing_ok=True)
        self.look_everywhere()
        return True

    def _rebuild(self, reason: str) -> None:
        self._close_ledger()
        remove(self._state / LEDGER_NAME)
        self.look_everywhere()
        self._was_lost = False
        text = f"the ledger of watch is damaged ({reason}); it is rebuilt from the remote's version"
        self.warn(text, "nothing: posts that differ from the remote are enqueued")

    def _close_ledger(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _fill(self, ledger: Ledger, *, is_fresh: bool) -> None:
        """Have the ledger know the remote's tip, and nothing else. Raises PublishError."""
        tip = self._last_tip() if not is_fresh else None
        if tip is None:
            tip = self.repository.fetch()
        if self._was_lost and not is_fresh:
            text = "the ledger of watch was lost; it is rebuilt from the remote's version"
            self.warn(text, "nothing: posts that differ from the remote are enqueued")
        self._was_lost = False
        ledger.fill(self._versions(tip))
        self._is_new_ledger = True

    def _last_tip(self) -> str | None:
        """Return the remote's tip as last seen, by the worker or by a user."""
        refs = (self.repository.pushed_ref, self.repository.tracking_ref)
        found = [tip for ref in refs if (tip := self.repository.ref(ref))]
        if len(found) > 1 and self.repository.is_ancestor(found[0], found[1]):
            return found[1]
        return found[0] if found else None

    def _versions(self, tip: str) -> Iterator[tuple[str, Version]]:
        git, folders = self.repository.git, self.allowlist.folders
        is_sparse = git.config("core.sparseCheckout") == "true"
        left_out = sparse_paths(git, folders) if is_sparse else set()
        for path, entry in self.repository.entries_below(tip, folders).items():
            if entry.mode not in (LINK, SUBMODULE) and path not in left_out and self._is_allowed(path):
                yield path, Version(entry.blob, entry.mode == _EXECUTABLE)

    # What changed

    def _compare(self, now: float) -> None:
        """Compare the folders to look at with the ledger."""
        folders, self._folders = self._folders, set()
        if not folders:
            return
        for folder in _outermost(folders):
            found = self._files.compare(folder, self._known)
            for place, reason in found.unreadable.items():
                self._warn_once(f"{place}/ cannot be watched: {reason}", "let the worker's user read it")
            for path in found.paths:
                each = self._pending.setdefault(
                    path, _Pending(now, now, Writer.UNKNOWN, now, is_found=self._is_starting)
                )
                each.look_at = min(each.look_at, now)
        self._is_starting = False

    @property
    def _known(self) -> Ledger:
        if self._ledger is None:
            raise AssertionError
        return self._ledger

    @property
    def _files(self) -> Tree:
        if self._tree is None:
            git = self.repository.git
            length = len(self.repository.ref(self.repository.branch_ref) or "") or 40
            has_modes = git.config("core.fileMode", "true").lower() not in ("false", "no", "off", "0")
            self._tree = Tree(self.root, length, has_modes=has_modes)
        return self._tree

    def _settle(self, now: float, wall: float) -> None:
        """Enqueue the saves that are certain, and note them in the ledger."""
        with filelock.FileLock(self.repository.git.state_dir / LOCK_NAME, timeout=_UNDO_WAIT_S):
            # An undo writes files, a job and the ledger while it holds this lock.
            due = [path for path, each in self._pending.items() if each.look_at <= now]
            known = self._known.known([path for path in due if self._is_allowed(path)])
            ready = self._read(due, known, now, wall)
            changed = self._drop_unchanged(ready, wall)
            changed = self._drop_brought(changed)
            changed = self._drop_ignored(changed)
            changed = self._hold_arriving(changed, now)
            changed = self._hold_partners(changed, now)
            changed = self._hold_emptied(changed, now)
            if not changed:
                return
            if self._is_index_held(wall) or self._has_moved():
                return  # another branch's files may have been read: the next step looks again
            self._enqueue(changed, wall)

    def _name_unpublishable(self, path: str) -> None:
        """Report a file that no job may publish because of its name. Excluded files are nobody's mistake."""
        if (objection := objection_to(path)) is not None:
            text = f"{one_line(path)} cannot be published: {objection.text}. The other posts are not affected"
            self._warn_once(text, "rename the file")

    def _is_allowed(self, path: str) -> bool:
        try:
            self.allowlist.resolve(path)
        except PathRefusedError:
            return False
        return True

    def _read(
        self, due: Collection[str], known: Mapping[str, Known], now: float, wall: float
    ) -> list[_Ready]:
        """Read the files that are due; return those whose version is certain."""
        ready = []
        with closing(Folders(self.root)) as folders:
            for path in sorted(due):  # folder by folder
                if not self._is_allowed(path):
                    del self._pending[path]
                    self._name_unpublishable(path)
                    continue
                each = self._pending[path]
                is_patient = each.writer is not Writer.CLOSED or now - each.last < LONGEST_STILL_S
                is_closed = each.writer in {Writer.CLOSED, Writer.MOVED} or each.is_still(now)
                seen = self._files.read(folders, path, wall, is_closed=is_closed, is_patient=is_patient)
                each.note(seen, now)
                if (found := self._judge(path, each, seen, known.get(path), now)) is not None:
                    ready.append(found)
        return ready

    def _judge(self, path: str, each: _Pending, seen: Seen, known: Known | None, now: float) -> _Ready | None:
        """Return the path if its version is certain. Else say when to look again, or forget the path."""
        match seen.kind:
            case Kind.FILE:
                if not _is_passing(path, seen.version, known) or now - each.since >= GONE_S:
                    return _Ready(path, known, seen.version, seen.stamp)
                each.look_at = each.since + GONE_S
            case Kind.GONE | Kind.FOLDER if known is not None:
                if now - each.since >= GONE_S:
                    return _Ready(path, known, None, UNPROVEN)
                each.look_at = each.since + GONE_S
            case Kind.WRITING | Kind.UNCERTAIN:
                each.look_at = now + _WRITING_LOOK_S
                each.closed_at = math.inf
                if now - each.first > _NAMED_AFTER_S:
                    text = f"{path} is open for writing; watch reads it when it is closed"
                    self._warn_once(text, "let the program that writes it close it")
            case Kind.UNREADABLE:
                each.look_at = now + _UNREADABLE_RETRY_S
                text = f"{path} cannot be read: {seen.problem}. The other posts are not affected"
                self._warn_once(text, "let the worker's user read the file")
            case Kind.OTHER if known is not None:
                del self._pending[path]
                text = f"{path} is, or is below, a link or a special file now; the remote keeps what it has"
                self._warn_once(text, "put the file itself there, or remove it")
            case _:
                del self._pending[path]
        return None

    def _drop_unchanged(self, ready: Collection[_Ready], wall: float) -> list[_Ready]:
        """Return what differs from the ledger or was saved again; note the stamps of what was not."""
        changed, unproven, same = [], [], {}
        for each in ready:
            if each.known is None or each.new is None:
                changed.append(each)
            elif self._is_same(each.known.version, each.new):
                same[each.path] = each
            elif each.known.stamp == UNPROVEN and each.known.version.blob != each.new.blob:
                unproven.append(each)
            else:
                changed.append(each)
        blobs = self._filtered([each.path for each in unproven])
        for each in unproven:
            blob = blobs.get(each.path)
            if (
                blob
                and each.known
                and each.new
                and self._is_same(each.known.version, Version(blob, each.new.is_executable))
            ):
                same[each.path] = each
            else:
                changed.append(each)
        again = self._saved_again([each for each in same.values() if _is_rewritten(each)], wall)
        stamps: dict[str, Known | None] = {}
        for path in same.keys() - {each.path for each in again}:
            each = same[path]
            del self._pending[path]
            if each.new and each.known != (fresh := Known(each.new, each.stamp)):
                stamps[path] = fresh
        if stamps:
            self._known.put(stamps)
        return [*changed, *again]

    def _saved_again(self, files: Collection[_Ready], wall: float) -> list[_Ready]:
        """Return the files that were saved again as they were, because no job is left that publishes them.

        Their job was cancelled, is a dead letter, or was removed by hand: a save tries again. Here the
        remote's tip may only add a job, and never keep a changed file from getting one.
        """
        if not files:
            return []
        jobs = [row.job for row in self.list_jobs(wall) if row.state is not State.FAILED]
        declared = {normalized(path) for job in jobs for path in job.paths}
        alone = [each for each in files if not is_declared(each.path, declared)]
        tip = self._last_tip()
        if tip is None or not alone:
            return []
        entries = self.repository.entries(tip, [each.path for each in alone])
        lacking = [each for each in alone if not _has_blob(entries.get(each.path), each)]
        blobs = self._filtered([each.path for each in lacking])
        return [each for each in lacking if blob_of(entries.get(each.path)) != blobs.get(each.path)]

    def _drop_brought(self, changed: Collection[_Ready]) -> list[_Ready]:
        """Return what a `git pull` of a user has not brought from the remote since all was settled.

        A file is left out if a fast-forward of the branch, to a commit that the remote has, took it from the
        ledger's version to the one that is there: as if the worker had written it.
        """
        old, new = self._settled_tip, self._tip
        if not changed or old is None or new is None or old == new:
            return list(changed)
        remote = self._last_tip()
        if remote is None or not self.repository.is_ancestor(new, remote):
            return list(changed)
        if not self.repository.is_ancestor(old, new):
            return list(changed)
        brought = self.repository.changes(old, new)
        blobs = self._filtered([each.path for each in changed if each.path in brought and each.new])
        rows = {}
        for each in changed:
            if each.path in brought and self._is_brought(each, *brought[each.path], blobs.get(each.path)):
                rows[each.path] = each
        self._hand_over(rows, rows)
        return [each for each in changed if each.path not in rows]

    def _is_brought(self, each: _Ready, old: Entry | None, new: Entry | None, blob: str | None) -> bool:
        """Return True if the file was as `old` in the ledger, and is `new` now; `blob` is as git has it."""
        if blob_of(old) != (each.known.version.blob if each.known else None):
            return False
        if each.new is None or new is None:
            return each.new is None and new is None
        return self._is_same(Version(new.blob, new.mode == _EXECUTABLE), each.new._replace(blob=blob or ""))

    def _is_same(self, old: Version, new: Version) -> bool:
        if not self._files.has_modes:
            return old.blob == new.blob
        return old == new

    def _filtered(self, paths: list[str]) -> dict[str, str]:
        """Return the blob of each file as git would add it. A file that git cannot convert is left out."""
        if not paths:
            return {}
        try:
            return dict(zip(paths, hash_files(self.repository.git, paths), strict=True))
        except PublishError:
            if len(paths) == 1:
                return {}
        middle = len(paths) // 2
        return self._filtered(paths[:middle]) | self._filtered(paths[middle:])

    def _drop_ignored(self, changed: Collection[_Ready]) -> list[_Ready]:
        """Return what git does not ignore. A file of the ledger is a post, whatever `.gitignore` says."""
        ignored = ignored_paths(self.repository.git, [each.path for each in changed if each.known is None])
        for path in ignored:
            del self._pending[path]
        return [each for each in changed if each.path not in ignored]

    # What waits for more

    def _hold_arriving(self, changed: Collection[_Ready], now: float) -> list[_Ready]:
        """Return what is not in a folder that is new and still gets files."""
        tops = {each.path: self._new_folder(each.path) for each in changed if each.known is None}
        new = {path: top for path, top in tops.items() if top}
        if not new or len(new) > MAX_ARRIVING:
            return list(changed)
        latest: dict[str, float] = {}
        for top in set(new.values()):
            times = [each.last for path, each in self._pending.items() if is_inside(top, path)]
            is_busy = any(
                each.kind in {Kind.WRITING, Kind.UNCERTAIN}
                for path, each in self._pending.items()
                if is_inside(top, path)
            )
            latest[top] = math.inf if is_busy else max(times)
        held = set()
        for path, top in new.items():
            ends = min(latest[top] + ARRIVAL_S, self._pending[path].first + LONGEST_ARRIVAL_S)
            if now < ends:
                self._pending[path].look_at = min(ends, now + ARRIVAL_S)
                held.add(path)
        return [each for each in changed if each.path not in held]

    def _new_folder(self, path: str) -> str:
        """Return the uppermost folder above the path of which the ledger knows no file."""
        for folder in parents(path):
            is_post = any(is_inside(top, folder) and top != folder for top in self.allowlist.folders)
            if is_post and not self._known.has_files_below(folder):
                return folder
        return ""

    def _hold_partners(self, changed: Collection[_Ready], now: float) -> list[_Ready]:
        """Return what has neither the content nor the place of a file that may be back within a second.

        A rename is one job, and so is a folder in the place of a file, or the reverse.
        """
        waiting = [path for path, each in self._pending.items() if each.kind in {Kind.GONE, Kind.FOLDER}]
        due = {each.path for each in changed}
        gone = self._known.known([path for path in waiting if path not in due])
        both = [_change(each) for each in changed]
        both += [Change(path, known.version, None) for path, known in gone.items()]
        held = set()
        partners = [*renames_of(both).items(), *replaced_by(both).items()]
        for path, old_paths in partners:
            ends = min(
                max((self._pending[old].look_at for old in old_paths if old in gone), default=now),
                self._pending[path].first + 2 * GONE_S,
            )
            if now < ends:
                self._pending[path].look_at = ends
                held.add(path)
        return [each for each in changed if each.path not in held]

    def _hold_emptied(self, changed: Collection[_Ready], now: float) -> list[_Ready]:
        """Return what is no deletion of everything: an empty folder is taken for one that is not mounted."""
        gone = [each.path for each in changed if each.new is None]
        if len(gone) <= _FEW_FILES:
            return list(changed)
        for folder in self.allowlist.folders:
            inside = {path for path in gone if is_inside(folder, path)}
            if len(inside) <= _FEW_FILES or _has_files(self.root / folder):
                continue
            if self._known.has_files_below(folder, more_than=_FEW_FILES):
                text = f"{folder}/ has no files any more; watch removes nothing from the remote"
                fix = "mount it; or to remove all of its posts: briter-worker enqueue SLUG FOLDER"
                self._warn_once(text, fix)
                for path in inside:
                    self._pending[path].look_at = now + _RETRY_S
                changed = [each for each in changed if each.path not in inside]
        return list(changed)

    # The jobs

    def _enqueue(self, changed: Collection[_Ready], wall: float) -> None:
        """Write a job for each post, then note its files in the ledger."""
        # Listed after the files were read: a job that waits now will read them later.
        waiting = [row for row in self.list_jobs(wall) if row.state in _WAITING]
        rows = {each.path: each for each in changed}
        declared = self._declared(rows, waiting, wall)
        posts = Posts(self.allowlist.folders, self.allowlist.adapter, self._names_in)
        left = {path for path in rows if is_declared(path, declared)}
        left |= self._cancelled_elsewhere(rows, posts)
        self._hand_over(rows, left)
        ours = [_change(each) for path, each in rows.items() if path not in left]
        saves = decide(ours, posts, self._remains)
        taken = self._taken_slugs({save.slug for save in saves}, waiting)
        for save in saves:
            if self._is_waiting(save, waiting) or (self._is_new_ledger and self._is_cancelled(save)):
                self._hand_over(rows, save.paths)
                continue
            try:
                self.enqueue(_free_slug(save, taken), save.paths, save.message)
            except ValueError as error:  # too many files for one job, which keep no other post waiting
                text = f"the post {one_line(save.slug, 80)!r} cannot be enqueued: {error}"
                self._warn_once(text, "declare a folder: briter-worker enqueue SLUG FOLDER")
                for path in save.paths:
                    self._pending[path].look_at = math.inf
                continue
            self._hand_over(rows, save.paths)

    def _declared(self, paths: Collection[str], waiting: Iterable[ListedJob], wall: float) -> set[str]:
        """Return what the waiting jobs of other producers declare, as far as it concerns these paths."""
        declared = {normalized(path) for path in self.scheduled_paths(wall)}
        places = {place for path in paths for place in (path, *parents(path))}
        for row in waiting:
            theirs = {normalized(path) for path in set(row.job.paths) - row.job.paths_of_programs}
            if not theirs.isdisjoint(places):
                declared |= theirs
        return declared

    def _taken_slugs(self, slugs: Collection[str], waiting: Iterable[ListedJob]) -> set[str]:
        """Return those slugs under which a job of another producer waits."""
        return {row.job.slug for row in waiting if row.job.slug in slugs and row.job.made_by is None}

    def _is_waiting(self, save: Save, waiting: Iterable[ListedJob]) -> bool:
        """Return True if a watcher that was killed has written this job before its ledger."""
        if not all(self._pending[path].is_found for path in save.paths):
            return False
        text = save.message or f"Publish {save.slug}"
        return any(
            row.job.made_by is Program.WATCH
            and (row.job.slug, row.job.commit_message) == (save.slug, text)
            and set(row.job.paths).issuperset(save.paths)
            for row in waiting
        )

    def _hand_over(self, rows: Mapping[str, _Ready], paths: Iterable[str]) -> None:
        """Note the versions of these files as handed over."""
        changes: dict[str, Known | None] = {}
        for path in paths:
            each = rows[path]
            changes[path] = Known(each.new, each.stamp) if each.new else None
            del self._pending[path]
        if changes:
            self._known.put(changes)

    def _names_in(self, folder: str) -> Iterator[str]:
        yield from self._known.names(folder)
        with suppress(OSError), os.scandir(self.root / folder) as entries:
            yield from (entry.name for entry in entries)

    def _remains(self, slug: str) -> bool:
        """Return True if the folder of the post is there, with a page."""
        for top in self.allowlist.folders:
            with suppress(OSError), os.scandir(self.root / top / slug) as entries:
                posts = Posts((top,), self.allowlist.adapter, lambda _folder: ())
                if any(posts.is_page_file(entry.name) for entry in entries):
                    return True
        return False

    def _is_cancelled(self, save: Save) -> bool:
        """Return True if the post was cancelled, and none of its files has changed or gone since."""
        return self._changed_at(save.paths) < self.cancelled_at(save.slug)

    def _cancelled_elsewhere(self, paths: Collection[str], posts: Posts) -> set[str]:
        """Return the files of cancelled posts of other slugs that have not changed since.

        Only a watcher that looked on knows that a file was left to a job. Neither a comparison after a while
        without one nor a new ledger does.
        """
        unseen = [path for path in paths if self._is_new_ledger or self._pending[path].is_found]
        if not unseen:
            return set()
        cancelled: dict[str, list[Cancellation]] = {}
        for each in self.cancellations():
            cancelled.setdefault(each.path, []).append(each)
        found = set()
        for path in unseen:
            ends = [each for place in (path, *parents(path)) for each in cancelled.get(place, ())]
            times = [each.at for each in ends if each.slug != posts.slug(path)]
            if times and self._changed_at([path]) < max(times):
                found.add(path)
        return found

    def _changed_at(self, paths: Iterable[str]) -> float:
        """Return when one of these files last changed, or went; infinity if nobody can say."""
        with suppress(OSError):  # a folder that is gone, too
            files = [self.root / path for path in paths]
            return max((file if file.exists() else file.parent).stat().st_ctime for file in files)
        return math.inf

    def _warn_once(self, text: str, fix: str) -> None:
        if text not in self._named:
            self._named.add(text)
            self.warn(text, fix)


def _is_passing(path: str, version: Version | None, known: Known | None) -> bool:
    """Return True for what often is no save yet: an emptied file, and a new one with a temporary name."""
    is_empty = version is not None and version.blob in EMPTY_BLOBS
    if is_empty and (known is None or known.version.blob not in EMPTY_BLOBS):
        return True
    return known is None and path.rpartition("/")[2].startswith(".")


def _change(each: _Ready) -> Change:
    return Change(each.path, each.known.version if each.known else None, each.new)


def _is_rewritten(each: _Ready) -> bool:
    """Return True if the file was written or replaced since the ledger's version was seen in it."""
    return each.known is not None and is_rewritten(each.known.stamp, each.stamp)


def _has_blob(entry: Entry | None, each: _Ready) -> bool:
    return entry is not None and each.new is not None and entry.blob == each.new.blob


def _outermost(folders: Collection[str]) -> list[str]:
    """Return the folders that are below no other one."""
    return [each for each in folders if not any(above in folders for above in parents(each))]


def _has_files(folder: Path) -> bool:
    return any(names for _, _, names in os.walk(folder))


def _free_slug(save: Save, taken: Collection[str]) -> str:
    """Return a slug under which no other producer's job waits: this one would take that one's place."""
    if save.slug not in taken:
        return save.slug
    slug = save.paths[0]
    while slug in taken:
        slug += "~"
    return slug
