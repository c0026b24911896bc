"""Classify git's messages: the only module that reads them.

Git reports most failures as text alone. Each row is a failure code, the fix, and the phrases that stand for
them. The first match wins, so specific rows come first. Quoted names, URLs, paths and hosts are taken out
before: a site called policy-site, or a post about timeouts, is no failure. What the remote wrote is matched
apart from what git wrote here, and is never taken for a fix.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from typing import TYPE_CHECKING

from briter_worker.errors import OS_FIXES, FailureCode, PublishError
from briter_worker.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

_Row = tuple[FailureCode, str, re.Pattern[str]]


def _phrases(*phrases: str) -> re.Pattern[str]:
    """Match any of these as whole words: `ssl` is not in `hassle`."""
    return re.compile(rf"(?<!\w)(?:{'|'.join(phrases)})(?!\w)", re.IGNORECASE)


def _row(code: FailureCode, fix: str, *phrases: str) -> _Row:
    return code, fix, _phrases(*phrases)


_C = FailureCode
_ALLOW = "give the worker a deploy key or token that may push"
_ADDRESS = "check the remote's address: git remote -v, and that its server lets the worker push there"
_WAIT = "check the network and the host's status; the worker tries again by itself"
_WRITE_ACCESS = "give the worker's user write access to the site's repository"
_HOST_KEY = "check the host's key, then: ssh-keygen -R HOST; ssh-keyscan HOST >> ~/.ssh/known_hosts"
_CHANGE = (
    "change the post and save it again; or, if the remote refuses every post like this, correct its hook, "
    "then: briter-worker retry --all"
)
_BRANCH = "allow the worker's key on the branch, or configure another branch"
_REPAIR = "check the remote repository: its disk, its locks and its hooks; the worker tries again by itself"
_RIGHTS = (
    r"permission to \S{1,300} denied|access denied|invalid (?:username|credentials)|deploy key",
    "write access to repository not granted|do(?:es)? not have write access",
)
_GONE = "(?:repository|project) (?:'[^']*' )?(?:was )?not found"

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM)

_LOCAL_FIRST = (
    *(_row(_C.DISK, OS_FIXES[number], re.escape(os.strerror(number))) for number in _DISK_ERRORS),
    _row(
        _C.DISK,
        OS_FIXES[errno.EFBIG],
        f"file size limit exceeded|died of signal {signal.SIGXFSZ.value}",
    ),
    _row(_C.DISK, OS_FIXES[errno.ENOSPC], "out of disk ?space"),
    _row(_C.DISK, OS_FIXES[errno.ENOMEM], "out of memory"),
    _row(
        _C.DISK,
        _WRITE_ACCESS,
        "insufficient permission for adding|unable to create directory for|couldn't (?:set|write) '",
        r"(?:unable to|could not|cannot) (?:create|write|open|access|lock)[^\n]{0,200}: permission denied",
    ),
    _row(
        _C.HOST_KEY,
        _HOST_KEY,
        "host identification has changed|host key for [^\\n]{1,200} has changed",
        "host key verification failed|host key is known",
    ),
    _row(_C.NETWORK, _WAIT, "rate limit(?:ed)?|too many requests|(?:error:|HTTP) 429"),
    _row(
        _C.AUTH,
        _ALLOW,
        *_RIGHTS,
        r"permission denied \([\w,-]{1,200}|permission denied, please try|authentication (?:failed|required)",
        "could not read (?:username|password)|terminal prompts disabled|(?:error:|HTTP) 40[13]",
        "marked as read.only|no supported authentication",
    ),
    _row(
        _C.OWNERSHIP,
        "run the worker as the owner of that repository's files, or, as the user who was refused: git config "
        "--global --add safe.directory DIR",
        "dubious ownership",
    ),
)
_REMOTE = (
    _row(
        _C.REMOTE_REFUSED,
        _REPAIR,
        "no space left|disk quota|read-only file ?system|input/output error|out of memory|unpacker error",
        "unable to (?:create|write)|insufficient permission|unable to lock|cannot lock ref",
        "maintenance|archived|over its data quota|exceeded its size limit",
    ),
    _row(_C.NETWORK, _WAIT, "rate limit(?:ed)?|too many requests"),
    _row(_C.REMOTE_MISSING, _ADDRESS, "repository not exported|service not enabled|no such repository"),
    _row(_C.AUTH, _ALLOW, *_RIGHTS),
    _row(_C.REMOTE_MISSING, _ADDRESS, _GONE, "could not be found|does not exist"),
    _row(_C.NETWORK, _WAIT, "internal server error|service unavailable|temporarily unavailable|bad gateway"),
)
_LOCAL = (
    _row(
        _C.NETWORK,
        _WAIT,
        "could not resolve (?:host|proxy)(?:name)?|name or service not known|name resolution",
        "connection (?:refused|reset|timed out|closed|was closed)|network is unreachable|no route to host",
        r"timed out|timeout|(?:error:|HTTP) 5\d\d|early eof|unexpected disconnect|couldn't connect",
        "(?:failed|unable) to connect|empty reply|broken pipe|recv failure|remote failed to report status",
        r"(?:open)?ssl|ssl_\w{1,40}|tls|gnutls\w{0,40}|certificate|operation too slow",
    ),
    _row(
        _C.REMOTE_MISSING,
        _ADDRESS,
        _GONE,
        "(?:error:|HTTP) 4(?:04|10)|does not appear to be a git repository|is this a git repository",
        "no such remote|repository '[^']*' does not exist|strange (?:path|host)name",
        "no such device or address|unable to find remote helper|transport '[^']*' not allowed",
    ),
    _row(
        _C.REMOTE_REFUSED,
        "check what the remote's login prints: git ls-remote",
        "protocol error|bad line length character",
    ),
    _row(
        _C.NETWORK,
        _WAIT,
        "remote end hung up|could not read from remote repository|rpc failed|unable to access",
    ),
    _row(
        _C.CORRUPT,
        "rebuild the index: rm .git/index && git reset",
        r"index file (?:corrupt|smaller)|bad (?:index|signature)|index uses [^\n]{1,80} extension",
        "cache entry has null sha1",
    ),
    _row(_C.CORRUPT, "correct that line of the file; git config --list names it", "bad config line"),
    _row(
        _C.CORRUPT,
        "find the damage with git fsck --full, and restore it from the remote or a backup",
        "corrupt(?:ed|ion)?|bad (?:object|tree|config|ref)|missing (?:blob|tree|object|necessary objects)",
        "unable to read|(?:invalid|not a valid|unable to parse) object|did not send all|inflate",
        "unresolved deltas?|not a tree|invalid sha1|broken",
    ),
    _row(
        _C.LOCKED,
        "end the git command that holds the lock, or remove the .lock file if none runs",
        r"unable to create '?\S{0,300}\.lock|cannot lock ref|\.lock'?: file exists|unable to lock",
    ),
    _row(
        _C.GIT_MISSING,
        "install git 2.36 or newer, with that part of it; or remove the part: git config --list",
        "is not a git command|setpriv: failed to execute git",
    ),
    _row(_C.NOT_A_REPOSITORY, "point BRITER_GIT_WORKTREE at the clone", "not a git repository"),
)
_OTHER_VALUE = "is at [0-9a-f]{4,64} but expected"
_MOVED = _phrases("stale info|fetch first|non-fast-forward|incorrect old value|already exists", _OTHER_VALUE)
_MOVED_THERE = _phrases(_OTHER_VALUE)
_TOO_LARGE = _phrases(
    r"exceeds maximum allowed size|exceeds [^\n]{0,80}(?:file size limit|limit of)|large files detected",
    "larger than the allowed|(?:error:|HTTP) 413",
)
_REJECTIONS = (
    (_C.REJECTED, _CHANGE, _TOO_LARGE),
    _row(
        _C.REJECTED,
        _CHANGE,
        "cannot contain secrets|push protection|contains? (?:\\w{1,20} )?secrets|secrets? detected",
        "secrets found",
    ),
    _row(
        _C.REMOTE_REFUSED,
        _BRANCH,
        "protected (?:branch|branches|ref|refs)|GH006|GH013|not allowed to (?:force )?push",
        "not permitted to push|currently checked out|refusing to update checked out branch|shallow update",
        "(?:through|via|use|using|by) (?:an? )?(?:pull|merge) requests?|required status checks?",
        "deletion prohibited|committer email|verified signatures?",
    ),
    _row(
        _C.REMOTE_REFUSED,
        _REPAIR,
        "no space left|disk quota|read-only file ?system|unable to (?:create|write)|cannot lock ref",
        "insufficient permission|unable to lock|internal server error|temporarily unavailable|try again",
        "maintenance|archived|exceeded its size limit|over its data quota",
    ),
    _row(_C.REJECTED, _CHANGE, r"declined|GH0\d\d|fsck error|prohibited by|refusing to allow"),
)
_UNSTARTABLE_HOOK = re.compile(r"^(?:fatal|error): cannot (?:run|exec) \S{0,200}hooks/", re.MULTILINE)
"""The remote's git cannot start the hook, whatever is pushed."""


