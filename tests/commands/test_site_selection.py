"""A command acts on a site that a worker publishes, says which, and ends with the right status elsewhere."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Result, Site


POST = "content/posts/welcome.md"
COMMANDS: dict[str, list[str]] = {
    "enqueue": ["enqueue", "a", POST],
    "enqueue by force": ["enqueue", "a", "content/never.md", "--force"],
    "list": ["list"],
    "list as JSON": ["list", "--json"],
    "show": ["show", "a"],
    "history": ["history"],
    "status": ["status"],
    "retry": ["retry", "--all"],
    "cancel": ["cancel", "a"],
    "publish-now": ["publish-now", "a"],
    "undo": ["undo", "a"],
    "pause": ["pause"],
    "resume": ["resume"],
    "pull": ["pull"],
}
every_command = pytest.mark.parametrize("args", COMMANDS.values(), ids=COMMANDS)


def command_in(site: Site, folder: Path, *args: str) -> Result:
    """Run a command in a folder, with no setting but the defaults."""
    folder.mkdir(exist_ok=True)
    names = (name for name in site.environment() if name.startswith("BRITER_"))
    return site.command(*args, prefix=["env", "-C", str(folder), *(f"--unset={name}" for name in names)])


@every_command
def test_nothing_is_done_in_a_folder_that_is_no_repository(site: Site, args: list[str]) -> None:
    empty = site.root / "empty"
    error = command_in(site, empty, *args).error(2)
    assert f"{empty} is no site" in error
    assert "Fix: " in error
    assert [*empty.iterdir()] == []


@every_command
def test_nothing_is_done_in_a_repository_that_no_worker_publishes(site: Site, args: list[str]) -> None:
    error = command_in(site, site.worktree, *args).error(2)
    assert f"no worker has used the storage {site.worktree}/storage" in error
    assert "Fix: start the worker first: briter-worker run --once" in error
    assert not (site.worktree / "storage").exists()


@every_command
def test_a_storage_without_its_repository_is_no_site(site: Site, args: list[str]) -> None:
    site.run_once()
    (site.worktree / ".git").rename(site.root / "moved")
    assert "BRITER_APP_ROOT or BRITER_GIT_WORKTREE" in site.command(*args).error(2)
    assert site.jobs() == []


def test_a_folder_below_the_site_is_not_the_site(site: Site) -> None:
    assert "is no site" in command_in(
        site, site.worktree / "content", "enqueue", "a", "posts/welcome.md"
    ).error(2)


def test_a_first_run_of_the_worker_makes_a_folder_a_site(site: Site) -> None:
    shutil.rmtree(site.storage)
    assert site.run_once().returncode == 0
    assert site.command("enqueue", "a", POST).returncode == 0


def test_the_dashboard_is_not_served_for_a_folder_that_is_no_repository(site: Site) -> None:
    assert "is no site" in command_in(site, site.root / "empty", "serve", "--port", "0").error(2)


@pytest.mark.parametrize(
    "args",
    [
        ["enqueue", "b", POST],
        ["retry", "failed"],
        ["retry", "--all"],
        ["cancel", "failed"],
        ["publish-now", "later"],
        ["undo", "a"],
        ["pause"],
        ["resume"],
        ["pull"],
    ],
    ids=" ".join,
)
def test_a_command_that_acts_names_its_site(site: Site, args: list[str]) -> None:
    for text in ("one", "two"):
        site.save_post("a", text)
        site.run_once()
    site.save("failed", [POST], status="failed", failure="rejected", lastError="no")
    site.save("later", [POST], scheduledFor="2099-01-01")
    done = site.command(*args)
    assert done.returncode == 0
    assert f"briter-worker: site {site.worktree}, main on origin" in done.stderr.splitlines()


@pytest.mark.parametrize(
    "args",
    [
        ["show", "never"],
        ["show", "never", "--diff"],
        ["show", "never", "--watch"],
        ["history", "--slug", "never"],
        ["history", "--slug", "never", "--actions"],
        ["retry", "never"],
        ["cancel", "never"],
        ["publish-now", "never"],
        ["undo", "never"],
        ["undo", "never", "--to", "HEAD"],
    ],
    ids=" ".join,
)
def test_a_slug_that_is_not_there_is_exit_1(site: Site, args: list[str]) -> None:
    error = site.command(*args).error(1)
    assert "never" in error
    assert "Fix: " in error


def test_a_post_that_waits_has_an_empty_history(site: Site) -> None:
    site.save("later", [POST], scheduledFor="2099-01-01")
    assert site.command("history", "--slug", "later", "--json").json() == []
