"""JSON as job files have it: read strictly, and written back as it was."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_BYTES = 1 << 20
"""A job file larger than this is not read, unless the worker has written it."""
MAX_REWRITTEN = 16 << 20
"""What the worker writes anew grows: by its own keys, by the paths of older saves. That makes no job bad."""
_REWRITTEN = b'"updatedAt"'
MAX_DEPTH = 64
_QUOTED = 80

Document = dict[str, Any]
"""A job file as its writer wrote it."""


class UnreadableJobError(Exception):
    """The bytes are no JSON document (yet): a writer may still be writing them."""


class MalformedJobError(Exception):
    """The bytes are JSON, but not a job. `document` is what could be read of them, if it was an object."""

    def __init__(self, reason: str, document: Document | None = None) -> None:
        self.reason = reason
        self.document = document
        super().__init__(reason)


def quoted(text: str) -> str:
    """The text as a message quotes it: of a long one its first words, and how long it is.

    Never half a word: of that it cannot be told whether it is half a secret.
    """
    if len(text) <= _QUOTED:
        return repr(text)
    words = text[:_QUOTED].rsplit(maxsplit=1)
    beginning = words[0] if len(words) > 1 else ""
    return f"{f'{beginning}…'!r} ({len(text)} characters)"


def read_document(data: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """The JSON value of a job file, read strictly.

    Raises:
        UnreadableJobError: it is not JSON (torn, empty, no UTF-8).
        MalformedJobError: it is, but not as a careful writer writes it (a key twice, NaN, NUL, …).
    """
    if len(data) > (MAX_REWRITTEN if _REWRITTEN in data else MAX_BYTES):
        raise MalformedJobError(f"the file has {len(data)} bytes; a job file has at most {MAX_BYTES}")
    try:
        text = data.decode("utf-8-sig")
        value = _DECODER.decode(text)
    except RecursionError:
        raise MalformedJobError("the JSON is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UnreadableJobError(f"not valid JSON: {error}") from None
    if _depth(text) > MAX_DEPTH:
        raise MalformedJobError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
    if "\\u" in text and _SUSPECT.search(text):
        try:
            flat = json.dumps(value, ensure_ascii=False)
            flat.encode()
        except UnicodeEncodeError:
            raise MalformedJobError("a text has half of a surrogate pair in it") from None
        if has_nul(flat):
            raise MalformedJobError("a text has a NUL character in it")
    return value


_SUSPECT = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")
# Not the six characters of the escape themselves, of which the backslash is escaped.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def has_nul(text: str) -> bool:
    """Whether JSON, as Python writes it, has a NUL character in one of its texts."""
    return "\\u0000" in text and _NUL.search(text) is not None


def _depth(text: str) -> int:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for c in _STRINGS.sub("", text):
        if c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    return deepest


def _no_twice(pairs: list[tuple[str, Any]]) -> Document:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in {k for k, _ in pairs[:i]})
        raise MalformedJobError(f"the key {quoted(twice)} occurs twice")
    return document


def _no_constant(text: str) -> float:
    raise MalformedJobError(f"{text} is not JSON")


class Number(float):
    """A number that keeps its spelling: what the worker does not know it must not round."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> Number:  # noqa: PYI034 - not meant to be subclassed
        """The number that `text` spells."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


_LONG = 300


def _whole(text: str) -> int | Number:
    # Python refuses to read very long ones, as that is slow.
    return int(text) if len(text) < _LONG else Number(text)


# One for all files: to make it takes as long as to read a job with it.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_no_twice, parse_constant=_no_constant, parse_float=Number, parse_int=_whole
)
_SPELLED = re.compile(r'"\\u0000(\d+)"')


def encode(document: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A job file's bytes: readable, the same for the same document, numbers as their writer spelled them.

    What a terminal might obey is an escape of the same value, as far as there is room.
    """
    spellings: list[str] = []

    def marked(value: Any) -> Any:  # noqa: ANN401 - any JSON value
        if isinstance(value, Number):
            spellings.append(value.text)
            return f"\0{len(spellings) - 1}"  # no text of a job has a NUL in it
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list) else value

    plain = marked(document)

    def spelled(text: str) -> str:
        return _SPELLED.sub(lambda found: spellings[int(found.group(1))], text) + "\n"

    readable = visible(spelled(json.dumps(plain, ensure_ascii=False, indent=2))).encode()
    if len(readable) <= MAX_BYTES:
        return readable
    short = spelled(json.dumps(plain, ensure_ascii=False, separators=(",", ":")))
    seen = visible(short).encode()
    return seen if len(seen) <= MAX_BYTES else short.encode()


def visible(text: str) -> str:
    """The same JSON, with an escape in place of each character that is no visible one."""
    if text.replace("\n", "").isprintable():
        return text
    text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    return text.replace("\x7f", "\\u007f")