def from_git(what_failed: str, text: str) -> PublishError:
    """Return the failure that git's text stands for, with the text and the fix."""
    text = _shorten(text)
    here, there = _split_voices(text)
    found = (
        (code, fix)
        for rows, said in ((_LOCAL_FIRST, here), (_REMOTE, there), (_LOCAL, here))
        for code, fix, pattern in rows
        if pattern.search(said)
    )
    code, fix = next(found, (FailureCode.INTERNAL, ""))
    return PublishError(code, f"{what_failed}: {_essence(text) or 'git printed no reason'}", fix)


def status_text(status: int) -> str:
    """Return what an exit status tells about a git that printed nothing."""
    if status == -signal.SIGXFSZ:
        return "file size limit exceeded"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"exit status {status}"


def is_remote_moved(summary: str, text: str) -> bool:
    """Return True if a rejection says that the remote branch is not where it was last seen."""
    there = _split_voices(_shorten(text))[1]
    return bool(_MOVED.search(_without_names(summary)) or _MOVED_THERE.search(there))


def is_too_large(text: str) -> bool:
    """Return True if the remote ended the connection because the push was too large."""
    here, there = _split_voices(_shorten(text))
    return bool(re.search(r"(?:error:|HTTP) 413\b", here) or _TOO_LARGE.search(there))


