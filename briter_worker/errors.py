"""Failures, sorted once by what they mean for a job.

Every failure has a code from a closed set (the job file's `failure`), and every code belongs to one of
three classes. No other module decides what a failure means.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Self

from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from pathlib import Path


class FailureClass(Enum):
    """Consequence of a failure for its job."""

    REFUSED = "refused"
    """The job can never succeed as it is: dead letter at once."""
    TRANSIENT = "transient"
    """The attempt counts and is repeated after a backoff: dead letter at the maximum."""
    ENVIRONMENT = "environment"
    """No post of the site can be published: as transient, and requeued when a push succeeds again."""


class FailureCode(StrEnum):
    """Public failure codes: the closed set that programs may rely on."""

    _value_: str
    failure_class: FailureClass

    def __new__(cls, value: str, failure_class: FailureClass = FailureClass.ENVIRONMENT) -> Self:
        """Return the code with its class."""
        code = str.__new__(cls, value)
        code._value_ = value
        code.failure_class = failure_class
        return code

    NO_PATHS = "nopaths", FailureClass.REFUSED
    MALFORMED = "malformed", FailureClass.REFUSED
    UNREADABLE = "unreadable", FailureClass.REFUSED
    UNKNOWN_TYPE = "unknown-type", FailureClass.REFUSED
    TOO_LARGE = "too-large", FailureClass.REFUSED
    REJECTED = "rejected", FailureClass.REFUSED
    CONFLICT = "conflict", FailureClass.REFUSED
    OUTDATED = "outdated", FailureClass.REFUSED
    PLUGIN = "plugin", FailureClass.REFUSED
    LOST_RACE = "lost-race", FailureClass.TRANSIENT
    UNSETTLED = "unsettled", FailureClass.TRANSIENT
    KILLED_WORKER = "killed-worker", FailureClass.TRANSIENT
    INTERNAL = "internal", FailureClass.TRANSIENT
    NETWORK = "network"
    TIMEOUT = "timeout"
    AUTH = "auth"
    HOST_KEY = "host-key"
    REMOTE_MISSING = "remote-missing"
    REMOTE_REFUSED = "remote-refused"
    REMOTE_REWRITTEN = "remote-rewritten"
    DIVERGED = "diverged"
    WRONG_BRANCH = "wrong-branch"
    UNFINISHED = "unfinished-operation"
    LOCKED = "locked"
    CORRUPT = "corrupt"
    OWNERSHIP = "ownership"
    SIGNING = "signing"
    NOT_A_REPOSITORY = "not-a-repository"
    DISK = "disk"
    PLUGIN_BROKEN = "plugin-broken"
    GIT_MISSING = "git-missing"


FAILURE_TEXTS: dict[str, str] = {
    FailureCode.NO_PATHS: "none of its files may be published",
    FailureCode.MALFORMED: "the editor's program wrote something that is not a job",
    FailureCode.UNREADABLE: "the job's file cannot be read",
    FailureCode.UNKNOWN_TYPE: "no plugin handles this type of job",
    FailureCode.PLUGIN: "a rule of the site does not allow it",
    FailureCode.PLUGIN_BROKEN: "a plugin of the site failed",
    FailureCode.SIGNING: "the commits cannot be signed",
    FailureCode.TOO_LARGE: "one of its files is too large",
    FailureCode.REJECTED: "the remote does not accept this post",
    FailureCode.OUTDATED: "a newer version of the post is published already",
    FailureCode.CONFLICT: "the same lines were changed on the remote",
    FailureCode.LOST_RACE: "other pushes kept coming first",
    FailureCode.UNSETTLED: "a file kept changing while it was read",
    FailureCode.KILLED_WORKER: "the worker died while it published this post",
    FailureCode.INTERNAL: "the worker has an internal error",
    FailureCode.NETWORK: "the remote cannot be reached",
    FailureCode.TIMEOUT: "the remote does not answer in time",
    FailureCode.AUTH: "the remote refused the password or key",
    FailureCode.HOST_KEY: "the identity of the remote could not be verified",
    FailureCode.REMOTE_MISSING: "the remote repository was not found",
    FailureCode.REMOTE_REFUSED: "the remote refuses every push at the moment",
    FailureCode.REMOTE_REWRITTEN: "the remote's history was rewritten",
    FailureCode.DIVERGED: "the local branch and the remote have diverged",
    FailureCode.WRONG_BRANCH: "another branch is checked out on the server",
    FailureCode.UNFINISHED: "a merge or rebase is unfinished on the server",
    FailureCode.LOCKED: "another program keeps the site's repository locked",
    FailureCode.CORRUPT: "the site's repository is corrupted",
    FailureCode.OWNERSHIP: "the site's files belong to another user",
    FailureCode.NOT_A_REPOSITORY: "the site's folder is not a repository",
    FailureCode.DISK: "the server's disk is full or failing",
    FailureCode.GIT_MISSING: "git is missing on the server",
}
"""What each failure means, for an editor."""


def failure_text(failure: str | None) -> str:
    """Return what a failure code means; empty for an unknown one."""
    return FAILURE_TEXTS.get(failure or "", "")


def is_environment(code: str | None) -> bool:
    """Return True if a job file's `failure` names an environment failure."""
    return code in _ENVIRONMENT


