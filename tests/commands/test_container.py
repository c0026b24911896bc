"""The container's files say what they should, and its commands work: as PID 1, unprivileged, to the end.

No container engine is needed: what the files declare is read from them and run by hand.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest
import yaml
from dashboards import serving
from requirements import provide, python_for_everybody, unavailable
from sites import Site, eventually, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
UNPRIVILEGED = 10001


def _services(file: str = "docker-compose.yml") -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", yaml.safe_load((ROOT / file).read_text())["services"])


def _environment(service: dict[str, Any], **given: str) -> dict[str, str]:
    """What the file gives a service, with the defaults of its own variables, where nobody gives others."""

    def meant(found: re.Match[str]) -> str:
        return given.get(found[1]) or found[2] or ""

    return {
        name: re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", meant, value)
        for name, value in service["environment"].items()
    }


def _last(instruction: str) -> str:
    """The arguments of the last such instruction of the Dockerfile."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    return str(re.findall(rf"^{instruction} +(.*)$", text, re.MULTILINE)[-1])


def _by_hand(command: list[str]) -> list[str]:
    """A command of the image, for this machine: its `briter-worker` is this project's."""
    assert command[:2] == ["tini", "--"] or command[0] == "briter-worker"
    if command[0] == "tini":
        command = command[2:]
    assert command[0] == "briter-worker"
    return command[1:]


def test_the_cron_service_drains_once_and_is_healthy_without_a_daemon(site: Site) -> None:
    cron = _services()["cron"]
    assert cron["profiles"] == ["cron"]
    assert cron["healthcheck"] == {"disable": True}
    site.save_post("hello", "# Hello\n")
    command = _by_hand([*json.loads(_last("ENTRYPOINT")), *cron["command"]])

    result = site.command(*command, **_environment(cron))

    assert result.returncode == 0, result.stderr
    assert [entry["dryRun"] for entry in result.of("published")] == [True]
    assert len(site.remote_log()) == 1
    live = site.command(*command, **_environment(cron) | {"BRITER_WORKER_DRY_RUN": "false"})
    assert live.returncode == 0, live.stderr
    assert site.remote_file("content/posts/hello.md") == "# Hello\n"


def test_the_dashboard_has_the_rights_of_the_worker_and_asks_to_sign_in(site: Site) -> None:
    dashboard, worker = _services()["dashboard"], _services()["worker"]
    for key in ("image", "volumes", "read_only", "cap_drop", "security_opt", "tmpfs"):
        assert dashboard[key] == worker[key]
    (port,) = dashboard["ports"]
    assert port == "127.0.0.1:8320:8320", "it is published on this machine only"
    command = _by_hand([*json.loads(_last("ENTRYPOINT")), *dashboard["command"]])
    assert _environment(dashboard)["BRITER_DASHBOARD_TOKEN"] == ""
    with serving(site, *command[1:], token="") as running:
        assert running.api.get("/healthz").status_code == 200
        assert running.api.get("/api/status").status_code == 401
        assert running.link.startswith("http://localhost:"), "0.0.0.0 is no address to visit"
        assert running.page.get(running.link).status_code == 303


def test_the_health_check_passes_beside_a_running_worker(site: Site) -> None:
    check = _by_hand(json.loads(_last("HEALTHCHECK").partition("CMD ")[2]))
    with site.running(*_by_hand(json.loads(_last("ENTRYPOINT")) + json.loads(_last("CMD")))) as worker:
        assert next(lines_of(worker))["event"] == "worker-started"
        result = site.command(*check)
        assert result.returncode == 0, result.stdout + result.stderr
        worker.terminate()
        assert worker.wait(60) == 0
    assert site.command(*check).returncode == 1, "nothing runs any more"


# The cluster's


OURS = ("upgrade", "worker", "dashboard", "admin")
CLUSTER = "docker-compose.cluster.yml"


def test_without_a_password_nothing_starts_and_nothing_but_the_dashboard_is_reached_from_outside() -> None:
    for name in ("postgres", *OURS):
        assert "${POSTGRES_PASSWORD:?" in json.dumps(_services(CLUSTER)[name]["environment"]), name
    assert {name for name, service in _services(CLUSTER).items() if "ports" in service} == {"dashboard"}
    assert _services(CLUSTER)["dashboard"]["ports"] == ["127.0.0.1:8320:8320"]
    assert _environment(_services(CLUSTER)["dashboard"])["BRITER_DASHBOARD_TOKEN"] == ""
    assert _services(CLUSTER)["postgres"]["volumes"] == ["postgres:/var/lib/postgresql/data"]


