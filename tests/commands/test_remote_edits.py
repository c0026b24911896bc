"""The remote's edits reach the site by themselves, on an order and by `pull`, beside a running worker."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from dashboards import serving
from outcomes import save
from receivers import receiving
from sites import eventually, lines_of

from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.worker import Puller

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster_farm import Farm
    from sites import Result, Site


THEIRS = "content/posts/theirs.md"
SECRET = "a-secret-of-the-git-host"  # noqa: S105 - for tests
SOON = {"BRITER_GIT_PULL_INTERVAL_MS": "50", "BRITER_WORKER_POLL_INTERVAL_MS": "50"}


def push(site: Site, text: str = "theirs\n", path: str = THEIRS) -> str:
    return site.push_elsewhere({path: text})


def has(site: Site, text: str = "theirs\n", path: str = THEIRS) -> bool:
    file = site.worktree / path
    return file.exists() and file.read_text() == text


@contextmanager
def busy(site: Site) -> Iterator[None]:
    """Another process works in the repository."""
    path = site.worktree / ".git/briter/lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_an_idle_worker_pulls_and_tells_which_files_changed(site: Site) -> None:
    with (
        receiving() as receiver,
        site.running(
            **SOON, BRITER_WEBHOOK_URLS=f"{receiver.url}#updated", BRITER_WEBHOOK_ALLOW_PRIVATE="true"
        ) as worker,
    ):
        lines = lines_of(worker)
        assert next(lines)["event"] == "worker-started"
        tip = push(site)
        event = next(lines)
        assert (event["event"], event["paths"], event["total"]) == ("site-updated", [THEIRS], 1)
        assert event["commit"] == tip == site.git("rev-parse", "main")
        assert has(site)
        assert site.git("status", "--porcelain") == ""
        eventually(lambda: receiver.received)
    message = json.loads(receiver.received[0].body)
    assert (message["type"], message["data"]["paths"]) == ("site.updated", [THEIRS])


def test_a_pull_keeps_what_the_cms_has_changed_and_a_push_is_no_update(site: Site) -> None:
    post = "content/posts/welcome.md"
    push(site, "theirs, too\n", post)
    push(site)
    site.write_post(post, "ours\n")
    result = site.run_once(**SOON)
    assert result.of("site-updated")[0]["paths"] == [THEIRS]
    assert has(site, "ours\n", post)
    site.save_post("a", "A\n")
    result = site.run_once(**SOON)
    assert result.names() == ["worker-started", "start", "published", "worker-stopped"]


def test_a_pull_over_local_changes_changes_nothing(site: Site) -> None:
    site.push_elsewhere({"theme.css": "one\n"})
    assert site.command("pull").returncode == 0
    site.push_elsewhere({"theme.css": "theirs\n", THEIRS: "theirs\n"})
    site.write_post("theme.css", "mine\n")
    before = site.git("rev-parse", "main")
    done = site.command("pull")
    assert done.returncode == 1
    assert "theme.css has local changes" in done.stderr
    assert "Fix: commit it, or drop the changes: git restore theme.css" in done.stderr
    assert (site.git("rev-parse", "main"), has(site)) == (before, False)


def test_a_conflict_is_shown_with_its_post_before_anybody_saves(site: Site) -> None:
    lines = "".join(f"{number}\n" for number in range(9))
    for slug in ("clash", "merge", "saved"):
        site.save_post(slug, lines)
    assert len(site.run_once().of("published")) == 3
    for slug, changed in (("clash", "ours"), ("merge", "0"), ("saved", "ours")):
        push(site, lines.replace("0", "theirs"), f"content/posts/{slug}.md")
        text = lines.replace("8", "ours") if slug == "merge" else lines.replace("0", changed)
        site.write_post(f"content/posts/{slug}.md", text)
    site.save("saved", ["content/posts/saved.md"], scheduledFor="2199-01-01")

    (event,) = site.run_once(**SOON).of("conflict-ahead")

    assert (event["slug"], bool(event["fix"])) == ("clash", True)
    assert "content/posts/clash.md in the same lines" in event["error"]
    receipt = site.command("show", "clash", "--json").json()["receipts"][0]
    assert (receipt["outcome"], receipt["error"]) == ("conflict-ahead", event["error"])
    assert site.run_once(**SOON).of("conflict-ahead") == []


@pytest.mark.parametrize("env", [{}, SOON | {"BRITER_WORKER_DRY_RUN": "true"}])
def test_without_an_interval_and_in_a_dry_run_no_file_changes(site: Site, env: dict[str, str]) -> None:
    push(site)
    assert site.run_once(**env).names() == ["worker-started", "worker-stopped"]
    assert not has(site)


def test_a_remote_that_is_away_is_the_sites_condition_once(site: Site) -> None:
    push(site)
    away = site.remote.rename(site.root / "away.git")
    assert [each["failure"] for each in site.run_once(**SOON).of("condition")] == ["remote-missing"]
    assert site.run_once(**SOON).names() == ["worker-started", "worker-stopped"]
    assert "condition" in site.command("status", "--json").json()
    away.rename(site.remote)
    assert site.run_once(**SOON).names() == ["worker-started", "site-updated", "condition", "worker-stopped"]


def test_a_pull_that_succeeds_makes_due_what_the_outage_delayed(site: Site) -> None:
    save(site, "a")
    away = site.remote.rename(site.root / "away.git")
    assert site.run_once(BRITER_WORKER_MAX_ATTEMPTS="1").of("dead-lettered")
    save(site, "b")
    with site.running(**SOON) as worker:
        assert next(each["slug"] for each in lines_of(worker) if each["event"] == "failed") == "b"
        away.rename(site.remote)
        # The dead letter comes back when the other post's push has succeeded.
        eventually(lambda: site.remote_file("content/posts/a.md") == "a\n")


def test_a_pull_by_hand_that_succeeds_ends_the_outage_with_the_next_run(site: Site) -> None:
    site.git("remote", "set-url", "origin", str(site.root / "nowhere"))
    site.save_post("a", "# A\n")
    site.run_once()
    site.git("remote", "set-url", "origin", str(site.remote))
    assert site.command("pull").returncode == 0
    assert site.run_once().names()[1] == "condition"
    assert "No post can be published" not in site.command("status").stdout
    assert "published" in site.run_once().names()


def test_an_interval_below_the_poll_is_refused(site: Site) -> None:
    result = site.run_once(BRITER_GIT_PULL_INTERVAL_MS="4999")
    assert result.returncode == 2
    assert "BRITER_GIT_PULL_INTERVAL_MS is 4999, below the poll interval of 5000 ms" in result.stderr
    assert "Fix: set it to 0" in result.stderr


def test_pull_works_beside_a_worker_and_waits_for_it(site: Site) -> None:
    push(site)
    with site.running() as worker:
        next(lines_of(worker))
        result = site.command("pull", "--json")
        assert result.returncode == 0, result.stderr
        assert result.json()["paths"] == [THEIRS]
        assert has(site)
    with busy(site):
        result = site.command("pull")
    assert result.returncode == 1
    assert "works in the repository. Fix: " in result.stderr


def test_a_publication_waits_for_a_pull(site: Site) -> None:
    site.save_post("a", "A\n")
    with busy(site):
        (failed,) = site.run_once(BRITER_GIT_TIMEOUT_MS="3000").of("failed")
    assert failed["failure"] == "locked"
    assert site.remote_file("content/posts/a.md") is None
    site.command("retry", "a")
    with site.running() as worker:
        with busy(site):
            lines = lines_of(worker)
            while next(lines)["event"] != "start":
                pass
        eventually(lambda: site.remote_file("content/posts/a.md"))


def signed(body: bytes, secret: str = SECRET) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


BODY = b'{"ref": "refs/heads/main"}'
HOSTS = {
    "GitHub": {"X-Hub-Signature-256": f"sha256={signed(BODY)}"},
    "GitLab": {"X-Gitlab-Token": SECRET},
    "Gitea": {"X-Gitea-Signature": signed(BODY)},
}


def order(base: str, headers: dict[str, str], path: str = "/api/pull") -> httpx.Response:
    return httpx.post(f"{base}{path}", content=BODY, headers=headers)


def test_a_hosts_webhook_orders_a_pull(site: Site) -> None:
    push(site)
    marker = site.worktree / ".git/briter/pull"
    with serving(site, BRITER_PULL_SECRET=SECRET) as dashboard:
        for host, headers in HOSTS.items():
            assert order(dashboard.base, headers).status_code == 202, host
            assert marker.stat().st_mode & 0o777 == 0o600
            marker.unlink()
        for wrong in ({}, {"X-Gitlab-Token": ""}, {"X-Hub-Signature-256": f"sha256={signed(BODY, 'x')}"}):
            assert order(dashboard.base, wrong).status_code == 401
        large = httpx.post(
            f"{dashboard.base}/api/pull", content=bytes((25 << 20) + 1), headers=HOSTS["GitLab"]
        )
        assert large.status_code == 413
        assert not marker.exists()
        assert httpx.get(f"{dashboard.base}/api/queue", headers=HOSTS["GitLab"]).status_code == 401
        assert dashboard.api.post("/api/pull").status_code == 202
    assert not has(site)
    assert "site-updated" in site.run_once().names()
    assert has(site)
    assert not marker.exists()


def test_without_a_secret_no_signature_counts(site: Site) -> None:
    with serving(site) as dashboard:
        empty = {"X-Gitlab-Token": "", "X-Hub-Signature-256": f"sha256={signed(BODY, '')}"}
        for headers in (HOSTS["GitLab"], empty):
            assert order(dashboard.base, headers).status_code == 401
    with serving(site, BRITER_WORKER_DRY_RUN="true") as dashboard:
        assert dashboard.api.post("/api/pull").status_code == 409


def test_pulls_come_less_often_while_they_fail_and_an_order_stays_until_one_succeeds(tmp_path: Path) -> None:
    failure = PublishError(FailureCode.NETWORK, "away")
    outcomes: list[Failure | None] = []
    pulls: list[Exception | None] = [failure] * 3

    def pull() -> None:
        if pulls and (error := pulls.pop()):
            raise error

    answered = tmp_path / "pull"
    puller = Puller(answered, 10.0, pull=pull, report=outcomes.append)
    ran = []
    for now in range(0, 200, 5):
        before = len(outcomes)
        puller.run(float(now))
        ran += [now] if len(outcomes) > before else []
    assert ran == [0, 20, 60, 140, 150, 160, 170, 180, 190]
    assert outcomes == [failure.failure] * 3 + [None] * 6

    ordered = Puller(answered, 0.0, pull=pull, report=outcomes.append)
    ordered.run(0.0)
    assert len(outcomes) == 9
    answered.touch()
    pulls.append(failure)
    ordered.run(1.0)
    ordered.run(2.0)
    assert len(outcomes) == 10  # it waits
    assert answered.exists()
    answered.touch()  # by a host that is there again
    ordered.run(3.0)
    assert outcomes[-1] is None
    assert not answered.exists()


def updates(done: Result) -> list[list[str]]:
    """The paths of each update that the node emitted."""
    return [each["paths"] for each in done.of("site-updated")]


def test_the_edits_of_others_are_an_event_in_a_cluster(farm: Farm) -> None:
    farm.add("blog")
    site = farm.site("blog")
    hourly = {"BRITER_GIT_PULL_INTERVAL_MS": "3600000"}
    farm.save("blog", "a")
    assert updates(farm.once()) == []
    push(site)
    assert updates(farm.once()) == []  # nobody asked for it
    assert updates(farm.once("two", **hourly)) == [[THEIRS]]
    push(site, path="again.md")
    assert updates(farm.once("two", **hourly)) == []  # not before the hour is over
    farm.save("blog", "b")
    assert updates(farm.once("two")) == [["again.md"]]  # met by the push
    push(site, path="more.md")
    site.env.update(farm.environment("office"))
    with serving(site, BRITER_PULL_SECRET=SECRET) as dashboard:
        path = "/api/sites/blog/pull"
        assert order(dashboard.base, {"X-Gitlab-Token": "wrong"}, path).status_code == 401
        assert order(dashboard.base, HOSTS["GitHub"], path).status_code == 202
    shutil.move(site.remote, site.remote.with_suffix(".away"))
    assert "site-updated" not in farm.once().names()
    shutil.move(site.remote.with_suffix(".away"), site.remote)
    with farm.database.connection() as connection:
        (away,) = connection.execute("SELECT pull_at - extract(epoch FROM now()) FROM sites").fetchone() or (
            0,
        )
        assert 60 < away <= 120  # the order stays; longer pauses while it fails
        connection.execute("UPDATE sites SET pull_at = 1")
    assert updates(farm.once()) == [["more.md"]]
    assert updates(farm.once()) == []
