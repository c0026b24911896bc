"""Read and classify what git prints: the only module that does.

Git reports most failures as text alone. Each row is a failure code, the fix, and the phrases that stand for
them. The first match wins, so specific rows come first. Quoted names, URLs, paths and hosts are taken out
before: a site called policy-site, or a post about timeouts, is no failure. What the remote wrote is matched
apart from what git wrote here, and is never taken for a fix.
"""

from __future__ import annotations

import errno
import re
import signal
from typing import TYPE_CHECKING

from briter_worker.errors import (
    OS_FIXES,
    Failure,
    FailureCode,
    PublishError,
    PushRejectedError,
    one_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_C = FailureCode
_ADDRESS = "check the remote's address: git remote -v, and that its server lets the worker push there"
_WAIT = "check the network and the host's status; the worker tries again by itself"
_REPAIR = "check the remote repository: its disk, its locks and its hooks; the worker tries again by itself"
_FSCK = "find the damage with git fsck --full, and restore it from the remote or a backup"
_CHANGE = (
    "change the post and save it again; or, if the remote refuses every post like this, correct its hook, "
    "then: briter-worker retry --all"
)
_EVERY = (
    "change the rule or hook with which the remote refuses every post, or change the posts; the worker tries "
    "again by itself"
)
_TRUST = (
    "run the worker as the owner of that repository's files, or, as the user who was refused: git config "
    "--global --add safe.directory DIR"
)
_CAUSES = {
    "full": (_C.DISK, OS_FIXES[errno.ENOSPC]),
    "quota": (_C.DISK, OS_FIXES[errno.EDQUOT]),
    "limit": (_C.DISK, OS_FIXES[errno.EFBIG]),
    "read-only": (_C.DISK, OS_FIXES[errno.EROFS]),
    "io": (_C.DISK, OS_FIXES[errno.EIO]),
    "memory": (_C.DISK, OS_FIXES[errno.ENOMEM]),
    "access": (_C.DISK, "give the worker's user write access to the site's repository"),
    "host-key": (
        _C.HOST_KEY,
        "check the host's key, then: ssh-keygen -R HOST; ssh-keyscan HOST >> ~/.ssh/known_hosts",
    ),
    "network": (_C.NETWORK, _WAIT),
    "limited": (_C.NETWORK, "none needed: the host limits how often it may be asked; the worker tries again"),
    "auth": (_C.AUTH, "give the worker a deploy key or token that may push"),
    "owner": (_C.OWNERSHIP, _TRUST),
    "address": (_C.REMOTE_MISSING, _ADDRESS),
    "remote": (_C.REMOTE_REFUSED, _REPAIR),
    "login": (_C.REMOTE_REFUSED, "check what the remote's login prints: git ls-remote"),
    "branch": (_C.PROTECTED, "allow the worker's key on the branch, or configure another branch"),
    "signature": (
        _C.REMOTE_REFUSED,
        "sign the commits: BRITER_GIT_SIGNING_KEY, with a key that the host knows",
    ),
    "content": (_C.REJECTED, _CHANGE),
    "large": (_C.REJECTED, "make the post's files smaller, then save it again"),
    "index": (_C.CORRUPT, "rebuild the index: rm .git/index && git reset"),
    "config": (_C.CORRUPT, "correct that line of the file; git config --list names it"),
    "objects": (_C.CORRUPT, _FSCK),
    "lock": (_C.LOCKED, "end the git command that holds the lock, or remove the .lock file if none runs"),
    "git": (
        _C.GIT_MISSING,
        "install git 2.38 or newer, with that part of it; or remove the part: git config --list",
    ),
    "none": (_C.NOT_A_REPOSITORY, "point BRITER_GIT_WORKTREE at the clone"),
}

# Tables: in each line a cause, and the phrases that stand for it. Read at the first failure.
_LOCAL_FIRST = r"""
    large      (?:error:|HTTP) 413
    full       no space left on device|out of disk ?space
    quota      disk quota exceeded
    limit      file too large|file size limit exceeded|died of signal 25
    read-only  read-only file ?system
    io         input/output error
    memory     out of memory|cannot allocate memory
    access     insufficient permission for adding|unable to create directory for
    full       couldn't (?:set|write) '[^'\n]{1,300}'
    access     (?:unable to|could not|cannot) (?:create|write|open|access|lock)[^\n]{0,200}: permission denied
    host-key   host identification has changed|host key for [^\n]{1,200} has changed
    host-key   host key verification failed|host key is known
    limited    rate limit(?:ed)?|too many requests|(?:error:|HTTP) 429
    auth       permission denied \([\w,-]{1,200}|permission denied, please try
    auth       authentication (?:failed|required)
    auth       could not read (?:username|password)|terminal prompts disabled|(?:error:|HTTP) 40[13]
    auth       invalid (?:username|credentials)|permission to \S{1,300} denied|access denied|deploy key
    auth       write access to repository not granted|marked as read.only|no supported authentication
    owner      dubious ownership
"""
_REMOTE = r"""
    large      pack exceeds maximum allowed size
    remote     no space left|disk quota|read-only file ?system|input/output error|out of memory|unpacker error
    remote     unable to (?:create|write)|insufficient permission|unable to lock|cannot lock ref
    address    repository not exported|service not enabled|no such repository
    auth       permission to \S{1,300} denied|access denied|invalid (?:username|credentials)|deploy key
    auth       write access to repository not granted|do(?:es)? not have write access
    address    (?:repository|project) (?:'[^']*' )?(?:was )?not found|could not be found|does not exist
"""
"""Phrases of git at the other end, and of hosts before they take a push."""
_LOCAL = r"""
    network    could not resolve (?:host|proxy)(?:name)?|name or service not known|name resolution
    network    connection (?:refused|reset|timed out|closed|was closed)|network is unreachable
    network    no route to host
    network    timed out|timeout|(?:error:|HTTP) 5\d\d|early eof|unexpected disconnect|couldn't connect
    network    (?:failed|unable) to connect|empty reply|broken pipe|recv failure
    network    remote failed to report status
    network    (?:open)?ssl|ssl_\w{1,40}|tls|gnutls\w{0,40}|certificate|operation too slow
    address    (?:error:|HTTP) 4(?:04|10)|(?:repository|project) (?:'[^']*' )?(?:was )?not found
    address    does not appear to be a git repository|is this a git repository|strange (?:path|host)name
    address    no such remote|repository '[^']*' does not exist|no such device or address
    address    unable to find remote helper|transport '[^']*' not allowed
    login      protocol error|bad line length character
    network    remote end hung up|could not read from remote repository|rpc failed|unable to access
    index      index file (?:corrupt|smaller)|bad (?:index|signature)|index uses [^\n]{1,80} extension
    index      cache entry has null sha1
    config     bad config line|bad (?:boolean|numeric) config value
    objects    corrupt(?:ed|ion)?|bad (?:object|tree|config|ref)
    objects    missing (?:blob|tree|object|necessary objects)
    objects    unable to read|could not read [0-9a-f]{40}
    objects    (?:invalid|not a valid|unable to parse) object|did not send all|inflate
    objects    unresolved deltas?|not a tree|invalid sha1|broken
    lock       unable to create '?\S{0,300}\.lock|cannot lock ref|\.lock'?: file exists|unable to lock
    git        is not a git command|setpriv: failed to execute git
    none       not a git repository
"""
_UNPACKING = r"""
    large      pack exceeds maximum allowed size
    content    fsck error
"""
"""Phrases of git's own unpacking about the contents: no hook has run by then."""
_SENTENCES = r"""
    branch     GH006|protected branch hook declined|cannot update this protected (?:branch|ref)
    branch     changes must be made through a pull request|required status checks?
    branch     GitLab: You are not allowed to (?:force )?push code to (?:a )?protected branch(?:es)?
    branch     (?:Gitea|Forgejo): Not allowed to push to protected branch
    branch     can only be modified through pull requests|TF402455
    signature  GitLab: Commit must be signed|commits must have verified signatures
    large      GH001
"""
"""Sentences of git hosts, each known to mean one thing: they choose the fix."""
UNLOCK = "use a key without a passphrase, or unlock it in the agent of the worker's user: ssh-add, gpg-agent"
_NO_KEY = (
    "set BRITER_GIT_SIGNING_KEY to a key that the worker's user can read, or start the agent that has it; "
    "ssh-keygen -t ed25519 -N '' -f FILE makes one"
)
_UNKNOWN_KEY = (
    "set BRITER_GIT_SIGNING_KEY to a secret key of the worker's user (gpg --list-secret-keys, gpgsm "
    "--list-secret-keys), or set GNUPGHOME"
)
_SIGNING = (
    ("passphrase|no pinentry|inappropriate ioctl|operation cancelled|agent refused", UNLOCK),
    ("needed for ssh signing|unknown option", "install OpenSSH 8.2 or newer"),
    ("cannot (?:run|exec)|: not found", "install openssh-client for ssh, gnupg for openpgp, gpgsm for x509"),
    ("unprotected private key", "chmod 600 FILE, so that only the worker's user can read it"),
    ("couldn't load public key|no private key found|load key", _NO_KEY),
    ("unusable secret key|certificate expired", "renew the key: it is expired, revoked or not for signing"),
    ("not trusted", "add the root certificate's fingerprint to trustlist.txt in GNUPGHOME"),
    ("failed to sign|gpg: |gpgsm: ", _UNKNOWN_KEY),
)
_MOVED_THERE = "is at [0-9a-f]{4,64} but expected"
_REASON = re.compile(r"\(([^()]*)\)\s*\Z")
_MOVED = re.compile(
    "stale info|fetch first|non-fast-forward|incorrect old value(?: provided)?|(?:reference )?already exists"
)
_OWN_REASONS = re.compile(
    "unpacker error|bad pack|missing necessary objects|failed to (?:update ref|write|start transaction)"
    "|transaction error|atomic transaction failed|refname conflict|reference conflict due to .*"
    "|funny refname|refusing to (?:create funny ref|update funny ref|update checked out branch|.*symref.*)"
    "|bad ref|broken symref|aliased refs|inconsistent aliased update|invalid new value provided"
    "|branch is currently checked out|deletion (?:of the current branch )?prohibited"
    "|shallow (?:update not allowed|error)|(?:proc-receive|remote) failed to report status"
    "|(?:fail to run|no) proc-receive hook|Up-to-date check failed"
    "|Working directory has (?:un)?staged changes|Could not update working tree to new HEAD"
)
"""Reasons that git's own receive-pack gives for a ref, without those of its hooks."""
_HOOK_ABORTED = re.compile("aborted by (?:the reference-transaction )?hook")
_NOT_BARE = re.compile("checked out|deletion|shallow|staged changes|Up-to-date check|working tree")
_BARE = "publish to a bare repository that accepts the branch, or configure another branch"
_UNSTARTABLE_HOOK = re.compile(r"^(?:fatal|error): cannot (?:run|exec) \S{0,200}hooks/", re.MULTILINE)


def name_of(command: Sequence[str]) -> str:
    """Return the name of a git command, given its arguments."""
    return next(each for each in command if not each.startswith("-") and "=" not in each)


def from_git(command: Sequence[str], text: str) -> PublishError:
    """Return the failure that git's text stands for, with the text and the fix."""
    text = _shorten(text)
    here, there = _split_local_remote(text)
    tables = (_LOCAL_FIRST, here), (_REMOTE, there), (_LOCAL, here)
    code, fix = next((found for each in tables if (found := _find(*each))), (FailureCode.INTERNAL, ""))
    reason = _essence(text) or "git printed no reason"
    return PublishError(code, f"git {name_of(command)} failed: {reason}", fix)


def from_signing(text: str) -> PublishError | None:
    """Return the failure for what git, ssh-keygen or gpg printed while signing; None if it is another one."""
    text = _shorten(text)
    fix = next((fix for pattern, fix in _SIGNING if re.search(pattern, text, re.IGNORECASE)), None)
    lines = (line.removesuffix("?") for line in text.splitlines() if not line.startswith("[GNUPG:]"))
    said = _essence("\n".join(lines))
    return PublishError(_C.SIGNING, f"the commit could not be signed: {said}", fix) if fix else None


def status_text(status: int) -> str:
    """Return what an exit status tells about a git that printed nothing."""
    if status == -signal.SIGXFSZ:
        return "file size limit exceeded"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"exit status {status}"


def from_rejection(summary: str, text: str) -> PublishError | None:
    """Return what the remote's rejection of a push means.

    Git's own reasons decide at once. Any other is the remote's, as of a hook: a PushRejectedError, whose
    words decide nothing. Return None if the remote branch is not where it was last seen.
    """
    text = _shorten(text)
    found = _REASON.search(summary)
    reason = found[1] if found else ""
    said = _split_local_remote(text)[1]
    is_own = bool(_OWN_REASONS.fullmatch(reason)) and not _HOOK_ABORTED.search(said)
    if _MOVED.fullmatch(reason) or (is_own and _has(_MOVED_THERE, said)):
        return None
    lines = (_REMOTE_LINE.match(line) for line in re.split(r"[\r\n]+", text))
    quoted = _shown((line[1].strip() for line in lines if line), between=" ")
    shown = f"the remote rejected the push: {quoted or summary.rstrip('.')}"
    in_full = f"the remote rejected the push: {summary.rstrip('.')} {quoted}".rstrip()
    if _UNSTARTABLE_HOOK.search(text):
        return PublishError(_C.REMOTE_REFUSED, in_full, _REPAIR)
    if not is_own:
        return _from_hook(f"{_without_names(summary)}\n{said}", shown)
    if reason == "unpacker error" and (cause := _find(_UNPACKING, said)):
        return PublishError(cause[0], shown, cause[1])
    return PublishError(_C.REMOTE_REFUSED, in_full, _BARE if _NOT_BARE.search(reason) else _REPAIR)


def _from_hook(said: str, shown: str) -> PublishError:
    """Return the failure for a refusal in the remote's own words; a host's known sentence chooses the fix."""
    code, fix = _find(_SENTENCES, said) or (_C.REJECTED, "")
    is_known = code is not _C.REJECTED
    condition = Failure(code if is_known else _C.REMOTE_REFUSED, shown, fix or _EVERY)
    return PushRejectedError(shown, fix or _CHANGE, condition, is_known=is_known)


def _find(table: str, said: str) -> tuple[FailureCode, str] | None:
    rows = (line.split(maxsplit=1) for line in table.strip().splitlines())
    return next((_CAUSES[cause] for cause, phrases in rows if _has(phrases, said)), None)


def _has(phrases: str, said: str) -> bool:
    """Return True if the text has any of these phrases as whole words: `ssl` is not in `hassle`."""
    return re.search(rf"(?i)(?<!\w)(?:{phrases})(?!\w)", said) is not None


_READ = 16_000
"""So many characters are read of the beginning of a text, and of its end, where git names the fatal error."""
_SHOWN = 1_500
_REMOTE_LINE = re.compile(
    r"(?:remote:|(?:fatal: |error: )?remote (?:error|unpack failed):)[ \t]*(.*)", re.IGNORECASE
)
_QUOTED = re.compile(r"(?<!\w)(['\"])([^'\"\n]*)\1")
_NAME = re.compile(r"""[^\s.,:;!?()\[\]'"]\S*[./\\]\S*[^\s.,:;!?()\[\]'"]|/\S+""")
_NO_NAMES = frozenset({"input/output", "ssl/tls", "tls/ssl"})


def _shorten(text: str) -> str:
    """Cut the middle out of a long text, between words and lines: half of a secret is not recognised."""
    if len(text) <= 2 * _READ:
        return text
    head, tail = text[:_READ], text[-_READ:]
    head = head[: max(head.rfind(" "), head.rfind("\n")) + 1]
    return f"{head}\n{tail.partition(chr(10))[2]}"


def _split_local_remote(text: str) -> tuple[str, str]:
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
    return _NAME.sub(lambda found: _hidden(found[0]), line)


def _hidden(name: str) -> str:
    return name if name.lower() in _NO_NAMES else "….lock" if name.endswith(".lock") else "…"


def _essence(text: str) -> str:
    """Return git's text without its labels, hints and progress."""
    lines = (line.strip(" \t@") for line in re.split(r"[\r\n]+", text))
    noise = ("hint:", "To ", "Everything up-to-date")
    return _shown(
        re.sub(r"^(?:fatal|error): ", "", line).rstrip(".") for line in lines if not line.startswith(noise)
    )


def _shown(lines: Iterable[str], *, between: str = "; ") -> str:
    """Return the lines in one, each once, as far as there is space."""
    return one_line(between.join(filter(None, dict.fromkeys(lines))), _SHOWN).rstrip(".")
