"""A line that is slow, a post that needs longer than all others, and a remote that talks without end."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest
from outcomes import LAST, assert_published, assert_put_off, assert_sound, save
from remotes import HOST, git_daemon, http_remote, left_over, slow_line, sshd
from sites import eventually, program

from briter_worker.errors import FailureCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from remotes import Line
    from sites import Site

LIMIT = {"BRITER_GIT_TIMEOUT_MS": "2000"}


class Connect(Protocol):
    """Leads the site's remote over a slow line."""

    def __call__(self, how: str, *, up: float = 1e9, down: float = 1e9) -> Line: ...


@pytest.fixture
def connect(site: Site) -> Iterator[Connect]:
    with ExitStack() as stack:

        def lead(how: str, *, up: float = 1e9, down: float = 1e9) -> Line:
            if how == "git":
                address = stack.enter_context(git_daemon(site.root, "--enable=receive-pack"))
                line = stack.enter_context(slow_line(int(address.rpartition(":")[2]), up=up, down=down))
                url = f"git://{HOST}:{line.port}/{site.remote.name}"
            elif how == "ssh":
                host = stack.enter_context(sshd(site.root / "sshd"))
                line = stack.enter_context(slow_line(host.port, up=up, down=down))
                host.port = line.port
                host.introduce()
                site.git("config", "core.sshCommand", host.command)
                url = host.url(site.remote)
            else:
                http = stack.enter_context(http_remote(site.root))
                line = stack.enter_context(slow_line(http.port, up=up, down=down))
                http.port = line.port
                url = http.url(site.remote)
            site.git("remote", "set-url", "origin", url)
            return line

        yield lead


def save_large(site: Site, slug: str, size: int) -> None:
    """Save a post that no compression makes smaller."""
    file = site.worktree / f"content/posts/{slug}.md"
    site.save_post(slug, "")
    file.write_bytes(os.urandom(size))


@pytest.mark.parametrize(("how", "rate"), [("git", 200_000), ("ssh", 200_000), ("http", 120_000)])
def test_a_transfer_that_progresses_may_take_longer_than_the_limit(
    site: Site, connect: Connect, how: str, rate: float
) -> None:
    """Over HTTP, git hands curl all of a small pack at once: only the socket shows the progress."""
    connect(how, up=rate)
    save(site, "a")
    save_large(site, "video", 700_000)
    result = site.run_once(**LIMIT, **LAST)
    assert_published(site, result, "a", "video")
    assert result.of("published")[0]["durationMs"] > 2_500


@pytest.mark.parametrize("how", ["git", "http"])
def test_a_large_push_of_somebody_else_may_take_longer_to_fetch_than_the_limit(
    site: Site, connect: Connect, how: str
) -> None:
    save(site, "a")
    site.run_once()
    clone = site.colleague()
    (clone / "video.bin").write_bytes(os.urandom(700_000))
    site.push_elsewhere()
    connect(how, down=200_000)
    save(site, "b")
    result = site.run_once(**LIMIT, **LAST)
    assert_published(site, result, "b")


def test_a_post_that_needs_longer_than_all_others_stops_none_of_them(site: Site, connect: Connect) -> None:
    connect("git", up=400_000)
    save(site, "a")
    save_large(site, "video", 3_000_000)
    result = site.run_once(**LIMIT, BRITER_GIT_TRANSFER_TIMEOUT_MS="3000")
    assert_published(site, result, "a")
    assert "did not end within 3 s" in assert_put_off(site, result, FailureCode.TIMEOUT, slug="video")
    assert site.job("video")["fix"].startswith("the post video: ")
    assert "BRITER_GIT_TRANSFER_TIMEOUT_MS" in site.job("video")["fix"]
    eventually(lambda: not left_over(site.worktree))
    save(site, "d")
    assert_published(site, site.run_once(), "d")
    assert site.job("video")["nextAttemptAt"], "a push of another post proves nothing of this one"


def test_a_filter_that_hangs_for_one_post_stops_no_other(site: Site) -> None:
    hang = program(site.root / "hang", 'text=$(cat); case "$text" in *HANG*) sleep 60;; esac; echo "$text"')
    site.git("config", "filter.slow.clean", str(hang))
    site.write_post(".gitattributes", "*.md filter=slow\n")
    save(site, "a", "c")
    site.write_post("content/posts/c.md", "HANG\n")
    result = site.run_once(**LIMIT)
    assert_published(site, result, "a")
    assert_put_off(site, result, FailureCode.TIMEOUT, slug="c")
    assert "the post c: check the filters" in site.job("c")["fix"]


def test_a_line_that_goes_dead_costs_one_push_however_many_posts_wait(site: Site, connect: Connect) -> None:
    line = connect("git", up=400_000)
    save(site, "first")
    site.run_once()
    slugs = [f"post-{number}" for number in range(20)]
    save(site, *slugs)
    save_large(site, "video", 400_000)
    line.cut_after, line.opened = line.passed + 100_000, 0
    site.run_once(**LIMIT)
    assert line.opened <= 3, "one push, and the question what became of it"
    line.cut_after = math.inf
    assert_published(site, site.run_once(), *slugs, "video")
    assert_sound(site)


@pytest.mark.parametrize("words", ["remote: and more", "Resolving deltas: 100% (1/1), done."])
def test_a_remote_that_talks_without_end_is_ended_at_the_limit(site: Site, words: str) -> None:
    site.hook(f"yes '{words}' >&2")
    save(site, "a")
    result = site.run_once(**LIMIT)
    reason = assert_put_off(site, result, FailureCode.TIMEOUT)
    assert "made no progress for 2 s" in reason
    assert len(result.stdout) < 20_000
    eventually(lambda: not left_over(site.worktree))
