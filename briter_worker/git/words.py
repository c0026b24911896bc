"""Reads git's output: whose words they are, and what they say without the names in them.

Names (URLs, paths, hosts) are taken out: a site called policy-site, or a post about timeouts, is not what
went wrong.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from briter_worker.errors import for_people

if TYPE_CHECKING:
    from collections.abc import Sequence

_READ = 16_000
"""So much is read of the beginning of git's words, and of their end, where it says what was fatal."""
_REMOTE_LINE = re.compile(
    r"(?:remote:|(?:fatal: |error: )?remote (?:error|unpack failed):)[ \t]*(.*)", re.IGNORECASE
)
_SHOWN = 1_500
"""So many characters of them a person gets to read: what to do about it has to come after."""
_QUOTED = re.compile(r"(?<!\w)(['\"])([^'\"\n]*)\1")
_NO_NAMES = frozenset({"input/output", "ssl/tls", "tls/ssl"})


def bounded(text: str) -> str:
    """The beginning and the end of a text that is too long to be read.

    Whole words of the beginning, whole lines of the end: half a secret would not be known for one.
    """
    if len(text) <= 2 * _READ:
        return text
    head, tail = text[:_READ], text[-_READ:]
    head = head[: max(head.rfind(" "), head.rfind("\n")) + 1]
    _, _, whole = tail.partition("\n")
    return f"{head}\n{whole}"


def remote_words(text: str) -> str:
    """What the remote itself said."""
    found = (_REMOTE_LINE.match(line) for line in re.split(r"[\r\n]+", text))
    words = dict.fromkeys(each[1].strip() for each in found if each)
    return shown([each for each in words if each], between=" ")


def voices(text: str) -> tuple[str, str]:
    """What git said here, and what the remote said, without the names that either mentions."""
    here: list[str] = []
    there: list[str] = []
    for line in re.split(r"[\r\n]+", text):
        remote = _REMOTE_LINE.match(line)
        if remote:
            there.append(nameless(remote[1]))
        elif not line.startswith(("hint:", "To ")):
            here.append(nameless(line))
    return "\n".join(here), "\n".join(there)


def nameless(line: str) -> str:
    """The line with every quoted name, URL, path and host as `…`; of a lock file, `….lock` is left."""
    line = _QUOTED.sub(lambda found: f"{found[1]}{_hidden(found[2])}{found[1]}", line)
    return re.sub(r"\S+", lambda found: _word(found[0]), line)


def _word(word: str) -> str:
    core = word.strip(".,:;!?()[]'\"")
    if core.lower() in _NO_NAMES or not ("/" in core or "." in core or "\\" in core):
        return word
    before, _, after = word.partition(core)
    return f"{before}{_hidden(core)}{after}"


def _hidden(name: str) -> str:
    return "….lock" if name.endswith(".lock") else "…"


def essence(text: str) -> str:
    """Git's words without its labels, hints and progress."""
    lines = [line.strip(" \t@") for line in re.split(r"[\r\n]+", text)]
    kept = [
        re.sub(r"^(?:fatal|error): ", "", line).rstrip(".")
        for line in lines
        if line and not line.startswith(("hint:", "To ", "Everything up-to-date"))
    ]
    return shown(list(dict.fromkeys(kept)))


def shown(lines: Sequence[str], *, between: str = "; ") -> str:
    """The lines as one that may be shown: its beginning, if it is too long, and what git said last of all.

    Cut only after it was redacted: of half a secret nobody can tell what it is.
    """
    text = for_people(between.join(lines)).rstrip(".")
    if len(text) <= _SHOWN and not text.endswith("…"):
        return text
    text = text.removesuffix("…")[:_SHOWN].rstrip()
    last = for_people(lines[-1]) if not _REMOTE_LINE.match(lines[-1]) else ""
    return f"{text} …" if len(last) > _SHOWN // 5 else f"{text} … {last}".rstrip()
