"""Reading objects: all of it, or a failure."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sites import eventually

from briter_worker.errors import Failure, PublishError
from briter_worker.git.command import Commands
from briter_worker.git.objects import MissingError, Objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from sites import Site

SHA = "1" * 40


class Saying:
    """In git's place: a process that says this much, and ends."""

    def __init__(self, text: str, error: str = "") -> None:
        self._text = text
        self._error = error
        self.watch = self

    def spawn(self, _args: object, *, feed: bool) -> subprocess.Popen[bytes]:
        assert feed
        return subprocess.Popen(
            ["sh", "-c", f"read name; printf '{self._text}'; printf '{self._error}' >&2"],
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


@pytest.mark.parametrize("words", ["upload-pack: not our ref", "nothing that anybody knows"])
def test_what_its_remote_has_not_either_is_missing_and_no_trouble_of_the_networks(words: str) -> None:
    error = f"fatal: could not fetch {SHA} from promisor remote: {words}"
    saying: Any = Saying("", error)
    with pytest.raises(MissingError):
        Objects(saying).read(SHA)


def test_a_reader_that_was_killed_is_told_and_replaced(site: Site) -> None:
    git = Commands(site.worktree, remote="origin", timeout=30)
    with Objects(git) as reading:
        assert reading.read("HEAD")
        (pid,) = git.watch.running()
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(PublishError) as failed:
            reading.read("HEAD")
        assert failed.value.failure is Failure.CORRUPT
        assert reading.read("HEAD")
    git.watch.close()
