"""Remove secrets and control characters from text before anybody sees it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def many_lines(text: str) -> str:
    """Return the text redacted and without control characters other than line feeds, such as a traceback."""
    text = redact(re.sub(_ANSI, "", text))
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def storable(text: str) -> str:
    """Return the text without what a database cannot hold: a file name may be bytes that are no text."""
    if text.isascii() and "\0" not in text:
        return text
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
