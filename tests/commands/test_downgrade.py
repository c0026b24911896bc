"""A program that finds state of a later one refuses to work, names what helps, and changes nothing."""

from __future__ import annotations

import json
import sqlite3
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from briter_worker.queues.postgres.database import needed_version

if TYPE_CHECKING:
    from pathlib import Path

    from sites import Site

    from briter_worker.queues.postgres.database import Database

POST = "content/posts/hello.md"


def state_of(site: Site) -> Path:
    return site.worktree / ".git" / "briter"


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def later_state(site: Site) -> None:
    """The site as a later version left it."""
    site.save_post("earlier", "# Earlier\n")
    site.run_once()
    file = state_of(site) / "format.json"
    file.write_text(json.dumps({"format": 99, "version": "3.1.4"}))


def test_a_worker_notes_the_format_of_its_state_and_the_program(site: Site) -> None:
    site.run_once()
    noted = json.loads((state_of(site) / "format.json").read_text())
    assert noted == {"format": 1, "version": version("briter-worker")}


@pytest.mark.parametrize(
    "command",
    ["run --once", "run", "watch", "pull", "undo earlier", "serve --port 0", "pause", "cancel hello"],
)
def test_state_of_a_later_version_stops_the_start_with_the_command_and_stays(
    site: Site, command: str
) -> None:
    later_state(site)
    site.save_post("hello", "# Hello\n")
    before = files_in(state_of(site)), files_in(site.storage), site.git("for-each-ref")
    line = site.command(*command.split(), BRITER_DASHBOARD_TOKEN="").error(2)
    assert "was written by Briter Worker 3.1.4 (format 99); this one knows format 1" in line
    assert "pip install 'briter-worker>=3.1.4'" in line
    assert (files_in(state_of(site)), files_in(site.storage), site.git("for-each-ref")) == before


def test_a_format_that_cannot_be_read_stops_the_start(site: Site) -> None:
    later_state(site)
    (state_of(site) / "format.json").write_text("[]")
    assert "nobody knows which version wrote the state" in site.run_once().error(2)


def test_doctor_names_the_later_version(site: Site) -> None:
    later_state(site)
    assert "3.1.4" in site.command("doctor").stderr + site.command("doctor").stdout


def test_a_history_of_a_later_version_stays_and_publishing_goes_on(site: Site) -> None:
    later_state(site)
    (state_of(site) / "format.json").unlink()
    file = site.storage / "history.db"
    with sqlite3.connect(file) as history:
        history.execute("PRAGMA user_version = 99")
    history.close()
    site.save_post("hello", "# Hello\n")
    result = site.run_once()
    assert len(result.of("published")) == 1
    (warning,) = result.of("warning")
    assert "written by a later version of Briter Worker (version 99" in warning["error"]
    assert "install the later version again" in warning["fix"]
    assert [each.name for each in site.storage.glob("history.db*")] == ["history.db"]
    with sqlite3.connect(file) as history:
        assert history.execute("PRAGMA user_version").fetchone() == (99,)
        assert history.execute("SELECT count(*) FROM attempts").fetchone() == (1,)
    history.close()


@pytest.mark.parametrize(
    "command", ["run --once", "db upgrade", "db check", "enqueue hello " + POST, "list", "site list"]
)
def test_a_database_that_needs_a_later_program_is_left_alone(
    site: Site, database: Database, database_url: str, command: str
) -> None:
    cluster = {"BRITER_DATABASE_URL": database_url, "BRITER_SITE": "blog"}
    site.write_post(POST, "# Hello\n")
    site.command("site", "add", "blog", "--remote", str(site.remote), **cluster)
    with database.transaction() as connection:
        connection.execute("INSERT INTO migrations (name, version, needs) VALUES ('9999_later', 9999, 9998)")
    result = site.command(*command.split(), **cluster)
    assert result.returncode != 0
    needs = f"needs a program that knows version 9998; this one knows {needed_version()}"
    assert needs in result.stderr + result.stdout
    with database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM publications").fetchone() == (0,)


def test_a_program_works_beside_a_later_schema_that_only_adds(
    site: Site, database: Database, database_url: str
) -> None:
    cluster = {"BRITER_DATABASE_URL": database_url, "BRITER_SITE": "blog"}
    with database.transaction() as connection:
        connection.execute("INSERT INTO migrations (name, version) VALUES ('9999_later', 9999)")
    assert site.command("site", "add", "blog", "--remote", str(site.remote), **cluster).returncode == 0
