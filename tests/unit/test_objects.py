"""Reading objects: all of it, or a failure."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from briter_worker.errors import Failure, PublishError
from briter_worker.git.objects import Objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

SHA = "1" * 40


class Saying:
    """In git's place: a process that says this much, and ends."""

    def __init__(self, text: str) -> None:
        self._text = text

    def spawn(self, _args: object, *, feed: bool) -> subprocess.Popen[bytes]:
        assert feed
        return subprocess.Popen(
            ["sh", "-c", f"read name; printf '{self._text}'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def awaiting(self, _process: object) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def watched(self, process: subprocess.Popen[bytes], _name: str) -> Iterator[None]:
        with process:
            yield


def objects(text: str) -> Objects:
    saying: Any = Saying(text)
    return Objects(saying)


def test_an_object_is_read_to_its_end() -> None:
    with objects(rf"{SHA} blob 3\nabc\n") as reading:
        assert reading.read("x") == ("blob", b"abc")


def test_an_object_that_is_not_there_is_none() -> None:
    with objects(r"x missing\n") as reading:
        assert reading.read("x") is None


@pytest.mark.parametrize(
    "text", ["", SHA, rf"{SHA} blob 3", rf"{SHA} blob 3\n", rf"{SHA} blob 3\nab", rf"{SHA} blob 3\nabc"]
)
def test_what_was_cut_off_is_never_taken_for_the_content(text: str) -> None:
    with pytest.raises(PublishError) as failed:
        objects(text).read("x")
    assert failed.value.failure is Failure.CORRUPT
