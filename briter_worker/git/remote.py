"""The remote: one push, and what is asked around it."""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING

import git
from git.remote import PushInfo

from briter_worker.errors import Failure, PublishError
from briter_worker.git import causes

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.command import Commands
    from briter_worker.git.site import Site

_NOISE = re.compile(
    r"^(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Delta|Resolving|Total|Unpacking|Receiving)\b"
)
_NO_BRANCH = re.compile(r"couldn't find remote ref", re.IGNORECASE)
_RECEIVE, _UPLOAD = "git-receive-pack", "git-upload-pack"
"""Said each time: the repository's configuration may name another program, which git would run."""
UNCERTAIN = frozenset({Failure.NETWORK, Failure.TIMEOUT, Failure.INTERNAL})
"""After these a push may have landed all the same, or land yet."""
_AMBIGUOUS = frozenset({Failure.NETWORK, Failure.TIMEOUT, Failure.INTERNAL, Failure.REMOTE_REFUSED})


class Pushed(Enum):
    """How a push ended that did not fail."""

    DONE = "done"
    MOVED = "moved"
    """The remote branch is not where we last saw it; nothing was changed there."""


class _Listener(git.RemoteProgress):
    """Hears what git says during a push: progress is passed on, words are kept."""

    def __init__(self, commands: Commands, progress: Callable[[int, int], None]) -> None:
        super().__init__()
        self._commands = commands
        self._progress = progress
        self.said: list[str] = []

    def new_message_handler(self) -> Callable[[str], None]:
        hear = super().new_message_handler()

        def handler(line: str) -> None:
            self._commands.watch.touch()
            if not _NOISE.match(line):
                self.said.append(line.rstrip())
            hear(line)

        return handler

    def update(
        self,
        op_code: int,
        cur_count: str | float,
        max_count: str | float | None = None,
        message: str = "",  # noqa: ARG002 - GitPython's signature
    ) -> None:
        if op_code & self.WRITING and max_count:
            self._progress(int(float(cur_count)), int(float(max_count)))


class Remote:
    """The site's branch on its remote."""

    def __init__(self, site: Site, *, progress: Callable[[int, int], None]) -> None:
        self._site = site
        self._commands = site.commands
        self._progress = progress

    def push(self, source: str, *, new: str, expect: str | None, dry_run: bool) -> Pushed:
        """Make the remote branch `new`, which `source` points to, if it is still `expect`.

        Never forces: `new` contains `expect`, and the lease makes the remote compare before it swaps, so a
        branch that was deleted or set back meanwhile is not overwritten. Raises PublishError when the remote
        refuses (REJECTED: because of the contents) or cannot be reached.
        """
        lease = f"{self._site.branch_ref}:{expect or ''}"
        try:
            return self._push(f"{source}:{self._site.branch_ref}", lease, dry_run=dry_run)
        except PublishError as failure:
            # A push whose answer was lost may have landed; only the remote knows.
            if not dry_run and failure.failure in _AMBIGUOUS and self._landed(new):
                return Pushed.DONE
            raise

    def keep(self, source: str, branch: str, *, dry_run: bool) -> bool:
        """Create a branch of its own on the remote; whether the remote took it."""
        try:
            pushed = self._push(f"{source}:refs/heads/{branch}", f"refs/heads/{branch}:", dry_run=dry_run)
        except PublishError:
            return False
        return pushed is Pushed.DONE

    def tip(self) -> str | None:
        """Where the branch is on the remote now; None where it has no such branch."""
        out = self._commands.run(
            *("ls-remote", f"--upload-pack={_UPLOAD}", "--"),
            self._site.remote,
            self._site.branch_ref,
            doing="the remote could not be asked",
        )
        for line in out.decode(errors="replace").splitlines():
            sha, _, name = line.partition("\t")
            if name == self._site.branch_ref:
                return sha
        return None

    def fetch(self, *options: str) -> str:
        """Get the remote branch; its tip. Moves none of the refs that a person looks at."""
        status, _, said = self._commands.attempt(
            "fetch",
            *options,
            *("--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--refmap="),
            f"--upload-pack={_UPLOAD}",
            "--",
            self._site.remote,
            f"+{self._site.branch_ref}:{self._site.fetched_ref}",
        )
        if status and _NO_BRANCH.search(said):
            raise self._site.no_branch()
        if status:
            raise causes.from_git("the remote's new commits could not be fetched", said)
        tip = self._site.ref(self._site.fetched_ref)
        if tip is None:
            raise PublishError(Failure.INTERNAL, "git fetch succeeded, but brought no commit")
        return tip

    def push_large_files(self, ref: str, *, dry_run: bool) -> None:
        """Upload what git-lfs stores for this ref; the pointers alone would be broken files."""
        options = ["--dry-run"] if dry_run else []
        self._commands.run(
            "lfs", "push", *options, self._site.remote, ref, doing="git-lfs could not upload large files"
        )

    def _push(self, refspec: str, lease: str, *, dry_run: bool) -> Pushed:
        listener = _Listener(self._commands, self._progress)
        options = {"dry_run": True} if dry_run else {}
        infos: list[PushInfo] = []
        failed = False
        with self._commands.watch.watched(None, "push"):
            try:
                infos = self._found().push(
                    refspec,
                    progress=listener,
                    allow_unsafe_options=True,  # for the next one, which makes it safe
                    receive_pack=_RECEIVE,
                    force_with_lease=lease,
                    **options,
                )
            except git.GitCommandError:
                failed = True
        said = "\n".join(listener.said)
        if failed or not infos:
            if causes.too_large_for_remote(said):
                raise PublishError(
                    Failure.REJECTED,
                    f"the remote rejected it as too large: {said}. Fix: make the post's files smaller",
                )
            raise causes.from_git("the push failed", said)
        # A remote may have mirrors to push to as well: one of them having it is not enough.
        worst = next((info for info in infos if info.flags & PushInfo.ERROR), infos[0])
        return self._meaning(worst, said)

    def _found(self) -> git.Remote:
        """The remote, if it still is in the configuration."""
        try:
            return self._commands.repo.remote(self._site.remote)
        except ValueError:
            raise self._site.no_remote() from None

    def _meaning(self, info: PushInfo, said: str) -> Pushed:
        if not info.flags & PushInfo.ERROR:
            return Pushed.DONE
        summary = info.summary.strip()
        if info.flags & (PushInfo.REJECTED | PushInfo.REMOTE_REJECTED) and causes.remote_moved(summary, said):
            return Pushed.MOVED
        if info.flags & PushInfo.REMOTE_FAILURE:
            raise causes.from_git("the push failed", f"{summary}\n{said}")
        raise causes.from_refusal(summary, said)

    def _landed(self, new: str) -> bool:
        try:
            return self.tip() == new
        except PublishError:
            return False
