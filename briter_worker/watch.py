"""Watch the folders of posts and enqueue a job for each changed post, for a CMS that writes no jobs.

What changed is decided by comparing files with the remote's tip as last fetched: neither the files that the
worker itself writes nor a restart makes jobs. The kernel's events only say where to look.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import filelock
from inotify_simple import INotify, flags  # type: ignore[import-untyped]

from briter_worker.allowlist import Allowlist, PathRefusedError, is_inside, parents
from briter_worker.errors import failure_of, one_line, os_error_text
from briter_worker.git.index import hash_files
from briter_worker.git.staging import ignored_paths
from briter_worker.git.undo import LOCK_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from briter_worker.git.repository import Repository
    from briter_worker.job import Job
    from briter_worker.ports import ListedJob

_PAGE_FILES = {"kirby": "*.txt", "grav": "*.md"}
"""A folder with such a file is one post; for every other kind of site, a folder with an `index.*` is."""
_MASK = flags.CLOSE_WRITE | flags.MOVED_FROM | flags.MOVED_TO | flags.CREATE | flags.DELETE | flags.ONLYDIR
_STILL_S = 0.01
"""A post is saved when none of its files was closed, moved or deleted for this long."""
_LONGEST_STILL_S = 0.5
_ARRIVAL_S = 0.5
"""The files of a new folder are one bundle, in whatever order they come, if none comes later than this."""
_LONGEST_ARRIVAL_S = 10.0
_ARRIVAL_LOOK_S = 0.1
_MAX_ARRIVING = 1000
"""With more files than this, new folders are an import, and nobody waits for the last one."""
_JOB_TIME_STEP_S = 0.001
_STOP_CHECK_S = 0.5
_RETRY_S = 5.0


class OutOfSyncError(Exception):
    """The kernel's events do not suffice: only a new watcher and a comparison can tell what changed."""


