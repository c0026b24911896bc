"""Push commits with a lease on the remote's tip, and say how the push ended."""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING

import git
from git.remote import PushInfo

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.git.repository import Repository

_RECEIVE_PACK = "git-receive-pack"
"""Always given, because the repository's configuration may name another program, and git would run that."""
_PROGRESS_LINE = re.compile(
    r"(?:remote: )?(?:Enumerating|Counting|Compressing|Writing|Delta|Resolving|Total|Unpacking|Receiving)\b"
)
_PACKING_LINE = re.compile(r"(?:Enumerating|Counting|Compressing|Writing|Delta|Total)\b")
_UNCERTAIN = frozenset(
    {FailureCode.NETWORK, FailureCode.TIMEOUT, FailureCode.INTERNAL, FailureCode.REMOTE_REFUSED}
)
_KEPT_LINES = 400
_LONGEST_LINE = 4_000


class UncertainPushError(PublishError):
    """Report a push that failed after git began to send: it may have landed, or land later."""


class _PushListener(git.RemoteProgress):
    """Collect what git prints during a push, within bounds, and pass its progress on."""

    def __init__(self, progress: Callable[[str, int, int], None]) -> None:
        super().__init__()
        self._progress = progress
        self._first: list[str] = []
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self.is_sending = False

    def new_message_handler(self) -> Callable[[str], None]:
        parse = super().new_message_handler()

        def handle(line: str) -> None:
            self.is_sending = self.is_sending or bool(_PACKING_LINE.match(line))
            if _PROGRESS_LINE.match(line):
                parse(line)  # not the other lines: GitPython would keep every one of them
            elif len(self._first) < _KEPT_LINES:
                self._first.append(line[:_LONGEST_LINE].rstrip())
            else:
                self._last.append(line[:_LONGEST_LINE].rstrip())

        return handle

    def text(self) -> str:
        return "\n".join((*self._first, *self._last))

    def update(
        self,
        op_code: int,
        cur_count: str | float,
        max_count: str | float | None = None,
        message: str = "",  # noqa: ARG002 - GitPython's signature
    ) -> None:
        if op_code & self.WRITING and max_count:
            self._progress("push", int(float(cur_count)), int(float(max_count)))


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
    listener = _PushListener(progress)
    lease = f"{refspec.rpartition(':')[2]}:{expect or ''}"
    options = {"dry_run": dry_run, "no_thin": repository.git.worktree is None}  # a bare clone lacks contents
    infos: list[PushInfo] = []
    try:
        with repository.git.supervise():
            try:
                infos = repository.git.remote.push(
                    refspec,
                    progress=listener,
                    allow_unsafe_options=True,  # for the next one, which makes it safe
                    receive_pack=_RECEIVE_PACK,
                    force_with_lease=lease,
                    **{name: True for name, is_on in options.items() if is_on},
                )
            except git.GitCommandError:
                infos = []
        return _result_of(infos, listener.text())
    except PublishError as error:
        is_answered = any(each.flags & (PushInfo.REJECTED | PushInfo.REMOTE_REJECTED) for each in infos)
        if dry_run or is_answered or not listener.is_sending or error.code not in _UNCERTAIN:
            raise
        raise UncertainPushError(error.code, error.message, error.fix) from error


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
    repository.git.run(
        *("lfs", "push", *options, repository.remote, ref), what="git-lfs could not upload large files"
    )


def _result_of(infos: list[PushInfo], text: str) -> bool:
    if not infos:
        if messages.is_too_large(text):
            message = messages.from_git("the remote rejected it as too large", text).message
            raise PublishError(
                FailureCode.REJECTED, message, "make the post's files smaller, then save it again"
            )
        raise messages.from_git("the push failed", text)
    info = infos[0]
    if not info.flags & PushInfo.ERROR:
        return True
    summary = info.summary.strip()
    is_rejected = info.flags & (PushInfo.REJECTED | PushInfo.REMOTE_REJECTED)
    if is_rejected and messages.is_remote_moved(summary, text):
        return False
    if is_rejected:
        raise messages.from_rejection(summary, text)
    raise messages.from_git("the push failed", f"{summary}\n{text}")