_ENVIRONMENT = frozenset(code.value for code in FailureCode if code.failure_class is FailureClass.ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a job was not published: a code, a message for a user, and the fix.

    The message and the fix are safe to show: no credentials, no control characters, at most 2,000 characters.
    `fix` is a command or an action and never contains text of a remote or a job; it may be empty.
    """

    code: FailureCode
    message: str
    fix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", one_line(self.message))
        object.__setattr__(self, "fix", one_line(self.fix))


OS_FIXES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit on the size of files: ulimit -f",
    errno.EROFS: "make the file system writable",
    errno.EIO: "check the disk",
    errno.EACCES: "give the worker's user access to it",
    errno.EPERM: "give the worker's user access to it",
    errno.ENOMEM: "give the machine more memory",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENFILE: "raise the system's limit on open files: fs.file-max",
    errno.ESTALE: "mount the file system again",
    errno.ENOTSUP: "move the queue folder to a file system that has hard links: BRITER_QUEUE_ROOT",
}


def os_error_text(error: OSError, *, with_path: bool = True) -> str:
    """Return the operating system's message, with the path if there is one."""
    path = f" ({error.filename})" if with_path and error.filename else ""
    return one_line(f"{error.strerror or error}{path}")


def os_error_fix(error: OSError) -> str:
    """Return what the operator can do about the error; empty where nothing is known."""
    return OS_FIXES.get(error.errno or 0, "")


def sync_folder(folder: Path | int) -> None:
    """Make the names in a folder, or in an open one, survive a power cut. Raises OSError.

    A mount of a container's host (FUSE, 9p, vboxsf, SMB) may not offer that: there is nothing more to do.
    """
    handle = os.dup(folder) if isinstance(folder, int) else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(handle)


class PublishError(Exception):
    """Report the failure of a publication."""

    def __init__(self, code: FailureCode, message: str, fix: str = "") -> None:
        self.failure = Failure(code, message, fix)
        self.code = code
        self.message = self.failure.message
        self.fix = self.failure.fix
        super().__init__(self.message)

    @classmethod
    def from_os(cls, what_failed: str, error: OSError) -> PublishError:
        """Return the environment failure for an error of the operating system."""
        return cls(FailureCode.DISK, f"{what_failed}: {os_error_text(error)}", os_error_fix(error))


class RefusedError(PublishError):
    """Refuse a job: raised by plugins, which say why and what to do."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(FailureCode.PLUGIN, message, fix)


class SnoozedError(Exception):
    """Defer a job without counting the attempt: raised by plugins."""

    def __init__(self, until: float, text: str) -> None:
        self.until = float(until)
        self.text = one_line(text)
        super().__init__(self.text)


class StoppedError(Exception):
    """Abort the work because the operator stops the worker; only the remote knows what a push did."""


class LockLostError(Exception):
    """Abort the work because the site may be another worker's. Nothing was pushed."""

    def __init__(
        self,
        message: str = "the worker's lock file was removed or replaced while the worker ran, so another "
        "worker may have the site now; this one ends",
        fix: str = "start the worker again, and leave worker.lock alone",
    ) -> None:
        self.fix = fix
        super().__init__(one_line(message))


class UnavailableError(OSError):
    """The store of the jobs (Postgres) cannot be reached, so nothing can be decided about any job."""

    fix = ""


class NodeFailureError(UnavailableError):
    """The machine cannot publish any post, whichever it is: nothing is decided about the posts at hand."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.fix = failure.fix
        super().__init__(failure.message)


class FixableError(Exception):
    """Report one line to the user, with the fix apart."""

    def __init__(self, message: str, fix: str = "") -> None:
        self.message = one_line(message)
        self.fix = one_line(fix)
        super().__init__(self.message)


class UsageError(FixableError):
    """The command or its configuration cannot be used as given: exit status 2."""


class DeclinedError(FixableError):
    """The command was understood and cannot be carried out: exit status 1."""


class UnknownJobError(DeclinedError):
    """The queue has no job of the wanted id or slug."""


def failure_of(error: Exception) -> Failure:
    """Return the failure that an exception of the publisher means for its requests."""
    match error:
        case PublishError():
            return error.failure
        case OSError() if error.errno in OS_FIXES:
            return PublishError.from_os("the queue or the repository cannot be used", error).failure
        case MemoryError():
            return Failure(FailureCode.INTERNAL, "the memory does not suffice", "give the worker more memory")
        case _:
            message = f"an error in the worker itself: {type(error).__name__}: {error}"
            return Failure(FailureCode.INTERNAL, message, "report it to the developers of Briter Worker")


def describe(error: Exception) -> tuple[str, str]:
    """Return what the error says to a user, and the fix, which may be empty."""
    match error:
        case FixableError() | PublishError():
            return error.message, error.fix
        case OSError():
            return os_error_text(error) or type(error).__name__, getattr(error, "fix", "") or os_error_fix(
                error
            )
        case _:
            return one_line(f"{type(error).__name__}: {error}"), ""
