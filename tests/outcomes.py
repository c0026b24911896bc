"""What became of a post, asserted whole: the event, the class of the failure, the attempts, the job file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.errors import FailureClass, FailureCode

if TYPE_CHECKING:
    from sites import Result, Site

DELAYS = {"BRITER_WORKER_BACKOFF_MS": "0"}


def save(site: Site, *slugs: str) -> None:
    """A CMS saves these posts."""
    for slug in slugs:
        site.write_post(f"content/posts/{slug}.md", f"{slug}\n")
        site.save(slug, [f"content/posts/{slug}.md"])


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
    told = [(e["event"], e["failure"], e["attempt"]) for e in result.of("failed") if e["slug"] == slug]
    assert told == [("failed", failure.value, 1)], result.stdout + result.stderr
    assert result.returncode == 1
    job = site.job(slug)
    assert (job["status"], job["failure"], job["attempts"]) == ("pending", failure.value, 1)
    assert job["nextAttemptAt"]
    reason: str = job["lastError"]
    assert reason.isprintable()
    return reason


def assert_refused(site: Site, result: Result, failure: FailureCode, *, slug: str = "a") -> str:
    """It was dead-lettered at its first attempt; its reason."""
    assert failure.failure_class is FailureClass.REFUSED
    event = "nopaths" if failure is FailureCode.NO_PATHS else "dead-lettered"
    told = [(e["event"], e["attempt"]) for e in result.of(event) if e["slug"] == slug]
    assert told == [(event, 1)], result.stdout + result.stderr
    job = site.job(slug)
    assert (job["status"], job["failure"], job["attempts"]) == ("failed", failure.value, 1)
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
