"""Failures, sorted once by what they mean for a job, and texts without secrets and control characters.

Every failure has a code from a closed set (the job file's `failure`), and every code belongs to one of
three classes. No other module decides what a failure means.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_TEXT = 2_000
"""Maximum length of `lastError` in characters."""

# Credentials as they occur in URLs and in git's messages. An scp-style `git@host:path` carries no secret.
# The text may come from a remote or a job, so each pattern must take linear time: none begins with an
# unbounded repetition, and each repetition that can fail at its end is bounded.
_URL_USER = r"://[^\s/'\"]*@|://[^\s/:@'\"]{1,256}:(?!\d{1,5}/)[^\s@'\"]{0,256}@"
"""Ends at the last @ before the path, or behind a slash in a password that was not encoded."""
_BARE_USER = r"(?<![\w.%+-])[\w.%+-]{1,128}:[^\s/:@'\"]{1,256}@(?=\w)"
_URL_QUERY = r"(?P<url>://[^\s?'\"]*)(?P<query>\?[^\s'\"]*)?"
_WORD = r"(?:\"[^\"]*(?:\"|\Z)|'[^']*(?:'|\Z)|[^\s&;\"']+)"
_ON = rf"(?:(?:(?<=[=:])|[\"']?\s{{0,8}}[=:])\s{{0,8}}{_WORD})*"
"""A word that looks like a value may be another key, followed by the value."""
_SECRET_PAIR = (
    r"(?i)(?P<key>(?:token|secret|password|passwd|passphrase|signature|credentials?|auth|sig"
    r"|(?<![a-z])(?:(?:api|access|private|secret)?[_-]?key|pwd|pass))"
    rf"[\"']?\s{{0,8}}[=:]\s{{0,8}}){_WORD}{_ON}"
)
_HEADER = (
    r"(?i)(?P<key>\b(?:authorization[\"']?\s{0,8}[=:]\s{0,8}[\"']?(?:[a-z]{1,16}\s{1,8})?|bearer\s{1,8}|basic\s{1,8}))"
    rf"[a-z0-9._~+/=-]{{6,}}{_ON}"
)
_COOKIE = r"(?i)(?P<key>\bcookie:\s{0,8})[^\s;]+(?:;\s{0,2}[^\s;=]{1,128}=[^\s;]*)*"
_PRIVATE_KEY = r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:(?!-----END).)*(?:-----END[A-Z ]{0,40}-----)?"
_KNOWN_TOKENS = (
    r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|gl[a-z]{1,8}-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|ATBB\w{20,}|ATCTT\w{20,}|npm_[A-Za-z0-9]{30,}|[rs]k_live_\w{16,})"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
)
_ANSI = r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
_LONG = 8
"""A secret of at least this length is not part of another word by chance."""
_READ = 4 * MAX_TEXT
"""Longer texts are cut before redaction; the result is shorter, even where much of it is redacted."""
_concealed: set[str] = set()


def conceal(secrets: Iterable[str]) -> None:
    """Hide these secrets in every text that this process shows from now on, also after their rotation."""
    _concealed.update(each for each in secrets if each)  # the empty string is in every text


def redact(text: str) -> str:
    """Replace credentials by `***`: the concealed ones, and what looks like one.

    Userinfo and query strings of URLs, tokens, headers and private keys look like credentials.
    """
    for secret in sorted(_concealed, key=len, reverse=True):  # the longest first, or its rest would be shown
        if secret in text:
            edge = "" if len(secret) >= _LONG else r"\b"
            start, end = edge if secret[0].isalnum() else "", edge if secret[-1].isalnum() else ""
            text = re.sub(f"{start}{re.escape(secret)}{end}", "***", text)
    text = re.sub(_URL_USER, "://***@", text)
    text = re.sub(_BARE_USER, "***@", text)
    text = re.sub(_URL_QUERY, lambda found: found["url"] + "?***" if found["query"] else found["url"], text)
    text = re.sub(_HEADER, r"\g<key>***", text)
    text = re.sub(_COOKIE, r"\g<key>***", text)
    text = re.sub(_SECRET_PAIR, r"\g<key>***", text)
    text = re.sub(_PRIVATE_KEY, "***", text)
    return re.sub(_KNOWN_TOKENS, "***", text)


def sentence(text: str) -> str:
    """Capitalize the first letter, unless the first word is no plain word: a path, a command."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].rstrip(",:;").isalpha() else text


