"""The commands that programs give, read without typer: cron and a CMS would wait for it longer than for them.

Only plain spellings are recognised here; whatever else a command line says, help and mistakes included, is
typer's to read. Typer takes the names of options from here, and a test has both read the same lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

JSON = "--json"
ONCE = "--once"
MESSAGE = ("--message", "-m")
AT = ("--at",)
AUTHOR = ("--author",)
SITE = "--site"
ROOT = "--root"
_TEXTS = {
    **dict.fromkeys(MESSAGE, "message"),
    **dict.fromkeys(AT, "at"),
    **dict.fromkeys(AUTHOR, "author"),
    SITE: "site",
    ROOT: "root",
}


class Run(NamedTuple):
    """`run`."""

    once: bool


class Enqueue(NamedTuple):
    """`enqueue`."""

    slug: str
    paths: Sequence[str]
    message: str | None = None
    at: str | None = None
    author: str | None = None
    as_json: bool = False
    site: str | None = None
    root: str | None = None


def read(argv: Sequence[str]) -> Run | Enqueue | None:
    """What the command line asks for; None when that is for typer to say."""
    match argv:
        case ["run"]:
            return Run(once=False)
        case ["run", word] if word == ONCE:
            return Run(once=True)
        case ["enqueue", *rest]:
            return _enqueue(rest)
        case _:
            return None


def _enqueue(words: Sequence[str]) -> Enqueue | None:
    plain: list[str] = []
    texts: dict[str, str] = {}
    as_json = False
    left = iter(words)
    for word in left:
        if word == JSON:
            as_json = True
        elif word in _TEXTS:
            text = next(left, "-")
            if text.startswith("-"):
                return None
            texts[_TEXTS[word]] = text
        elif word.startswith("-"):
            return None
        else:
            plain.append(word)
    if len(plain) < 2:  # noqa: PLR2004 - a slug and a path
        return None
    return Enqueue(plain[0], plain[1:], as_json=as_json, **texts)