@pytest.fixture
def composed(site: Site, empty_database_url: str) -> Site:
    """A site whose commands get what the file gives them; only the database is elsewhere."""
    site.env.update(_environment(_services(CLUSTER)["worker"], BRITER_WORKER_DRY_RUN="false"))
    assert site.env["BRITER_DATABASE_URL"].endswith("@postgres/briter")
    site.env["BRITER_DATABASE_URL"] = empty_database_url
    return site


def test_its_commands_publish_a_post(composed: Site) -> None:
    upgrade = composed.command(*_services(CLUSTER)["upgrade"]["command"])
    assert upgrade.returncode == 0, upgrade.stderr
    added = composed.command("site", "add", "blog", "--remote", str(composed.remote))
    assert added.returncode == 0, added.stderr
    with composed.running("run") as worker:
        assert next(lines_of(worker))["event"] == "worker-started"
        # A node starts without waiting for Postgres, and is healthy once it has reported itself there.
        eventually(lambda: composed.command("health").returncode == 0)
        composed.write_post("content/posts/hello.md", "# Hello\n")
        sent = composed.command(
            "enqueue", "hello", "content/posts/hello.md", "--site", "blog", "--root", str(composed.worktree)
        )
        assert sent.returncode == 0, sent.stderr
        eventually(lambda: composed.remote_file("content/posts/hello.md") == "# Hello\n")
        worker.terminate()
        assert worker.wait(60) == 0
    listed = composed.command(*_services(CLUSTER)["admin"]["command"])
    assert listed.stdout.startswith("blog\t0\t0\t0\t")


@pytest.fixture
def unprivileged_site() -> Iterator[Site]:
    """A site that belongs to the container's user, at a place that this user can reach."""
    if os.geteuid() != 0:
        unavailable("only root may become the container's user")
    for program in ("unshare", "setpriv"):
        provide(program, package="util-linux")
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False).returncode:
        unavailable("a PID namespace of its own is not permitted here")
    folder = Path(tempfile.mkdtemp(prefix="briter-pid1-"))
    try:
        site = Site.make(folder)
        (folder / "home").mkdir()
        for entry in [folder, *folder.rglob("*")]:
            os.chown(entry, UNPRIVILEGED, UNPRIVILEGED, follow_symlinks=False)
        yield site
    finally:
        shutil.rmtree(folder)


def _as_container_user() -> list[str]:
    """As the compose file has it: another user, no capabilities, and no way to gain any."""
    user = [f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"]
    # `env`, as what setpriv itself starts is still found with root's rights.
    return ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "env"]


def _states_below(first: psutil.Process) -> set[str]:
    """The states of all that the container's first process has started, as this machine sees them."""
    found: set[str] = set()
    for process in first.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.add(process.status())
    return found


@pytest.mark.parametrize("as_pid_1", ["worker", "tini"])
def test_as_pid_1_it_publishes_leaves_no_zombie_and_ends_with_0_on_sigterm(
    unprivileged_site: Site, as_pid_1: str
) -> None:
    site = unprivileged_site
    python, env = python_for_everybody(_as_container_user())
    init = []
    if as_pid_1 == "tini":
        provide("tini", package="tini")
        init = ["tini", "--"]
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    env = site.environment(**env, HOME=str(site.root / "home"))
    outer = subprocess.Popen(
        [*namespace, *_as_container_user(), *init, python, "-m", "briter_worker", "run"],
        cwd=site.root,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = lines_of(outer)
        started = next(lines, None)
        assert started, outer.communicate()
        assert started["event"] == "worker-started"
        (first,) = psutil.Process(outer.pid).children()
        assert first.uids().real == UNPRIVILEGED
        for number in (1, 2):
            post = site.write_post(f"content/posts/{number}.md", f"# {number}\n")
            os.chown(post, UNPRIVILEGED, UNPRIVILEGED)
            enqueue = ["-m", "briter_worker", "enqueue", f"post-{number}", f"content/posts/{number}.md"]
            subprocess.run([*_as_container_user(), python, *enqueue], cwd=site.root, env=env, check=True)
            while next(lines)["event"] != "published":
                pass
        # The remote is not root's own, and root is who looks.
        log = site.git("-c", "safe.directory=*", "log", "--format=%s", "main", cwd=site.remote)
        assert len(log.splitlines()) == 3
        eventually(lambda: psutil.STATUS_ZOMBIE not in _states_below(first))

        first.terminate()

        assert outer.wait(60) == 0
        assert [entry["event"] for entry in lines][-1] == "worker-stopped"
    finally:
        outer.kill()
        outer.communicate()