class TreeWatcher:
    """The kernel's events of some folders and all folders below them. For one thread."""

    def __init__(self, root: Path, folders: Sequence[str]) -> None:
        """Watch from now on. `files` has all files that are there."""
        self._root = root
        self._folders = folders
        self._inotify = INotify()
        self._watched: dict[int, str] = {}
        self.files: list[str] = []
        for folder in folders:
            for above in ("", *parents(folder)):  # a folder may be made, or replaced, later
                with suppress(FileNotFoundError, NotADirectoryError):
                    self._add(above)
            self.files += self._watch(folder)

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def read(self, seconds: float) -> set[str]:
        """Return the paths that changed within that time. Raises OutOfSyncError.

        A path whose last event is the creation of a file is not returned: the file is still being written.
        """
        changed: set[str] = set()
        for event in self._inotify.read(timeout=round(seconds * 1000)):
            if event.mask & (flags.Q_OVERFLOW | flags.UNMOUNT):
                raise OutOfSyncError
            folder = self._watched.get(event.wd)
            if folder is None:
                continue
            if event.mask & flags.IGNORED:
                del self._watched[event.wd]
                continue
            path = f"{folder}/{event.name}".lstrip("/")
            is_post = any(is_inside(each, path) for each in self._folders)
            if not event.mask & flags.ISDIR:
                if is_post and not event.mask & flags.CREATE:
                    changed.add(path)
            elif event.mask & flags.DELETE:
                continue
            elif is_post and not event.mask & flags.MOVED_FROM:
                changed.update(self._watch(path))
            elif any(is_inside(each, path) or is_inside(path, each) for each in self._folders):
                raise OutOfSyncError  # the files in a folder that was moved have no events
        return changed

    def _add(self, folder: str) -> None:
        mask = _MASK | (flags.DONT_FOLLOW if folder else 0)
        self._watched[self._inotify.add_watch(self._root / folder, mask)] = folder

    def _watch(self, top: str) -> Iterable[str]:
        """Watch a folder and all below it; return the files that are there already."""
        found: list[str] = []
        todo = [top]
        while todo:
            folder = todo.pop()
            try:
                self._add(folder)
                with os.scandir(self._root / folder) as entries:
                    for entry in entries:
                        path = f"{folder}/{entry.name}"
                        (todo if entry.is_dir(follow_symlinks=False) else found).append(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # gone meanwhile, or a link, which no job may publish
        return found


@dataclass(kw_only=True, eq=False)
class PostWatcher:
    """Enqueues the posts of one site whose files differ from what the remote has."""

    root: Path
    repository: Repository
    allowlist: Allowlist
    enqueue: Callable[[str, Sequence[str]], object]
    scheduled_paths: Callable[[float], Mapping[str, float]]
    list_jobs: Callable[[float], Iterable[ListedJob]]
    cancelled_at: Callable[[str], float]
    """Returns when a job of this slug was last cancelled; 0 if never."""
    warn: Callable[[str, str], None]

    @property
    def _page_file(self) -> str:
        return _PAGE_FILES.get(self.allowlist.adapter, "index.*")

    def run(self, is_stopping: Callable[[], bool], poll: float) -> None:
        """Watch until stopped. Where there is no inotify, compare every `poll` seconds."""
        while not is_stopping():
            try:
                self._run(is_stopping, poll)
            except OutOfSyncError:
                continue
            except Exception as error:  # noqa: BLE001 - the watch goes on after any error
                self.repository.git.end_begun()
                failure = failure_of(error)
                self.warn(f"changes cannot be watched: {failure.message}", failure.fix)
                time.sleep(_RETRY_S)

    def _run(self, is_stopping: Callable[[], bool], poll: float) -> None:
        try:
            watcher = TreeWatcher(self.root, self.allowlist.folders)
        except OSError as error:
            fix = "raise fs.inotify.max_user_watches or max_user_instances with sysctl; until then it polls"
            self.warn(f"the folders cannot be watched: {os_error_text(error)}", fix)
            folders = [self.root / folder for folder in self.allowlist.folders]
            places = ((Path(place), names) for folder in folders for place, _, names in os.walk(folder))
            files = (place.relative_to(self.root) / name for place, names in places for name in names)
            self.save(self.candidates(map(str, files)), is_comparison=True)
            deadline = time.monotonic() + poll
            while not is_stopping() and time.monotonic() < deadline:
                time.sleep(_STOP_CHECK_S)
            return
        with closing(watcher):
            arriving = self.save(self.candidates(watcher.files), is_comparison=True)
            while not is_stopping():
                arriving = self.save(self._wait(watcher, is_stopping, arriving))

    def _wait(
        self, watcher: TreeWatcher, is_stopping: Callable[[], bool], arriving: Collection[str]
    ) -> Collection[str]:
        """Return the paths that changed and hold still, and those that are arriving."""
        changed: set[str] = set()
        while not changed and not is_stopping():
            changed = watcher.read(_ARRIVAL_LOOK_S if arriving else _STOP_CHECK_S) | {*arriving}
        latest = time.monotonic() + _LONGEST_STILL_S
        while time.monotonic() < latest and (more := watcher.read(_STILL_S)):
            changed |= more
        return changed

    def candidates(self, files: Iterable[str]) -> set[str]:
        """Return what may differ, given all files of the allowed folders: also what git ignores."""
        folders = [folder for folder in self.allowlist.folders if (self.root / folder).is_dir()]
        if not folders:
            return set()
        # With sparseCheckout, git looks at files marked skip-worktree. A rename is a deletion and a new file.
        status = [
            *("--no-optional-locks", "--literal-pathspecs", "-c", "core.sparseCheckout=true", "status"),
            *("--porcelain=v1", "-z", "--no-renames", "--untracked-files=no", "--", *folders),
        ]
        self.repository.git.begin(*status)
        tracked = self.repository.git.fields("--literal-pathspecs", "ls-files", "-z", "--", *folders)
        different = {*files}.symmetric_difference(tracked)
        edited = self.repository.git.fields(*status)
        return different.union(line[3:] for line in edited)

    def save(self, paths: Collection[str], *, is_comparison: bool = False) -> Collection[str]:
        """Enqueue the posts of those paths that differ from the remote's tip.

        A comparison leaves posts alone that were cancelled, and have not been saved since. Return the paths
        to save later, because their folders are new and more files of them may come.
        """
        # An undo enqueues what it restored.
        with filelock.FileLock(self.repository.git.state_dir / LOCK_NAME):
            return self._save(paths, is_comparison=is_comparison)

    def _save(self, paths: Collection[str], *, is_comparison: bool) -> Collection[str]:
        now = time.time()
        changed = self._changed(paths)
        arriving = self._arriving(changed, now)
        changed -= arriving
        withheld = {path.rstrip("/") for path in self.scheduled_paths(now)} if changed else set()
        posts: dict[str, list[str]] = defaultdict(list)
        gone = self._pages_of_deleted(changed)
        is_page = cache(lambda folder: folder in gone or any((self.root / folder).glob(self._page_file)))
        for path in sorted(changed):
            if withheld.isdisjoint((path, *parents(path))):
                posts[self._slug(path, is_page)].append(path)
        # An undo, or `watch` itself before a restart, may have written a job for it before.
        known = {row.job.slug: row.job for row in self.list_jobs(now)} if posts else {}
        for slug, files in posts.items():
            is_known = slug in known and self._covers(known[slug], files)
            if not is_known and not (is_comparison and self._is_cancelled(slug, files)):
                try:
                    self.enqueue(slug, files)
                except ValueError as error:  # too many files for one job, which keep no other post waiting
                    text = f"the post {one_line(slug, 80)!r} cannot be enqueued: {error}"
                    self.warn(text, "declare a folder: briter-worker enqueue SLUG FOLDER")
        return arriving

    def _arriving(self, changed: Collection[str], now: float) -> set[str]:
        """Return the paths below folders that the remote's tip lacks and that have got a file just now."""
        folders = {path: [*parents(path)] for path in changed}
        known = self.repository.entries(self._tip(), {each for above in folders.values() for each in above})

        @cache
        def age(path: str) -> float:
            with suppress(OSError):
                return abs(now - (self.root / path).stat().st_ctime)
            return math.inf

        found = {
            path
            for path, above in folders.items()
            if any(each not in known and age(each) < _ARRIVAL_S for each in above)
            and age(path) < _LONGEST_ARRIVAL_S
        }
        return found if len(found) <= _MAX_ARRIVING else set()

    def _covers(self, job: Job, files: Sequence[str]) -> bool:
        """Return True if the job was written after these files were, and declares them."""
        times = [file.stat().st_mtime for path in files if (file := self.root / path).exists()]
        is_later = job.created_at + _JOB_TIME_STEP_S > max(times, default=0.0)
        return is_later and set(job.paths) >= set(files)

    def _is_cancelled(self, slug: str, files: Sequence[str]) -> bool:
        """Return True if the post was cancelled, and none of its files has changed or gone since."""
        with suppress(OSError):  # a folder that is gone, too
            places = [file if file.exists() else file.parent for file in map(self.root.joinpath, files)]
            return max(place.stat().st_ctime for place in places) < self.cancelled_at(slug)
        return False

    def _changed(self, paths: Collection[str]) -> set[str]:
        """Return those paths that may be published and differ from the remote's tip."""
        allowed = {path for path in paths if self._is_allowed(path)}
        if not allowed:
            return set()
        known = self.repository.entries(self._tip(), allowed)
        present = {path for path in allowed if (self.root / path).is_file()}
        both = sorted(present & known.keys())
        blobs = zip(both, hash_files(self.repository.git, both), strict=True)
        changed = {path for path, blob in blobs if blob != known[path].blob}
        changed |= {path for path in known.keys() - present if not (self.root / path).is_dir()}
        new = present - known.keys()
        return changed | (new - ignored_paths(self.repository.git, new))

    def _pages_of_deleted(self, changed: Collection[str]) -> set[str]:
        """Return the folders above deleted files that were bundles on the remote's tip."""
        gone = [PurePosixPath(path) for path in changed if not (self.root / path).exists()]
        folders = {f"{folder}/" for path in gone for folder in path.parents[:-1]}
        if not folders:
            return set()
        command = ("--literal-pathspecs", "ls-tree", "-z", "--name-only", self._tip(), "--", *folders)
        names = map(os.path.split, self.repository.git.fields(*command))
        return {folder for folder, name in names if fnmatch(name, self._page_file)}

    def _tip(self) -> str:
        return self.repository.ref(self.repository.tracking_ref) or "HEAD"

    def _is_allowed(self, path: str) -> bool:
        try:
            self.allowlist.resolve(path)
        except PathRefusedError:
            return False
        is_nested = any((self.root / folder / ".git").exists() for folder in parents(path))
        return not is_nested and not (self.root / path).is_symlink()

    def _slug(self, path: str, is_page: Callable[[str], bool]) -> str:
        """Return the post's name: its path below the allowed folder, without its extension."""
        top = max((folder for folder in self.allowlist.folders if is_inside(folder, path)), key=len)
        place = PurePosixPath(path).relative_to(top)
        for folder in place.parents[:-1]:
            if is_page(f"{top}/{folder}"):
                return str(folder)
        return str(place.with_suffix("")) if place.suffix else str(place)
