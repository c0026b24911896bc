"""A worker dies after its push, and somebody has another branch checked out when the next one starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from outcomes import DELAYS, assert_published, save

if TYPE_CHECKING:
    from sites import Result, Site

POST = "content/posts/b.md"


def text(first: str, last: str) -> str:
    """The CMS writes the first line, somebody else the last one."""
    return f"{first}\n" + "-\n" * 8 + f"{last}\n"


def dies_after_its_push(site: Site) -> None:
    """The remote has it; the worker, named by its lock, never hears of that."""
    file = site.hook(f"rm $0\nkill -9 $(head -n 1 {site.storage}/worker.lock)", "post-receive")
    assert site.run_once(**DELAYS).returncode < 0
    assert not file.exists()


def recovered(site: Site) -> Result:
    """The next worker, once no process of the dead one's is left."""
    while (result := site.run_once(**DELAYS)).names() == ["worker-skipped"]:
        pass
    return result


@pytest.fixture
def post(site: Site) -> None:
    """A post that is published."""
    write(site, "first", "last")
    assert site.run_once().of("published")


def write(site: Site, first: str, last: str) -> None:
    site.write_post(POST, text(first, last))
    site.save("b", [POST])


def test_the_branch_is_where_it_was_when_its_person_comes_back(site: Site) -> None:
    save(site, "a")
    tip = site.git("rev-parse", "main")
    dies_after_its_push(site)
    site.git("switch", "-q", "-c", "side")
    save(site, "c")

    away = recovered(site)
    assert_published(site, away, "a")
    assert away.of("failed")[0]["failure"] == "wrong-branch"
    assert site.git("rev-parse", "main") == tip
    assert site.git("status", "--porcelain", "--untracked-files=all").split() == [
        *("??", "content/posts/a.md"),
        *("??", "content/posts/c.md"),
    ]

    site.git("switch", "-q", "main")
    site.command("retry", "c")
    back = site.run_once(**DELAYS)
    assert_published(site, back, "c")
    assert not back.of("warning")
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


def test_what_landed_while_its_person_was_away_is_adopted_by_a_run_that_finds_nothing_to_do(
    site: Site,
) -> None:
    save(site, "a")
    dies_after_its_push(site)
    site.git("switch", "-q", "-c", "side")
    assert_published(site, recovered(site), "a")
    assert site.run_once().names() == ["worker-started", "warning", "worker-stopped"]
    site.git("switch", "-q", "main")
    assert site.run_once().names() == ["worker-started", "worker-stopped"]
    assert site.git("rev-parse", "main") == site.remote_log()[0][0]
    assert site.git("status", "--porcelain") == ""


@pytest.mark.usefixtures("post")
@pytest.mark.parametrize("merged", [False, True], ids=["as it was", "merged with the remote's"])
@pytest.mark.parametrize("fetches", [False, True], ids=["", "and fetches"])
def test_what_landed_while_its_person_was_away_is_what_the_next_save_is_an_edit_of(
    site: Site,
    merged: bool,  # noqa: FBT001
    fetches: bool,  # noqa: FBT001
) -> None:
    if merged:
        site.push_elsewhere({POST: text("first", "theirs 1")})
    write(site, "ours 1", "last")
    dies_after_its_push(site)
    site.git("switch", "-q", "-c", "side")
    assert recovered(site).of("published")
    site.push_elsewhere({POST: text("ours 1", "theirs 2")})
    if fetches:
        site.git("fetch", "-q")
    write(site, "ours 2", "last")  # the author has never seen what others made of it
    site.git("switch", "-q", "main")

    result = site.run_once(**DELAYS)
    assert result.of("published"), result.stdout
    assert site.remote_file(POST) == text("ours 2", "theirs 2")
    assert (site.worktree / POST).read_text() == text("ours 2", "theirs 2")
    assert site.git("status", "--porcelain") == ""


@pytest.mark.usefixtures("post")
def test_an_edit_that_was_given_up_is_not_what_the_next_save_started_from(site: Site) -> None:
    site.push_elsewhere({POST: text("first", "theirs")})
    site.write_post(POST, text("never saved", "last"))
    save(site, "a")
    assert_published(site, site.run_once(), "a")
    assert (site.worktree / POST).read_text() == text("never saved", "last")

    site.git("checkout", "-q", "--ignore-skip-worktree-bits", "--", POST)
    assert (site.worktree / POST).read_text() == text("first", "theirs")
    site.save("b", [POST])
    assert site.run_once().of("nochange")
    write(site, "ours", "ours, too")
    assert site.run_once().of("published")
    assert site.remote_file(POST) == text("ours", "ours, too")
