"""The git commands of a drain, counted: a batch costs no more of them than a few jobs."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

from outcomes import save

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

_MOST = 12
"""The git commands that the worker starts for a drain, without those that read the configuration."""


def drain(site: Site, name: str, jobs: int) -> Counter[str]:
    """Publish so many posts; return the git commands that the worker has started."""
    home = site.root / name
    (home / "traces").mkdir(parents=True)
    (home / ".gitconfig").write_text(f"[trace2]\n\teventTarget = {home}/traces\n", encoding="utf-8")
    save(site, *(f"{name}-{number}" for number in range(jobs)))
    done = site.run_once(HOME=str(home), GIT_CONFIG_GLOBAL="")
    assert len(done.of("published")) == jobs, done
    return Counter(command for trace in (home / "traces").iterdir() if (command := _command(trace)))


def _command(trace: Path) -> str | None:
    """Return the git command that the worker started; None for one that another git started."""
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    if "/" in events[0]["sid"]:
        return None
    return next((event["name"] for event in events if event["event"] == "cmd_name"), "?")


def test_a_drain_starts_the_same_git_commands_for_a_few_jobs_and_for_many(site: Site) -> None:
    drain(site, "first", 1)  # it alone fetches
    few, many = (drain(site, f"of-{jobs}", jobs) for jobs in (3, 60))
    # The configuration is read again while its files are younger than a second: this site is new.
    assert 1 <= few.pop("config") <= 3
    assert 1 <= many.pop("config") <= 3
    assert many.total() <= _MOST
    many.pop("ls-tree")  # for a few posts, fast-import itself looks up what is there
    assert few == many