def one_line(text: str, length: int = MAX_TEXT) -> str:
    """Return the text as one redacted line without control characters, at most `length` characters long."""
    cut = len(text) > _READ
    if cut:  # between words, because half of a secret is not recognised as one
        words = text[:_READ].rsplit(maxsplit=1)
        text = words[0] if len(words) > 1 else ""
    text = re.sub(_ANSI, "", text)
    # Format characters (bidirectional overrides, zero-width) can make a line read as another one.
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(redact(text).split())
    return text if len(text) <= length and not cut else f"{text[: length - 2]} …".lstrip()


def quote_fix(text: str) -> str:
    """Return the text in which no `Fix:` reads as this program's own: that of a remote is put in quotes."""
    return re.sub(r"(?i)\b(fix(?: it)?)\s*:", r"'\1':", text)


def printable(text: str) -> str:
    """Return the text without control and format characters other than line feeds and tabs.

    Every text that a page or a terminal shows goes through this function last, whoever wrote it.
    """
    if text.isprintable():
        return text
    text = re.sub(_ANSI, "", text)
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in text)


def many_lines(text: str) -> str:
    """Return the text redacted and without control characters other than line feeds, such as a traceback."""
    return printable(redact(re.sub(_ANSI, "", text))).replace("\t", " ")


def storable(text: str) -> str:
    """Return the text without what a database cannot hold: a file name may be bytes that are no text."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


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
    text: str
    """The meaning of the failure, for an editor."""
    failure_class: FailureClass

    def __new__(
        cls, value: str, text: str = "", failure_class: FailureClass = FailureClass.ENVIRONMENT
    ) -> Self:
        """Return the code with its meaning and its class."""
        code = str.__new__(cls, value)
        code._value_, code.text, code.failure_class = value, text, failure_class
        return code

    NO_PATHS = "nopaths", "none of its files may be published", FailureClass.REFUSED
    MALFORMED = "malformed", "the editor's program wrote something that is not a job", FailureClass.REFUSED
    UNREADABLE = "unreadable", "the job's file cannot be read", FailureClass.REFUSED
    UNKNOWN_TYPE = "unknown-type", "no plugin handles this type of job", FailureClass.REFUSED
    TOO_LARGE = "too-large", "one of its files is too large", FailureClass.REFUSED
    REJECTED = "rejected", "the remote does not accept this post", FailureClass.REFUSED
    CONFLICT = "conflict", "the same lines were changed on the remote", FailureClass.REFUSED
    OUTDATED = "outdated", "a newer version of the post is published already", FailureClass.REFUSED
    PLUGIN = "plugin", "a rule of the site does not allow it", FailureClass.REFUSED
    LOST_RACE = "lost-race", "other pushes kept coming first", FailureClass.TRANSIENT
    MISSING = "missing", "there is no such file, and the remote never had one", FailureClass.TRANSIENT
    UNSETTLED = "unsettled", "one of its files cannot be published yet", FailureClass.TRANSIENT
    KILLED_WORKER = "killed-worker", "the worker died while it published this post", FailureClass.TRANSIENT
    INTERNAL = "internal", "the worker has an internal error", FailureClass.TRANSIENT
    NETWORK = "network", "the remote cannot be reached"
    TIMEOUT = "timeout", "the remote does not answer in time"
    AUTH = "auth", "the remote refused the password or key"
    HOST_KEY = "host-key", "the identity of the remote could not be verified"
    REMOTE_MISSING = "remote-missing", "the remote repository was not found"
    REMOTE_REFUSED = "remote-refused", "the remote refuses every push at the moment"
    PROTECTED = "protected", "the remote's branch is protected, and the worker may not push to it"
    REMOTE_REWRITTEN = "remote-rewritten", "the remote's history was rewritten"
    DIVERGED = "diverged", "the local branch and the remote have diverged"
    WRONG_BRANCH = "wrong-branch", "another branch is checked out on the server"
    UNFINISHED = "unfinished-operation", "a merge or rebase is unfinished on the server"
    LOCKED = "locked", "another program keeps the site's repository locked"
    CORRUPT = "corrupt", "the site's repository is corrupted"
    OWNERSHIP = "ownership", "the site's files belong to another user"
    SIGNING = "signing", "the commits cannot be signed"
    NOT_A_REPOSITORY = "not-a-repository", "the site's folder is not a repository"
    DISK = "disk", "the server's disk is full or failing"
    PLUGIN_BROKEN = "plugin-broken", "a plugin of the site failed"
    GIT_MISSING = "git-missing", "git is missing on the server"


def failure_text(failure: str | None) -> str:
    """Return what a failure code means; empty for an unknown one."""
    return next((code.text for code in FailureCode if code == failure), "")


def is_environment(code: str | None) -> bool:
    """Return True if a job file's `failure` names an environment failure."""
    return code in _ENVIRONMENT


