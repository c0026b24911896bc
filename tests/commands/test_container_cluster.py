"""The cluster's compose file: what it says is right, and its commands work, by hand and in its order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from sites import Site, eventually, lines_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.cluster.yml"
OURS = ("upgrade", "worker", "dashboard", "admin")


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
    return found


def environment(service: dict[str, Any], **given: str) -> dict[str, str]:
    """What the file gives it, with the defaults of its own variables, where nobody gives others."""

    def meant(found: re.Match[str]) -> str:
        return given.get(found[1]) or found[2] or ""

    return {
        name: re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", meant, value)
        for name, value in service["environment"].items()
    }


def test_without_a_password_nothing_starts_and_nothing_but_the_dashboard_is_reached_from_outside() -> None:
    for name in ("postgres", *OURS):
        assert "${POSTGRES_PASSWORD:?" in json.dumps(services()[name]["environment"]), name
    assert {name for name, service in services().items() if "ports" in service} == {"dashboard"}
    assert services()["dashboard"]["ports"] == ["127.0.0.1:8320:8320"]
    assert environment(services()["dashboard"])["BRITER_DASHBOARD_TOKEN"] == ""
    assert services()["postgres"]["volumes"] == ["postgres:/var/lib/postgresql/data"]


@pytest.fixture
def composed(site: Site, empty_database_url: str) -> Site:
    """A site whose commands get what the file gives them; only the database is elsewhere."""
    site.env.update(environment(services()["worker"], BRITER_WORKER_DRY_RUN="false"))
    assert site.env["BRITER_DATABASE_URL"].endswith("@postgres/briter")
    site.env["BRITER_DATABASE_URL"] = empty_database_url
    return site


def test_its_commands_publish_a_post(composed: Site) -> None:
    upgrade = composed.command(*services()["upgrade"]["command"])
    assert upgrade.returncode == 0, upgrade.stderr
    added = composed.command("site", "add", "blog", "--remote", str(composed.remote))
    assert added.returncode == 0, added.stderr
    with composed.running("run") as worker:
        assert next(lines_of(worker))["event"] == "worker-started"
        assert composed.command("health").returncode == 0
        composed.write_post("content/posts/hello.md", "# Hello\n")
        sent = composed.command(
            "enqueue", "hello", "content/posts/hello.md", "--site", "blog", "--root", str(composed.worktree)
        )
        assert sent.returncode == 0, sent.stderr
        eventually(lambda: composed.remote_file("content/posts/hello.md") == "# Hello\n", within=60)
        worker.terminate()
        assert worker.wait(30) == 0
    listed = composed.command(*services()["admin"]["command"])
    assert listed.stdout.startswith("blog\t0\t0\t0\t")
