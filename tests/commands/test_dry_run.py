"""Dry run: every step but the real push. Branch, index, work tree and remote stay; so do the jobs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sites import Result, Site

DRY = {"BRITER_WORKER_DRY_RUN": "true"}
WELCOME = "content/posts/welcome.md"


def save(site: Site, slug: str, text: str = "") -> None:
    site.save_post(slug, text or f"{slug}\n")


def local_side(site: Site) -> tuple[str, ...]:
    """Everything that a person sees of the repository, and the worker's own refs below `batch`."""
    return (
        site.git("for-each-ref", "refs/heads", "refs/remotes", "refs/briter/**/batch"),
        site.git("ls-files", "--stage"),
        site.git("status", "--porcelain"),
        (site.worktree / WELCOME).read_text(),
    )


def states(site: Site) -> dict[str, str]:
    return {job["slug"]: job["state"] for job in json.loads(site.command("list", "--json").stdout)}


def subjects(site: Site) -> list[str]:
    return [subject for _, subject in site.remote_log()]


def outcomes(result: Result) -> list[tuple[str, str, bool]]:
    return [
        (e["event"], e["slug"], e["dryRun"])
        for e in result.events
        if e["event"] != "start" and "dryRun" in e and "slug" in e
    ]


@pytest.mark.parametrize("value", ["", "true"])
def test_a_dry_run_is_the_default_moves_nothing_and_keeps_its_jobs(site: Site, value: str) -> None:
    save(site, "a")
    before = local_side(site)
    result = site.run_once(BRITER_WORKER_DRY_RUN=value)
    assert result.returncode == 0
    assert outcomes(result) == [("published", "a", True)]
    assert len(result.of("published")[0]["commit"]) == 40
    assert local_side(site) == before
    assert subjects(site) == ["Start the site"]
    job = site.job("a")
    assert (job["status"], job["attempts"], bool(job["dryRunAt"])) == ("pending", 0, True)
    assert states(site) == {"a": "tried"}


def test_the_first_live_run_publishes_in_order_what_the_queue_holds(site: Site) -> None:
    for slug in "abc":
        save(site, slug)
        site.run_once(**DRY)
    assert [event["slug"] for event in site.run_once().of("published")] == ["a", "b", "c"]
    assert subjects(site) == ["Publish c", "Publish b", "Publish a", "Start the site"]
    assert (site.jobs(), site.git("status", "--porcelain")) == ([], "")


def test_what_the_remote_has_already_is_acknowledged_in_a_dry_run_too(site: Site) -> None:
    site.save("welcome", [WELCOME])
    assert outcomes(site.run_once(**DRY)) == [("nochange", "welcome", True)]
    assert site.jobs() == []


def test_a_conflict_is_found_in_a_dry_run_and_kept_nowhere(site: Site) -> None:
    site.push_elsewhere({WELCOME: "# Theirs\n"})
    save(site, "welcome", "# Mine\n")
    assert outcomes(site.run_once(**DRY)) == [("dead-lettered", "welcome", True)]
    assert site.job("welcome")["failure"] == "conflict"
    assert site.git("for-each-ref", "refs/heads/conflict", cwd=site.remote) == ""
