"""One save of an editor, a transfer program or a CMS is at most one job, with the whole text of the file."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from edits import PATTERNS
from sites import eventually
from watching import watching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edits import Pattern
    from sites import Site
    from watching import Watching

_TEXTS = [f"# Save {number}\n\n{'word ' * 40}\n" for number in range(3)]


@pytest.fixture(params=["owner", "other user"])
def user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user than the file's owner, the kernel does not say who has it open."""
    if request.param == "other user":
        monkeypatch.setattr("briter_worker.watch.tree.is_open_for_writing", lambda _: None)


def _save(watched: Watching, pattern: Pattern, path: str, text: str) -> None:
    steps: Iterator[float] = pattern(watched.site.worktree / path, text)
    for seconds in steps:
        watched.wait(seconds)


def _check(watched: Watching, slug: str, path: str, texts: list[str]) -> None:
    """At most one job a save, each with a whole text, the last text last, and no job for anything else."""
    assert {each for each, _ in watched.saved} == {slug}
    seen = [files[path] for _, files in watched.saved]
    assert set(seen) <= set(texts)
    assert len(seen) <= len(texts)
    assert seen[-1] == texts[-1]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("user")
def test_each_save_of_a_post_is_one_job(site: Site, name: str) -> None:
    path = "content/posts/welcome.md"
    with watching(site) as watched:
        for text in _TEXTS:
            _save(watched, PATTERNS[name], path, text)
            watched.wait(3)
        watched.settle()
        _check(watched, "posts/welcome", path, _TEXTS)
        assert len(watched.saved) == len(_TEXTS)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("user")
def test_saves_in_a_hurry_are_no_half_files(site: Site, name: str) -> None:
    path = "content/posts/welcome.md"
    texts = [f"# Autosave {number}\n\n{'word ' * 40}\n" for number in range(8)]
    with watching(site) as watched:
        for text in texts:
            _save(watched, PATTERNS[name], path, text)
            watched.wait(0.09)
        watched.settle()
        _check(watched, "posts/welcome", path, texts)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("user")
def test_the_first_file_of_a_new_folder_is_one_job(site: Site, name: str) -> None:
    folder = "content/posts/new"
    with watching(site) as watched:
        (site.worktree / folder).mkdir()
        if name == "renamed before its end":
            watched.wait(0.01)  # to another user, only events tell that
        _save(watched, PATTERNS[name], f"{folder}/index.md", _TEXTS[0])
        watched.settle()
        _check(watched, "posts/new", f"{folder}/index.md", _TEXTS[:1])


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sees_events", [True, False])
def test_a_save_under_way_at_the_start_is_one_job(site: Site, name: str, *, sees_events: bool) -> None:
    path = "content/posts/welcome.md"
    steps = PATTERNS[name](site.worktree / path, _TEXTS[0])
    next(steps)
    with watching(site, sees_events=sees_events) as watched:
        # `settle` lets 15 s pass: whatever is complete by then may be read.
        for seconds in steps:
            watched.wait(seconds)
        watched.settle()
        watched.settle()
        seen = [files.get(path) for slug, files in watched.saved if slug == "posts/welcome"]
        assert seen[-1] == _TEXTS[0]
        assert not {text for text in seen if text and text != _TEXTS[0]}


def test_a_save_is_read_at_most_three_tenths_of_a_second_after_it_was_closed(site: Site) -> None:
    with watching(site) as watched:
        for text in _TEXTS:
            site.write_post("content/posts/welcome.md", text)
            watched.wait(0.03)
            assert watched.saved[-1][1] == {"content/posts/welcome.md": text}
        count = len(watched.saved)
        for number in range(30):  # without a pause of 10 ms
            site.write_post("content/posts/welcome.md", f"{number}\n")
            watched.wait(0.01)
        assert len(watched.saved) > count


def test_a_program_that_keeps_a_file_open_is_named(site: Site) -> None:
    file = site.worktree / "content/posts/welcome.md"
    with watching(site) as watched, file.open("a") as out:
        out.write("and more\n")
        out.flush()
        watched.wait(100)
        assert watched.saved == []
        assert len([text for text in watched.warnings if "open for writing" in text]) == 1
        out.close()
        assert watched.settle() == ["posts/welcome"]


def test_a_file_that_another_program_opened_after_the_save_is_read(site: Site) -> None:
    file = site.worktree / "content/posts/welcome.md"
    with watching(site) as watched:
        file.write_text("saved\n")
        with file.open("a"):  # a program that keeps it open, and writes nothing
            assert watched.settle() == ["posts/welcome"]


def test_a_changed_mode_is_a_save(site: Site) -> None:
    with watching(site) as watched:
        (site.worktree / "content/posts/welcome.md").chmod(0o744)
        assert watched.settle() == ["posts/welcome"]
        site.git("config", "core.fileMode", "false")
    with watching(site) as watched:
        (site.worktree / "content/posts/welcome.md").chmod(0o644)
        assert watched.settle() == []


def test_the_worker_reads_no_half_file_of_the_next_save(site: Site) -> None:
    file = site.worktree / "content/posts/welcome.md"
    with watching(site) as watched:
        file.write_text("first\n")
        watched.settle()
        is_complete = threading.Event()

        def upload() -> None:
            with file.open("w") as out:
                while not is_complete.wait(0.1):
                    out.write("half ")
                    out.flush()
                out.write("and the end\n")

        uploading = threading.Thread(target=upload)
        uploading.start()
        eventually(lambda: file.read_text() not in {"", "first\n"})
        result = site.run_once()
        is_complete.set()
        uploading.join()
        (failed,) = result.of("failed")
        assert failed["failure"] == "unsettled"
        watched.settle()
        assert site.run_once().of("published")
    assert str(site.remote_file("content/posts/welcome.md")).endswith("and the end\n")
    assert len(site.remote_log()) == 2


def test_the_worker_does_not_remove_a_post_in_the_middle_of_the_next_save(site: Site) -> None:
    file = site.worktree / "content/posts/welcome.md"
    with watching(site) as watched:
        file.write_text("first\n")
        watched.settle()
        file.unlink()
        later = threading.Timer(0.6, lambda: file.write_text("second\n"))
        later.start()
        assert site.run_once().of("published")
        later.join()
    assert site.remote_file("content/posts/welcome.md") == "second\n"


def test_the_worker_reads_a_file_that_a_program_only_keeps_open(site: Site) -> None:
    file = site.worktree / "content/posts/welcome.md"
    with watching(site) as watched:
        file.write_text("first\n")
        os.utime(file, (1e9, 1e9))
        watched.settle()
        with file.open("a"):
            assert site.run_once().of("published")
