"""What git's messages mean: the only module that reads them.

Git tells most of what went wrong in words alone. Each row is a pattern, the word it stands for, and the
fix a person can apply. The first match wins, so the specific rows come first. What the remote said counts
for what went wrong there; only its words and the push's summary say why it refused.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from briter_worker.errors import DISK_REMEDIES, Failure, PublishError, explained
from briter_worker.git.words import bounded, essence, nameless, remote_words, voices


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that git may be saying."""

    pattern: re.Pattern[str]
    failure: Failure
    fix: str


def _any(*phrases: str) -> re.Pattern[str]:
    """Any of these, as whole words: `ssl` is not in `hassle`."""
    return re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)


def _cause(failure: Failure, fix: str, *phrases: str) -> Cause:
    return Cause(_any(*phrases), failure, fix)


_ALLOW = "give the worker a deploy key or token that may push"
_ADDRESS = "check the remote's address: git remote -v"
_WAIT = "check the network and the host's status; it is tried again by itself"
_LIMITED = "the host limits how often it may be asked; it is tried again by itself"
_CHANGE = (
    "change the post, save it again; or, if the remote refuses every post like this, mend its hook, then: "
    "briter-worker retry --all"
)
_MEND = "mend the remote's hook, then: briter-worker retry --all"
_REPAIR = "check the remote repository: its disk, its locks and its hooks; it is tried again by itself"