def from_rejection(summary: str, text: str) -> PublishError:
    """Return what the remote's rejection of a push means: REJECTED when the contents are at fault."""
    text = _shorten(text)
    said = f"{_without_names(summary)}\n{_split_voices(text)[1]}"
    found = ((code, fix) for code, fix, pattern in _REJECTIONS if pattern.search(said))
    code, fix = next(found, (FailureCode.REMOTE_REFUSED, _REPAIR))
    if _UNSTARTABLE_HOOK.search(text):
        code, fix = FailureCode.REMOTE_REFUSED, _REPAIR
    quoted = _remote_text(text)
    reason = summary.rstrip(".") if not quoted or code is FailureCode.REMOTE_REFUSED else ""
    return PublishError(code, f"the remote rejected the push: {f'{reason} {quoted}'.strip()}", fix)


_READ = 16_000
"""So many characters are read of the beginning of a text, and of its end, where git names the fatal error."""
_SHOWN = 1_500
_REMOTE_LINE = re.compile(
    r"(?:remote:|(?:fatal: |error: )?remote (?:error|unpack failed):)[ \t]*(.*)", re.IGNORECASE
)
_QUOTED = re.compile(r"(?<!\w)(['\"])([^'\"\n]*)\1")
_NO_NAMES = frozenset({"input/output", "ssl/tls", "tls/ssl"})


def _shorten(text: str) -> str:
    """Cut the middle out of a long text, between words and lines: half of a secret is not recognised."""
    if len(text) <= 2 * _READ:
        return text
    head, tail = text[:_READ], text[-_READ:]
    head = head[: max(head.rfind(" "), head.rfind("\n")) + 1]
    return f"{head}\n{tail.partition(chr(10))[2]}"


def _split_voices(text: str) -> tuple[str, str]:
    """Return what git said here, and what the remote said, without the names that either mentions."""
    here: list[str] = []
    there: list[str] = []
    for line in re.split(r"[\r\n]+", text):
        if remote := _REMOTE_LINE.match(line):
            there.append(_without_names(remote[1]))
        elif not line.startswith(("hint:", "To ")):
            here.append(_without_names(line))
    return "\n".join(here), "\n".join(there)


def _without_names(line: str) -> str:
    """Replace every quoted name, URL, path and host by `…`; of a lock file, `….lock` stays."""
    line = _QUOTED.sub(lambda found: f"{found[1]}{_hidden(found[2])}{found[1]}", line)
    return re.sub(r"\S+", lambda found: _without_name(found[0]), line)


def _without_name(word: str) -> str:
    core = word.strip(".,:;!?()[]'\"")
    if core.lower() in _NO_NAMES or not ("/" in core or "." in core or "\\" in core):
        return word
    before, _, after = word.partition(core)
    return f"{before}{_hidden(core)}{after}"


def _hidden(name: str) -> str:
    return "….lock" if name.endswith(".lock") else "…"


def _remote_text(text: str) -> str:
    found = (_REMOTE_LINE.match(line) for line in re.split(r"[\r\n]+", text))
    lines = dict.fromkeys(each[1].strip() for each in found if each)
    return _shown([each for each in lines if each], between=" ")


def _essence(text: str) -> str:
    """Return git's text without its labels, hints and progress."""
    lines = [line.strip(" \t@") for line in re.split(r"[\r\n]+", text)]
    kept = [
        re.sub(r"^(?:fatal|error): ", "", line).rstrip(".")
        for line in lines
        if line and not line.startswith(("hint:", "To ", "Everything up-to-date"))
    ]
    return _shown(list(dict.fromkeys(kept)))


def _shown(lines: Sequence[str], *, between: str = "; ") -> str:
    """Join the lines; of a long text return the beginning and the last line. Redact before cutting."""
    text = one_line(between.join(lines)).rstrip(".")
    if len(text) <= _SHOWN and not text.endswith("…"):
        return text
    text = text.removesuffix("…")[:_SHOWN].rstrip()
    last = one_line(lines[-1]) if not _REMOTE_LINE.match(lines[-1]) else ""
    return f"{text} …" if len(last) > _SHOWN // 5 else f"{text} … {last}".rstrip()
