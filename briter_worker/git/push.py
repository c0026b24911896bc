"""The commit point: push with a lease."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

import git
from git.remote import PushInfo

from briter_worker.errors import PublishError
from briter_worker.git import messages
from briter_worker.git.command import CommandTimeoutError
from briter_worker.git.environment import without

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.repository import Repository
    from briter_worker.git.run import Git

_PROGRESS_LINE = re.compile(
    r"(?:^|(?<=\r))(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Delta|Resolving|Total|Unpacking"
    r"|Receiving)\b[^\r\n]*",
    re.MULTILINE,
)
_REFUSED = PushInfo.REJECTED | PushInfo.REMOTE_REJECTED
_WRITTEN = re.compile(rb"Writing objects:[^\r\n]*\((\d+)/(\d+)\)")


class UncertainPushError(PublishError):
    """Report a push that failed after git began to send: it may have landed, or land later."""

    def __init__(self, error: PublishError) -> None:
        self.is_slow = isinstance(error, CommandTimeoutError) and error.has_moved
        """The push was ended at a limit, and had moved objects before."""
        super().__init__(error.code, error.message, error.fix)


def _receive_pack(git: Git) -> str:
    """Return the command for the remote's end, whatever the configuration names: git would run that.

    On this machine, the command runs without our descriptors: a hook may leave a daemon behind.
    """
    urls = [each for name in ("pushurl", "url") for each in git.config_values(f"remote.{git.remote}.{name}")]
    is_rewritten = any(key.startswith("url.") for key, _ in git.settings)
    is_here = bool(urls) and urls[0].startswith(("/", "file://")) and not is_rewritten
    return without(git.pass_fds, "exec git-receive-pack") if is_here else "git-receive-pack"


def push(
    repository: Repository,
    refspec: str,
    *,
    expect: str | None,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> bool:
    """Make the remote's branch what the local ref is, if it is still `expect` (None: absent).

    Return False if it is not: then nothing was changed. The lease has the remote compare before it swaps.
    Raises UncertainPushError when the push may have landed all the same, and PublishError when it did not:
    REJECTED where the remote objects to the contents.
    """

    def watch(part: bytes) -> None:
        if not part:  # this push takes long: whoever looks is to see it
            progress("push", 0, 0)
        for done, total in _WRITTEN.findall(part)[-1:]:
            progress("push", int(done), int(total))

    repository.git.watch, repository.git.said = watch, ""
    infos: list[PushInfo] = []
    try:
        with suppress(git.GitCommandError):
            infos = git.Remote(repository.git.repo, repository.remote).push(
                refspec,
                progress=git.RemoteProgress(),  # has git print it
                allow_unsafe_options=True,  # for the next one, which makes it safe
                receive_pack=_receive_pack(repository.git),
                force_with_lease=f"{refspec.rpartition(':')[2]}:{expect or ''}",
                dry_run=dry_run,
                no_thin=repository.git.worktree is None,  # a bare clone lacks contents
            )
        if repository.git.worktree is not None:
            repository.refs.forget()  # git moves the tracking ref, which a cluster's clone has not
        return _result_of(infos, _PROGRESS_LINE.sub("", repository.git.said))
    except PublishError as error:
        is_answered = any(each.flags & _REFUSED for each in infos)
        if dry_run or is_answered or not _PROGRESS_LINE.search(repository.git.said):
            raise
        raise UncertainPushError(error) from error


def move_side_branch(repository: Repository, source: str, branch: str, expect: str | None) -> bool:
    """Move a branch of the worker's own on the remote, if it is still `expect`; an empty `source` deletes it.

    Return False if the remote did not do it.
    """
    try:
        return push(repository, f"{source}:refs/heads/{branch}", expect=expect)
    except PublishError:
        return False


def push_large_files(repository: Repository, ref: str, *, base: str | None, dry_run: bool) -> None:
    """Upload what git-lfs stores for this ref; the pointers alone would be broken files."""
    if base and repository.git.worktree is None:
        # git-lfs skips what a tracking ref has. It cannot fetch the blobs that a blobless clone lacks.
        repository.update_refs((repository.tracking_ref, base, None))
    options = ["--dry-run"] if dry_run else []
    repository.git.run(*("lfs", "push", *options, repository.remote, ref))


def _result_of(infos: list[PushInfo], text: str) -> bool:
    if infos and not infos[0].flags & PushInfo.ERROR:
        return True
    summary = infos[0].summary.strip() if infos else ""
    if not infos or not infos[0].flags & _REFUSED:
        raise messages.from_git(["push"], f"{summary}\n{text}")
    if failure := messages.from_rejection(summary, text):
        raise failure
    return False