_SURELY_HERE = (
    _cause(
        Failure.DISK,
        "free some space",
        "no space left on device|out of disk ?space|disk quota exceeded",
    ),
    _cause(
        Failure.DISK,
        "raise the limit on the size of files: ulimit -f",
        rf"file too large|file size limit exceeded|died of signal {signal.SIGXFSZ.value}",
    ),
    _cause(Failure.DISK, "make the file system writable", "read-only file ?system"),
    _cause(Failure.DISK, "check the disk", "input/output error"),
    # How git says that the file of a ref could not be written, without the system's own words.
    _cause(Failure.DISK, "check the disk", "couldn't (?:set|write) '[^'\\n]{1,300}'"),
    _cause(Failure.DISK, "give the machine more memory", "out of memory|cannot allocate memory"),
    _cause(
        Failure.DISK,
        "give the worker's user write access to the site's repository",
        "insufficient permission for adding|unable to create directory for",
        r"(?:unable to|could not|cannot) (?:create|write|open|access|lock)[^\n]{0,200}: permission denied",
    ),
    _cause(
        Failure.HOST_KEY,
        "if the host has got a new one, ssh-keygen -R HOST, then ssh-keyscan HOST >> ~/.ssh/known_hosts, "
        "after checking it",
        "host identification has changed|host key for [^\\n]{1,200} has changed",
    ),
    _cause(
        Failure.HOST_KEY,
        "add the host's key to known_hosts: ssh-keyscan HOST >> ~/.ssh/known_hosts, after checking it",
        "host key verification failed|host key is known",
    ),
    _cause(Failure.NETWORK, _LIMITED, "rate limit(?:ed)?|too many requests|(?:error:|HTTP) 429"),
    _cause(
        Failure.AUTH,
        _ALLOW,
        r"permission denied \([\w,-]{1,200}|permission denied, please try|authentication (?:failed|required)",
        "could not read (?:username|password)|terminal prompts disabled|(?:error:|HTTP) 40[13]",
        r"invalid (?:username|credentials)|permission to \S{1,300} denied|access denied|deploy key",
        "write access to repository not granted|marked as read.only|no supported authentication",
    ),
    _cause(
        Failure.OWNERSHIP,
        "run the worker as the owner of that repository's files, or, as the user who was refused: git config "
        "--global --add safe.directory DIR",
        "dubious ownership",
    ),
)
_THERE = (
    _cause(
        Failure.REMOTE_REFUSED,
        _REPAIR,
        "no space left|disk quota|read-only file ?system|input/output error|out of memory|unpacker error",
        "unable to (?:create|write)|insufficient permission|unable to lock|cannot lock ref",
        "maintenance|archived|over its data quota|exceeded its size limit",
    ),
    _cause(Failure.NETWORK, _LIMITED, "rate limit(?:ed)?|too many requests"),
    _cause(
        Failure.REMOTE_MISSING,
        "check the remote's address: git remote -v, and that its server lets the worker push there",
        "repository not exported|service not enabled|no such repository",
    ),
    _cause(
        Failure.AUTH,
        _ALLOW,
        r"permission to \S{1,300} denied|access denied|invalid (?:username|credentials)|deploy key",
        "write access to repository not granted|do(?:es)? not have write access",
    ),
    _cause(
        Failure.REMOTE_MISSING,
        _ADDRESS,
        "(?:repository|project) (?:'[^']*' )?(?:was )?not found|could not be found|does not exist",
    ),
    _cause(
        Failure.NETWORK,
        _WAIT,
        "internal server error|service unavailable|temporarily unavailable|bad gateway",
    ),
)
_HERE = (
    _cause(
        Failure.NETWORK,
        _WAIT,
        "could not resolve (?:host|proxy)(?:name)?|name or service not known|name resolution",
        "connection (?:refused|reset|timed out|closed|was closed)|network is unreachable|no route to host",
        r"timed out|timeout|(?:error:|HTTP) 5\d\d|early eof|unexpected disconnect|couldn't connect",
        "(?:failed|unable) to connect|empty reply|broken pipe|recv failure|remote failed to report status",
        r"(?:open)?ssl|ssl_\w{1,40}|tls|gnutls\w{0,40}|certificate",
    ),
    _cause(
        Failure.REMOTE_MISSING,
        _ADDRESS,
        "(?:error:|HTTP) 4(?:04|10)|(?:repository|project) (?:'[^']*' )?(?:was )?not found",
        "does not appear to be a git repository|is this a git repository",
        "no such remote|repository '[^']*' does not exist",
        "no such device or address|unable to find remote helper|transport '[^']*' not allowed",
        "strange (?:path|host)name",
    ),
    _cause(
        Failure.REMOTE_REFUSED,
        "check what the remote's login prints: git ls-remote",
        "protocol error|bad line length character",
    ),
    _cause(
        Failure.NETWORK,
        "check the network and the remote's address; it is tried again by itself",
        "remote end hung up|could not read from remote repository|rpc failed|unable to access",
    ),
    _cause(
        Failure.CORRUPT,
        "rebuild the index: rm .git/index && git reset",
        r"index file (?:corrupt|smaller)|bad (?:index|signature)|index uses [^\n]{1,80} extension",
        "cache entry has null sha1",
    ),
    _cause(Failure.CORRUPT, "correct that line of the file", "bad config line"),
    _cause(
        Failure.CORRUPT,
        "look at what is damaged with git fsck --full, and restore it from the remote or a backup",
        "corrupt(?:ed|ion)?|bad (?:object|tree|config|ref)|missing (?:blob|tree|object|necessary objects)",
        "unable to read|(?:invalid|not a valid|unable to parse) object|did not send all|inflate",
        "unresolved deltas?|not a tree|invalid sha1|broken",
    ),
    _cause(
        Failure.LOCKED,
        "end the git command that holds the lock, or remove the .lock file if none runs",
        r"unable to create '?\S{0,300}\.lock|cannot lock ref|\.lock'?: file exists|unable to lock",
    ),
    _cause(
        Failure.GIT_MISSING,
        "install that part of git, or take it out of the settings: git config --list",
        "is not a git command",
    ),
    # Of what has git die with the worker, see `ending`.
    _cause(Failure.GIT_MISSING, "install git 2.36 or newer", "setpriv: failed to execute git"),
    _cause(Failure.NOT_A_REPOSITORY, "point BRITER_GIT_WORKTREE at the clone", "not a git repository"),
)


def from_git(doing: str, text: str) -> PublishError:
    """The failure that git's words mean, with the words and the fix."""
    text = bounded(text)
    said = essence(text)
    here, there = voices(text)
    for causes, words in ((_SURELY_HERE, here), (_THERE, there), (_HERE, here)):
        for cause in causes:
            if cause.pattern.search(words):
                return PublishError(cause.failure, f"{doing}: {said}. Fix: {cause.fix}")
    return PublishError(Failure.INTERNAL, f"{doing}: {said or 'git failed without a word'}")


