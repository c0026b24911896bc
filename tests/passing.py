"""A fault of the remote from beginning to end: it comes, the post waits; it passes, the post is published."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from typing import TYPE_CHECKING

from outcomes import assert_published, assert_sound, save
from remotes import left_over

from briter_worker.errors import FailureClass, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sites import Result, Site

CANARY = "s3cr3t-canary"
SOON = {"BRITER_GIT_TIMEOUT_MS": "800"}
"""For remotes that never answer."""
LAST = {"BRITER_WORKER_MAX_ATTEMPTS": "1"}


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
    left = left_over(site.worktree)
    assert not left, left
    assert site.git("for-each-ref", "refs/heads") == before, "the branch moves after the push, only"
    passes()
    save(site, "b")
    after = site.run_once()
    assert [event["slug"] for event in after.of("revived")] == ["a"], after.stdout + after.stderr
    assert_published(site, after, "a", "b")
    assert_once(site, "a", "b")
    return reason


def assert_dead_letter(site: Site, result: Result, failure: FailureCode, *, slug: str = "a") -> str:
    """It is a dead letter after one attempt, with a reason that may be shown; the reason."""
    told = [(e["failure"], e["attempt"]) for e in result.of("dead-lettered") if e["slug"] == slug]
    assert told == [(failure.value, 1)], result.stdout + result.stderr
    assert result.returncode == 1
    assert result.stderr == ""
    job = site.job(slug)
    assert (job["status"], job["failure"], job["attempts"]) == ("failed", failure.value, 1)
    reason: str = job["lastError"]
    assert "Fix: " not in reason
    assert_fit_to_be_shown(reason)
    assert_fit_to_be_shown(job["fix"])
    for line in result.stdout.splitlines():
        assert line.isprintable()
    assert CANARY not in result.stdout + result.stderr
    return reason


def assert_fit_to_be_shown(text: str) -> None:
    assert text.isprintable()
    assert len(text) <= 2_000
    assert CANARY not in text


def assert_once(site: Site, *slugs: str) -> None:
    """The remote has these, each by one commit, and nothing else; here everything is sound."""
    subjects = Counter(subject for _, subject in site.remote_log())
    assert subjects == Counter(["Start the site", *(f"Publish {slug}" for slug in slugs)])
    assert site.jobs() == []
    assert_sound(site)


def program(file: Path, text: str) -> Path:
    """An executable script."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def give_away(folder: Path) -> None:
    """The folder belongs to somebody else."""
    subprocess.run(["chown", "-R", "65534", str(folder)], check=True)


def take_back(folder: Path) -> None:
    subprocess.run(["chown", "-R", str(os.geteuid()), str(folder)], check=True)
