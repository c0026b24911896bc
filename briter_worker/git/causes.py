"""What git's messages mean: the only module that reads them.

Git tells most of what went wrong in words alone. Each row is a pattern, the word it stands for, and the
fix a person can apply. The first match wins, so the specific rows come first.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from briter_worker.errors import Failure, PublishError


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that git may be saying."""

    pattern: re.Pattern[str]
    failure: Failure
    fix: str


def _cause(pattern: str, failure: Failure, fix: str) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), failure, fix)


_CAUSES = (
    _cause(
        r"no space left|disk quota exceeded|file too large|file size limit exceeded",
        Failure.DISK,
        "free some space",
    ),
    _cause(r"read-only file ?system", Failure.DISK, "make the file system writable"),
    _cause(r"input/output error", Failure.DISK, "check the disk"),
    _cause(
        r"insufficient permission for adding|unable to (?:create|write|open)[^\n]*: permission denied"
        r"|could not (?:lock|open|create)[^\n]*: permission denied",
        Failure.DISK,
        "give the worker's user write access to the site's repository",
    ),
    _cause(
        r"host key verification failed|host identification has changed|host key is known",
        Failure.HOST_KEY,
        "add the host's key to known_hosts: ssh-keyscan HOST >> ~/.ssh/known_hosts, after checking it",
    ),
    _cause(
        r"rate limit|too many requests|\b429\b",
        Failure.NETWORK,
        "the host limits how often it may be asked; it is tried again by itself",
    ),
    _cause(
        r"permission denied \(|authentication failed|could not read (?:username|password)|terminal prompts"
        r" disabled|returned error: 40[13]|invalid (?:username|credentials)|permission to \S+ denied"
        r"|access denied|write access to repository not granted|deploy key|no supported authentication",
        Failure.AUTH,
        "give the worker a deploy key or token that may push",
    ),
    _cause(
        r"could not resolve host|connection (?:refused|reset|timed out|closed)|network is unreachable"
        r"|no route to host|operation timed out|name resolution|returned error: 5\d\d|early eof"
        r"|unexpected disconnect|ssl|tls|certificate|gnutls|couldn't connect|failed to connect"
        r"|unable to connect|empty reply|broken pipe|recv failure|timeout",
        Failure.NETWORK,
        "check the network and the host's status; it is tried again by itself",
    ),
    _cause(
        r"dubious ownership",
        Failure.OWNERSHIP,
        "run the worker as the owner of the site's files, or: git config --global --add safe.directory DIR",
    ),
    _cause(
        r"returned error: 404|repository not found|repository '[^']*' not found"
        r"|does not appear to be a git repository|no such remote|does not exist|no such device or address"
        r"|unable to find remote helper|transport '[^']*' not allowed",
        Failure.REMOTE_MISSING,
        "check the remote's address: git remote -v",
    ),
    _cause(
        r"remote end hung up|could not read from remote repository|rpc failed|unable to access",
        Failure.NETWORK,
        "check the network and the remote's address; it is tried again by itself",
    ),
    _cause(
        r"index file (?:corrupt|smaller)|bad (?:index|signature)|index uses [^\n]* extension",
        Failure.CORRUPT,
        "rebuild the index: rm .git/index && git reset",
    ),
    _cause(
        r"corrupt|bad object|missing (?:blob|tree|object)|unable to read|invalid object|not a valid object"
        r"|bad (?:tree|config|ref)|did not send all|missing necessary objects|inflate|unresolved delta"
        r"|not a tree|invalid sha1|broken",
        Failure.CORRUPT,
        "look at what is damaged with git fsck --full, and restore it from the remote or a backup",
    ),
    _cause(
        r"unable to create '[^']*\.lock'|cannot lock ref|\.lock': file exists|unable to lock",
        Failure.LOCKED,
        "end the git command that holds the lock, or remove the .lock file if none runs",
    ),
    _cause(r"not a git repository", Failure.NOT_A_REPOSITORY, "point BRITER_GIT_WORKTREE at the clone"),
)


def from_git(doing: str, text: str) -> PublishError:
    """The failure that git's words mean, with the words and the fix."""
    said = _essence(text)
    for cause in _CAUSES:
        if cause.pattern.search(text):
            return PublishError(cause.failure, f"{doing}: {said}. Fix: {cause.fix}")
    return PublishError(Failure.INTERNAL, f"{doing}: {said or 'git failed without a word'}")


_DISK_ERRORS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EIO,
        errno.EACCES,
        errno.EPERM,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ESTALE,
    }
)


def from_os(doing: str, error: OSError) -> PublishError:
    """The failure that an error of the operating system means."""
    where = f" ({error.filename})" if error.filename else ""
    failure = Failure.DISK if error.errno in _DISK_ERRORS else Failure.INTERNAL
    return PublishError(failure, f"{doing}: {error.strerror or error}{where}")


_MOVED = re.compile(
    r"stale info|fetch first|non-fast-forward|is at \w+ but expected|incorrect old value|already exists",
    re.IGNORECASE,
)
_PROTECTED = re.compile(
    r"protected branch|GH006|not allowed to push (?:code )?to (?:this )?protected|currently checked out"
    r"|deletion prohibited|shallow update",
    re.IGNORECASE,
)
_TOO_LARGE = re.compile(r"exceeds maximum allowed size|exceeds [^\n]*file size limit|413", re.IGNORECASE)
_DECLINED = re.compile(r"hook declined|declined|GH0\d\d|secret|policy", re.IGNORECASE)


def remote_moved(summary: str, text: str) -> bool:
    """Whether a refusal says that the remote branch is not where we last saw it."""
    return bool(_MOVED.search(summary) or re.search(r"is at \w+ but expected", text))


def from_refusal(summary: str, text: str) -> PublishError:
    """What the remote's refusal of a push means: REJECTED when the contents are at fault."""
    words = remote_words(text) or summary
    if _PROTECTED.search(summary) or _PROTECTED.search(text):
        return PublishError(
            Failure.REMOTE_REFUSED,
            f"the remote does not let the worker push to this branch: {words}. "
            "Fix: allow the worker's key on the branch, or configure another branch",
        )
    if _TOO_LARGE.search(text) or _DECLINED.search(summary) or _DECLINED.search(text):
        return PublishError(
            Failure.REJECTED, f"the remote rejected it: {words}. Fix: change the post, save it again"
        )
    return PublishError(
        Failure.REMOTE_REFUSED,
        f"the remote could not take the push: {summary} {words}. Fix: check the remote repository",
    )


def too_large_for_remote(text: str) -> bool:
    """Whether the connection was ended because the push was too large for the remote."""
    return bool(re.search(r"HTTP 413|error: 413|exceeds maximum allowed size", text, re.IGNORECASE))


def remote_words(text: str) -> str:
    """What the remote itself said: its `remote:` lines."""
    lines = re.findall(r"^remote:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return " ".join(line for line in lines if line)


def _essence(text: str) -> str:
    """Git's words without its labels, hints and progress."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    kept = [
        re.sub(r"^(?:fatal|error): ", "", line).rstrip(".")
        for line in lines
        if line and not line.startswith(("hint:", "To ", "Everything up-to-date"))
    ]
    return "; ".join(dict.fromkeys(kept))
