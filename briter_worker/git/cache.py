"""The cluster's place to publish from: per site and host, a clone that may be lost at any time.

It has the branch's last commit and its folders, and neither history nor contents, where the remote's server
allows that: 10,000 posts take half a megabyte. Its work tree is a scratch folder, with the files of one batch
at a time, as their jobs delivered them. All that must outlive it is in the database and on the remote, so
what is missing, broken or another site's is cloned anew; nothing here waits for the disk.

One drain at a time has a cache: by the kernel's lock, which the drain's git commands hold with it. Where
somebody has it still, an orphan or a worker that was stopped, the next drain takes another beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError, conceal
from briter_worker.git import causes, refs
from briter_worker.git.access import open_access
from briter_worker.git.command import Commands
from briter_worker.git.credentials import secrets_in
from briter_worker.git.remote import Remote
from briter_worker.git.site import Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from briter_worker.git.moving import Move

REMOTE = "origin"
_FORMAT = "1"
_MARK = "briter-cache"
"""A file in the git folder, written when all of the clone is there: what it is a clone of, and how large."""
_MOST_PACKS = 100
"""Each publication and each fetch brings one; there is nothing worth rolling up."""
_MOST_FILES = 3000
_MOST_GROWTH = 64 << 20
_BESIDE = 16
_OTHER_HASH = re.compile(r"mismatched algorithms")


@contextmanager
def open_cache(
    root: Path,
    *,
    url: str,
    branch: str,
    credentials: Mapping[str, str] | None,
    tip: str | None,
    timeout: float,
    pass_fds: tuple[int, ...] = (),
) -> Iterator[Cache]:
    """A site's cache, for one drain; on leaving, nothing of it runs any more.

    `root` is the site's own folder. `credentials` are by reference, see `access`. `tip` is where the
    database knows the remote's branch to be, if it does: a cache that is elsewhere is brought up first. The
    remote is not asked for anything yet. Raises PublishError.
    """
    access = open_access(url, credentials)
    conceal(secrets_in([(f"remote.{REMOTE}.url", url)]))
    with _held(root) as (folder, lock):
        commands = Commands(
            folder,
            remote=REMOTE,
            timeout=timeout,
            pass_fds=(*pass_fds, lock),
            access=access,
            is_cache=True,
        )
        cache = Cache(commands, url=url, branch=branch, tip=tip)
        try:
            yield cache
        finally:
            commands.watch.close()


@contextmanager
def _held(root: Path) -> Iterator[tuple[Path, int]]:
    """The first of the site's caches that nobody has, and what keeps others out of it."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_BESIDE):
            folder, lock = root / str(number), _locked(root / f"{number}.lock")
            if lock is not None:
                break
        else:
            raise PublishError(
                Failure.LOCKED,
                f"all {_BESIDE} caches in {root} are held by processes that have not ended. Fix: end the "
                "workers and git commands that were left over on this host",
            )
    except OSError as error:
        raise causes.from_os(f"the cache {root} cannot be used", error) from error
    try:
        yield folder, lock
    finally:
        if number:
            shutil.rmtree(folder, ignore_errors=True)  # it was to get by
        os.close(lock)


