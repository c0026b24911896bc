"""Failures, sorted once by what they mean for a job.

Every failure has a *word* from a closed set (the job file's `failure`), and every word belongs to one
of three classes. Nothing else in the code decides what a failure means.
"""

from __future__ import annotations

import errno
import re
import threading
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_TEXT = 2_000
"""The most characters `lastError` may have."""


class Kind(Enum):
    """What a failure means for its job."""

    REFUSED = "refused"
    """This job will never succeed as it is: dead-lettered at once."""
    TRANSIENT = "transient"
    """This batch was unlucky: backoff, attempt counted, dead-lettered at the maximum."""
    ENVIRONMENT = "environment"
    """No post of the site could be published: as transient, and revived when a push succeeds again."""


class Failure(StrEnum):
    """Why a job failed: the closed set of words that programs may rely on."""

    NO_PATHS = "nopaths"
    MALFORMED = "malformed"
    UNREADABLE = "unreadable"
    UNKNOWN_TYPE = "unknown-type"
    TOO_LARGE = "too-large"
    REJECTED = "rejected"
    CONFLICT = "conflict"
    PLUGIN = "plugin"

    LOST_RACE = "lost-race"
    UNSETTLED = "unsettled"
    KILLED_WORKER = "killed-worker"
    INTERNAL = "internal"

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
    NOT_A_REPOSITORY = "not-a-repository"
    DISK = "disk"
    PLUGIN_BROKEN = "plugin-broken"
    GIT_MISSING = "git-missing"

    @property
    def kind(self) -> Kind:
        """The class this word belongs to."""
        if self in _REFUSED:
            return Kind.REFUSED
        return Kind.TRANSIENT if self in _TRANSIENT else Kind.ENVIRONMENT


_REFUSED = frozenset(
    {
        Failure.NO_PATHS,
        Failure.MALFORMED,
        Failure.UNREADABLE,
        Failure.UNKNOWN_TYPE,
        Failure.TOO_LARGE,
        Failure.REJECTED,
        Failure.CONFLICT,
        Failure.PLUGIN,
    }
)
_TRANSIENT = frozenset(
    {
        Failure.LOST_RACE,
        Failure.UNSETTLED,
        Failure.KILLED_WORKER,
        Failure.INTERNAL,
    }
)


DISK_REMEDIES = {
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
}
"""What a person can do about errors of the operating system that any post would meet."""


def explained(error: OSError, *, where: bool = True) -> str:
    """What the operating system refused, `where`, and what to do about it."""
    place = f" ({error.filename})" if where and error.filename else ""
    remedy = DISK_REMEDIES.get(error.errno or 0)
    return f"{error.strerror or error}{place}" + (f". Fix: {remedy}" if remedy else "")


class PublishError(Exception):
    """A publication failed, with the word for programs and the sentence for a person.

    The sentence says what happened, where, and what to do; it is safe to show: no credentials, no control
    characters, at most `MAX_TEXT` characters.
    """

    def __init__(self, failure: Failure, text: str) -> None:
        self.failure = failure
        self.text = for_people(text)
        super().__init__(self.text)


class RefusedError(PublishError):
    """A plugin does not let this job be published as it is; the text says why, and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(Failure.PLUGIN, text)


class SnoozedError(Exception):
    """A plugin wants this job tried again at a later time; that costs it no attempt."""

    def __init__(self, until: float, text: str) -> None:
        self.until = float(until)  # a mistake is the plugin's, and is made where the plugin can be seen
        self.text = for_people(text)
        super().__init__(self.text)


class Stopped(Exception):  # noqa: N818 - not an error: the operator asked for it
    """The worker was told to stop, and the work was given up; only the remote knows what a push did."""


class Loss(StrEnum):
    """How a worker came to lose its site."""

    TAKEN = "taken"
    """Another one has it."""
    DONE = "done"
    """What it had in hand was settled by another."""
    MISSING = "missing"
    """There is no such site any more."""
    ERROR = "error"
    """It cannot be found out whether it still has it."""


_LOCK_FILE = (
    "the worker's lock file was removed or replaced while it ran, so another worker may have "
    "the site now; this one ends. Fix: start it again, and leave worker.lock alone"
)


class LockLostError(Exception):
    """The site is not this worker's any more. Nothing was pushed; the work on it has to end."""

    def __init__(self, reason: Loss = Loss.TAKEN, text: str = _LOCK_FILE) -> None:
        self.reason = reason
        super().__init__(for_people(text))


class AwayError(OSError):
    """What keeps the jobs cannot be asked now, so that nothing can be decided about any of them."""


class UsageError(Exception):
    """The command or its configuration cannot be used as given: exit 2, one line."""


# Credentials as they occur in URLs and in what git prints of them. An scp-style `git@host:path` carries no
# secret. The words are a remote's or a job's, so each pattern has to take linear time: none begins with an
# open repetition, and each repetition that may fail in the end is bounded. They are texts, which `re`
# compiles when they are first used, and keeps: most runs have nothing to redact.
_URL_USER = r"://[^\s/'\"]*@|://[^\s/:@'\"]{1,256}:(?!\d{1,5}/)[^\s@'\"]{0,256}@"
"""Up to the last @ before the path; or, in a password that was not encoded, behind a slash."""
_BARE_USER = r"(?<![\w.%+-])[\w.%+-]{1,128}:[^\s/:@'\"]{1,256}@(?=\w)"
_URL_QUERY = r"(?P<url>://[^\s?'\"]*)(?P<query>\?[^\s'\"]*)?"
_WORD = r"(?:\"[^\"]*(?:\"|\Z)|'[^']*(?:'|\Z)|[^\s&;\"']+)"
_ON = rf"(?:(?:(?<=[=:])|[\"']?\s{{0,8}}[=:])\s{{0,8}}{_WORD})*"
"""What looks like a value may be another key: then its value is behind it."""
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
"""So long a secret is no part of another word by chance."""
_READ = 4 * MAX_TEXT
"""More than this is not looked at: what is shown is shorter, even where much of it is redacted."""


_concealed: tuple[str, ...] = ()
_concealing = threading.Lock()
"""A cluster's worker opens many sites at once."""


def conceal(secrets: Iterable[str]) -> None:
    """From now on, no text of this process shows these; also when they have been replaced by others."""
    global _concealed  # noqa: PLW0603 - whoever shows something need not be told whose secrets there are
    with _concealing:
        known = {*_concealed, *filter(None, secrets)}  # nothing at all is in every text
        if len(known) > len(_concealed):
            _concealed = tuple(sorted(known, key=len, reverse=True))


def redacted(text: str) -> str:
    """`text` without credentials: what is known for one, and what looks like one.

    The latter are the userinfo and query strings of URLs, tokens, headers, private keys.
    """
    for secret in _concealed:
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


def for_people(text: str, length: int = MAX_TEXT) -> str:
    """One line that may be shown anywhere: redacted, without control characters, of bounded length."""
    cut = len(text) > _READ
    text = re.sub(_ANSI, "", _beginning(text) if cut else text)
    # Format characters (bidirectional overrides, zero-width) can make a line read as another one.
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(redacted(text).split())
    return text if len(text) <= length and not cut else f"{text[: length - 2]} …".lstrip()


def paragraphs(text: str) -> str:
    """As `for_people`, of any length, with its lines: a traceback, for whoever asked for it."""
    text = redacted(re.sub(_ANSI, "", text))
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def _beginning(text: str) -> str:
    """Whole words only: of half a word it cannot be told whether it is half a secret."""
    words = text[:_READ].rsplit(maxsplit=1)
    return words[0] if len(words) > 1 else ""