def from_os(doing: str, error: OSError) -> PublishError:
    """The failure that an error of the operating system means."""
    failure = Failure.DISK if error.errno in DISK_REMEDIES else Failure.INTERNAL
    return PublishError(failure, f"{doing}: {explained(error)}")


def wordless(status: int) -> str:
    """What an exit status tells of a git that said nothing."""
    if status == -signal.SIGXFSZ:
        return "file size limit exceeded"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"exit status {status}"


_MOVED = _any(
    "stale info|fetch first|non-fast-forward",
    "is at [0-9a-f]{4,64} but expected|incorrect old value|already exists",
)
_ELSEWHERE = _any("is at [0-9a-f]{4,64} but expected")
_TOO_LARGE = _any(
    r"exceeds maximum allowed size|exceeds [^\n]{0,80}(?:file size limit|limit of)|large files detected"
    r"|larger than the allowed|(?:error:|HTTP) 413"
)
_SECRETS = _any(
    "cannot contain secrets|push protection|contains? (?:\\w{1,20} )?secrets|secrets? detected|secrets found"
)
_PROTECTED = _any(
    "protected (?:branch|branches|ref|refs)|GH006|GH013|not allowed to (?:force )?push|not permitted to push",
    "currently checked out|refusing to update checked out branch|deletion prohibited|shallow update",
    "(?:through|via|use|using|by) (?:an? )?(?:pull|merge) requests?|required status checks?|committer email",
    "verified signatures?",
)
_TROUBLED = _any(
    "no space left|disk quota|read-only file ?system|unable to (?:create|write)|insufficient permission",
    "cannot lock ref|unable to lock|internal server error|temporarily unavailable|try again",
    "maintenance|archived|exceeded its size limit|over its data quota",
)
_NO_HOOK = re.compile(r"^(?:fatal|error): cannot (?:run|exec) \S{0,200}hooks/", re.MULTILINE)
"""Git there cannot start the hook, whatever is pushed."""
_BROKEN_HOOK = re.compile(
    r"hooks/[\w./-]{1,100}: (?:line )?\d{1,6}: |^(?:remote: )?Traceback \(most recent", re.MULTILINE
)
"""The hook's shell or Python says where in it the mistake is. It may be one post that it trips over, so that
alone is no reason to hold the others up."""
_DECLINED = _any(r"declined|GH0\d\d|fsck error|prohibited by|refusing to allow")


def remote_moved(summary: str, text: str) -> bool:
    """Whether a refusal says that the remote branch is not where we last saw it."""
    return bool(_MOVED.search(nameless(summary)) or _ELSEWHERE.search(voices(bounded(text))[1]))


def from_refusal(summary: str, text: str) -> PublishError:
    """What the remote's refusal of a push means: REJECTED when the contents are at fault."""
    text = bounded(text)
    words = remote_words(text) or summary.rstrip(".")
    said = f"{nameless(summary)}\n{voices(text)[1]}"
    refused = _TOO_LARGE.search(said) or _SECRETS.search(said)
    if not refused and _PROTECTED.search(said):
        return PublishError(
            Failure.REMOTE_REFUSED,
            f"the remote does not let the worker push to this branch: {words}. "
            "Fix: allow the worker's key on the branch, or configure another branch",
        )
    if refused or (_DECLINED.search(said) and not _TROUBLED.search(said) and not _NO_HOOK.search(text)):
        what, fix = "the remote rejected it", _CHANGE
        if not refused and _BROKEN_HOOK.search(text):
            what, fix = "a hook of the remote fails on it", _MEND
        return PublishError(Failure.REJECTED, f"{what}: {words}. Fix: {fix}")
    reason = words if words == summary else f"{summary} {words}"
    return PublishError(
        Failure.REMOTE_REFUSED, f"the remote could not take the push: {reason}. Fix: {_REPAIR}"
    )


def too_large_for_remote(text: str) -> bool:
    """Whether the connection was ended because the push was too large for the remote."""
    here, there = voices(bounded(text))
    return bool(re.search(r"(?:error:|HTTP) 413\b", here) or _TOO_LARGE.search(there))