def _locked(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass  # somebody has it, or has just removed it all
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


class Cache:
    """One site's clone on this host. Held by one drain."""

    def __init__(self, commands: Commands, *, url: str, branch: str, tip: str | None) -> None:
        self.commands = commands
        self.site = CacheSite(commands, branch=branch, remote=REMOTE)
        self._remote = Remote(self.site, progress=lambda _done, _total: None)
        self._folder = commands.worktree
        self._git = commands.worktree / ".git"
        self._url = url
        self._hint = tip
        self._cloned = False
        self.since: str | None = None
        """Where the branch was when this drain found, or made, this clone."""

    @property
    def tip(self) -> str | None:
        """Where the remote's branch was when this host last heard of it."""
        with suppress(PublishError):
            if self._git.is_dir():
                return self.site.ref(self.site.tracking_ref)
        return None

    def be_ready(self) -> None:
        """The cache is a clone of the site's branch, as the database knows that. Raises PublishError."""
        try:
            if not self.is_whole():
                self._clone()
            else:
                self._tidy()
                self.commands.refresh()
                self.since = self.since or self.tip
                if self._hint not in (None, self.site.ref(self.site.tracking_ref)):
                    self.move_to(self._remote.fetch())
        except OSError as error:
            raise causes.from_os(f"the cache {self._folder} cannot be used", error) from error
        self._hint = None  # from now on, this drain knows better

    def renew(self) -> bool:
        """Have it cloned anew when it is needed next; not twice in one drain."""
        if self._cloned:
            return False
        with suppress(OSError):
            (self._git / _MARK).unlink(missing_ok=True)
        return True

    def is_whole(self) -> bool:
        """Whether what is there was cloned from this address, to its end, and has not grown too large."""
        try:
            mark, _, size = (self._git / _MARK).read_text().rpartition(" ")
            head = (self._git / "HEAD").read_text()
            files = self._files()
            return (
                mark == self._mark()
                and head == f"ref: {self.site.branch_ref}\n"
                and len(files) <= _MOST_FILES
                and sum(file.name.endswith(".pack") for file in files) <= _MOST_PACKS
                and sum(file.stat().st_size for file in files) <= 2 * int(size) + _MOST_GROWTH
                and (self._git / "config").is_file()
                and self.site.ref(self.site.tracking_ref) is not None
                and self.site.ref(self.site.tracking_ref) == self.site.ref(self.site.branch_ref)
            )
        except (OSError, ValueError, PublishError):
            return False

    def is_there(self) -> bool:
        """Whether it still is the clone that it was."""
        try:
            mark = (self._git / _MARK).read_text()
            return mark.startswith(f"{self._mark()} ") and (self._git / "config").is_file()
        except (OSError, ValueError):
            return False

    def _files(self) -> list[os.DirEntry[str]]:
        """Those of its objects, also of what was never finished."""
        found: list[os.DirEntry[str]] = []
        with os.scandir(self._git / "objects") as folders:
            for folder in folders:
                with os.scandir(folder) as files:
                    found += files
        return found

    def _mark(self) -> str:
        # Not the address itself: a part of it may be what opens the remote.
        of = hashlib.sha256(f"{self._url}\0{self.site.branch}".encode()).hexdigest()
        return f"{_FORMAT} {of}"

    def _clone(self) -> None:
        self._cloned = True
        self._lay_out("sha1")
        try:
            tip = self._remote.fetch("--depth=1")
        except PublishError as failure:
            if not _OTHER_HASH.search(failure.text):
                raise
            self._lay_out("sha256")
            tip = self._remote.fetch("--depth=1")
        self.move_to(tip)
        self.since = tip
        size = sum(file.stat().st_size for file in self._files())
        (self._git / _MARK).write_text(f"{self._mark()} {size}")

    def _lay_out(self, algorithm: str) -> None:
        """An empty repository that gets from the remote what it lacks; as `git init` makes one."""
        if self._folder.is_dir() and not self._folder.is_symlink():
            shutil.rmtree(self._folder)
        else:
            self._folder.unlink(missing_ok=True)
        for folder in ("objects/pack", "objects/info", "refs/heads", "info"):
            (self._git / folder).mkdir(parents=True)
        self._folder.chmod(0o700)
        url = self._url.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        (self._git / "config").write_text(
            "[core]\n\trepositoryFormatVersion = 1\n\tfileMode = true\n\tbare = false\n"
            f"[extensions]\n\tobjectFormat = {algorithm}\n"
            f'[remote "{REMOTE}"]\n\turl = "{url}"\n'
            f"\tfetch = +{self.site.branch_ref}:{self.site.tracking_ref}\n"
        )
        (self._git / "HEAD").write_text(f"ref: {self.site.branch_ref}\n")
        self.commands.refresh()

    def move_to(self, tip: str) -> None:
        """The branch is here where it is on the remote."""
        self.site.update((self.site.branch_ref, tip, None), (self.site.tracking_ref, tip, None))

    def _tidy(self) -> None:
        """Remove large files that were uploaded, and lock files: who held them is dead, the cache is ours."""
        shutil.rmtree(self._git / "lfs", ignore_errors=True)
        for lock in (*self._git.glob("*.lock"), *(self._git / "refs").rglob("*.lock")):
            lock.unlink(missing_ok=True)

    def deepen(self, commits: int | None) -> str | None:
        """Get so many more commits of the history, or all; the remote's tip. None where all are here."""
        if not self.boundary():
            return None
        return self._remote.fetch("--unshallow" if commits is None else f"--deepen={commits}")

    def boundary(self) -> list[str]:
        """The commits whose parents are not here; none where all of the history is."""
        try:
            return (self._git / "shallow").read_text().split()
        except FileNotFoundError:
            return []


class CacheSite(Site):
    """A repository that is nobody's work: what was left over in it is in nobody's way."""

    def _no_locks(self) -> None:
        """Nothing: the cache was rid of them when it was taken."""

    def update(self, *moves: Move) -> None:
        """Move refs. Each is a file of a repository that nobody else has: no git need be started for that."""
        try:
            for name, new, _ in moves:
                refs.write(self.commands.worktree / ".git", name, new)
        except OSError as error:
            raise causes.from_os("the cache's branch could not be moved", error) from error

    def about_to_update(self) -> None:
        """Nothing: see `update`."""

    def no_branch(self) -> PublishError:
        """See `Site`."""
        return PublishError(
            Failure.REMOTE_REWRITTEN,
            f"the remote has no branch {self.branch}. Fix: push it there by hand, if it should be there; or "
            "change the site's --branch or --remote",
        )
