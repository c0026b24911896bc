"""What became of a post, asserted whole: the event, the class of the failure, the attempts, the job file."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from remotes import left_over
from sites import eventually

from briter_worker.errors import FailureClass, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from sites import Result, Site
CANARY = "s3cr3t-canary"
SOON = {"BRITER_GIT_TIMEOUT_MS": "800"}
"""For remotes that never answer."""
LAST = {"BRITER_WORKER_MAX_ATTEMPTS": "1"}


def save(site: Site, *slugs: str) -> None:
    for slug in slugs or ("a",):
        site.save_post(slug, f"{slug}\n")


def assert_put_off(
    site: Site,
    result: Result,
    failure: FailureCode,
    *,
    slug: str = "a",
    kind: FailureClass = FailureClass.ENVIRONMENT,
) -> str:
    """It failed for the first time, of this class, and waits to be tried again; its reason."""
    assert failure.failure_class is kind
    assert result.returncode == 1
    assert site.job(slug)["nextAttemptAt"]
    return _assert_failed(site, result, "failed", "pending", failure, slug)


def assert_refused(site: Site, result: Result, failure: FailureCode, *, slug: str = "a") -> str:
    """It was dead-lettered at its first attempt; its reason."""
    assert failure.failure_class is FailureClass.REFUSED
    event = "nopaths" if failure is FailureCode.NO_PATHS else "dead-lettered"
    return _assert_failed(site, result, event, "failed", failure, slug)


def assert_dead_letter(site: Site, result: Result, failure: FailureCode, *, slug: str = "a") -> str:
    """It is a dead letter after one attempt, and nothing shows a secret; the reason."""
    reason = _assert_failed(site, result, "dead-lettered", "failed", failure, slug)
    assert result.returncode == 1
    assert result.stderr == ""
    assert "Fix: " not in reason
    assert_fit_to_be_shown(reason)
    assert_fit_to_be_shown(site.job(slug)["fix"])
    for line in result.stdout.splitlines():
        assert line.isprintable()
    assert CANARY not in result.stdout
    return reason


def _assert_failed(
    site: Site, result: Result, event: str, status: str, failure: FailureCode, slug: str
) -> str:
    told = [(e.get("failure", failure.value), e["attempt"]) for e in result.of(event) if e["slug"] == slug]
    assert told == [(failure.value, 1)], result.stdout + result.stderr
    job = site.job(slug)
    assert (job["status"], job["failure"], job["attempts"]) == (status, failure.value, 1)
    reason: str = job["lastError"]
    assert reason.isprintable()
    return reason


def assert_published(site: Site, result: Result, *slugs: str, attempt: int = 1) -> None:
    """These are on the remote, once each, by the commits that the log names; and out of the queue."""
    told = {e["slug"]: (e["commit"], e["attempt"]) for e in result.of("published")}
    log = site.remote_log()
    for slug in slugs or ("a",):
        assert slug in told, result.stdout + result.stderr
        commits = [commit for commit, subject in log if subject == f"Publish {slug}"]
        assert (commits, attempt) == ([told[slug][0]], told[slug][1])
        assert slug not in [job["slug"] for job in site.jobs()]


def assert_sound(site: Site) -> None:
    """Nothing is in flight, git finds no fault, and the work tree shows no change."""
    assert not list((site.queue / ".claimed").glob("[!.]*.json"))
    site.git("fsck", "--strict", "--no-dangling")
    site.git("fsck", "--strict", "--no-dangling", cwd=site.remote)
    assert site.git("status", "--porcelain") == ""


def assert_waits_until_it_passes(
    site: Site, failure: FailureCode, fix: str, passes: Callable[[], object], **env: str
) -> str:
    """The fault is the site's condition: its dead letter names the fix, and comes back when it has passed.

    Nothing is lost, nothing is on the remote twice, and no process of ours is left. Gives the reason.
    """
    save(site, "a")
    before = site.git("for-each-ref", "refs/heads")
    result = site.run_once(**{**LAST, **env})
    reason = assert_dead_letter(site, result, failure)
    assert failure.failure_class is FailureClass.ENVIRONMENT
    assert fix in site.job("a")["fix"]
    eventually(lambda: not left_over(site.worktree))
    assert site.git("for-each-ref", "refs/heads") == before, "the branch moves after the push, only"
    passes()
    save(site, "b")
    after = site.run_once()
    assert [event["slug"] for event in after.of("revived")] == ["a"], after.stdout + after.stderr
    assert_published(site, after, "a", "b")
    assert_once(site, "a", "b")
    return reason


def assert_fit_to_be_shown(text: str) -> None:
    assert text.isprintable()
    assert len(text) <= 2_000
    assert CANARY not in text


def assert_published_at_last(site: Site, *slugs: str) -> None:
    """Tried again, these are published, and everything is sound."""
    for slug in slugs or ("a",):
        site.command("retry", slug)
    assert_published(site, site.run_once(), *slugs)
    assert_sound(site)


def assert_once(site: Site, *slugs: str) -> None:
    """The remote has these, each by one commit, and nothing else; here everything is sound."""
    subjects = Counter(subject for _, subject in site.remote_log())
    assert subjects == Counter(["Start the site", *(f"Publish {slug}" for slug in slugs)])
    assert site.jobs() == []
    assert_sound(site)