def is_hurried(code: str | None) -> bool:
    """Return True if a retry is due at once when a push succeeds. A time-out may be one slow post's own."""
    return is_environment(code) and code != FailureCode.TIMEOUT.value


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
    is_in_the_way = error.errno in {errno.ELOOP, errno.ENOTDIR, errno.EISDIR}
    return "remove it" if is_in_the_way else OS_FIXES.get(error.errno or 0, "")


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


class FixableError(Exception):
    """Report one line to the user, with the fix apart."""

    def __init__(self, message: str, fix: str = "") -> None:
        self.message = one_line(message)
        self.fix = one_line(fix)
        super().__init__(self.message)


class PublishError(FixableError):
    """Report the failure of a publication."""

    def __init__(self, code: FailureCode, message: str, fix: str = "") -> None:
        self.code = code
        self.failure = Failure(code, message, fix)
        super().__init__(message, fix)

    @classmethod
    def from_os(cls, what_failed: str, error: OSError) -> PublishError:
        """Return the environment failure for an error of the operating system."""
        return cls(FailureCode.DISK, f"{what_failed}: {os_error_text(error)}", os_error_fix(error))


class PushRejectedError(PublishError):
    """Report a push that the remote refused in words of its own, such as a hook's.

    The words decide nothing: whether a post or the site is at fault shows in which pushes are refused.
    """

    def __init__(self, message: str, fix: str, condition: Failure, *, is_known: bool) -> None:
        self.condition = condition
        """The failure where every post is refused like this."""
        self.is_known = is_known
        """The words are a git host's, known to concern every post."""
        super().__init__(FailureCode.REJECTED, message, fix)


class SlowBatchError(PublishError):
    """Report a time-out that one post of the batch may have caused: a smaller batch may pass."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code, failure.message, failure.fix)


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


class UnavailableError(OSError):
    """The store of the jobs (Postgres) cannot be reached, so nothing can be decided about any job."""

    fix = ""


class NodeFailureError(UnavailableError):
    """The machine cannot publish any post, whichever it is: nothing is decided about the posts at hand."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        self.fix = failure.fix
        super().__init__(failure.message)


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
        case FixableError():
            return error.message, error.fix
        case OSError():
            fix = getattr(error, "fix", "") or os_error_fix(error)
            return os_error_text(error) or type(error).__name__, fix
        case _:
            return one_line(f"{type(error).__name__}: {error}"), ""
