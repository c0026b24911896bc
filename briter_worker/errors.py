"""Failures, sorted once by what they mean for a job.

Every failure has a *word* from a closed set (the job file's `failure`), and every word belongs to one
of three classes. Nothing else in the code decides what a failure means.
"""

from __future__ import annotations

import re
from enum import Enum, StrEnum

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

    LOST_RACE = "lost-race"
    BUSY = "busy"
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
    }
)
_TRANSIENT = frozenset(
    {
        Failure.LOST_RACE,
        Failure.BUSY,
        Failure.UNSETTLED,
        Failure.KILLED_WORKER,
        Failure.INTERNAL,
    }
)


class PublishError(Exception):
    """A publication failed, with the word for programs and the sentence for a person.

    The sentence says what happened, where, and what to do; it is safe to show: no credentials, no control
    characters, at most `MAX_TEXT` characters.
    """

    def __init__(self, failure: Failure, text: str) -> None:
        self.failure = failure
        self.text = for_people(text)
        super().__init__(self.text)


class Stopped(Exception):  # noqa: N818 - not an error: the operator asked for it
    """The worker was told to stop, and the work was given up before its commit point."""


class UsageError(Exception):
    """The command or its configuration cannot be used as given: exit 2, one line."""


# Credentials as they occur in URLs and in what git prints of them. `user:password@`, `token@`, and the
# query strings and headers in which hosts put tokens. An scp-style `git@host:path` carries no secret.
_USERINFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]*(?:@[^\s/@'\"]*)*@")
_SECRET_PAIR = re.compile(
    r"(?P<key>\b(?:[\w-]*(?:token|secret|password|passwd|signature|credential|apikey|api_key|api-key|auth|sig)"
    r"|key|pwd|pass)\s*[=:]\s*)(?P<quote>[\"']?)[^\s&;,\"']+",
    re.IGNORECASE,
)
_AUTH_HEADER = re.compile(r"(?P<key>\b(?:Bearer|Basic)\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_QUERY = re.compile(r"(?P<url>[a-zA-Z][a-zA-Z0-9+.-]*://[^\s?'\"]*)\?[^\s'\"]*")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_KNOWN_TOKENS = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,})"
)


def redacted(text: str) -> str:
    """`text` without credentials: userinfo and query strings of URLs, tokens, authorization headers."""
    text = _USERINFO.sub(r"\g<scheme>***@", text)
    text = _QUERY.sub(r"\g<url>?***", text)
    text = _AUTH_HEADER.sub(r"\g<key>***", text)
    text = _SECRET_PAIR.sub(r"\g<key>***", text)
    return _KNOWN_TOKENS.sub("***", text)


def for_people(text: str) -> str:
    """One line that may be shown anywhere: redacted, without control characters, of bounded length."""
    text = _ANSI.sub("", text)
    # Format characters (bidirectional overrides, zero-width) can make a line read as another one.
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(redacted(text).split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
