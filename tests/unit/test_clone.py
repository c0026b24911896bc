"""A cluster's clone of a site is made, used, lost and replaced; what opens its remote is never seen."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest
import requirements
from clones import LINES, Cluster, made, small
from remotes import Exchange, HttpRemote, asks_for, http_remote, sshd

from briter_worker.errors import FailureCode, PublishError
from briter_worker.git import clone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from briter_worker.queues.postgres.database import Database

SECRET = "s3cret-canary-0451"  # noqa: S105 - the canary


@pytest.fixture
def cluster(tmp_path: Path, database: Database) -> Cluster:
    return small(tmp_path, database)


@pytest.fixture
def http(cluster: Cluster) -> Iterator[HttpRemote]:
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        yield server


DAMAGES = {
    "all of the node's": "rm -rf $node",
    "the clone": "rm -rf $clone",
    "its objects": "rm -rf $clone/objects",
    "its configuration": "rm $clone/config",
    "a pack": "for each in $clone/objects/pack/*.pack; do chmod 644 $each; truncate --size=40 $each; done",
    "the refs": "find $clone/refs -type f -exec truncate --size=0 {} +",
    "broken configuration": "echo '[core' >$clone/config",
    "locks": "for each in packed-refs shallow refs/heads/main HEAD; do touch $clone/$each.lock; done",
    "a file in its place": "rm -rf $clone; echo 'a file' >$clone",
    "another's clone in its place": "rm -rf $clone; git clone -q --bare $remote $clone",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_clone_that_is_lost_or_damaged_costs_no_attempt(cluster: Cluster, damage: str) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    places = {"node": cluster.folder(), "clone": cluster.clone(), "remote": cluster.remote}
    env = os.environ | {name: str(place) for name, place in places.items()}
    subprocess.run(["sh", "-euc", DAMAGES[damage]], env=env, check=True)
    outcome = cluster.publish(cluster.save("c", {"content/posts/c/c.md": "C\n"}, folders=["content/posts/c"]))
    assert outcome["c"].commit == cluster.tip()
    assert cluster.log() == ["Publish c", "Publish a", "Start the site"]
    assert cluster.file("content/posts/b.md") == LINES
    cluster.git("fsck", "--strict", "--no-dangling")


def test_a_clone_of_another_address_or_branch_is_not_used(cluster: Cluster, tmp_path: Path) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    (tmp_path / "elsewhere").mkdir()
    other = made(tmp_path / "elsewhere", cluster.database, {"content/other.md": "other\n"})
    url, cluster.url = cluster.url, other.url
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert other.log() == ["Publish c", "Start the site"]
    cluster.url, cluster.branch = url, "drafts"
    cluster.git("branch", "drafts", "main~1")
    cluster.publish(cluster.save("d", {"content/d.md": "D\n"}))
    assert cluster.log("drafts") == ["Publish d", "Start the site"]
    assert cluster.log() == ["Publish a", "Start the site"]


@pytest.mark.parametrize("made_before", [False, True], ids=["before it is made", "while posts are written"])
def test_a_full_disk_under_the_clone_is_the_nodes_condition(cluster: Cluster, *, made_before: bool) -> None:
    post = cluster.save("a", {"content/a.md": "A\n" * 100_000})
    with requirements.small(cluster.root / "nodes", size="4m") as place:
        if made_before:
            cluster.publish(cluster.save("b", {"content/b.md": "B\n"}))
        with requirements.full(place), pytest.raises(PublishError) as failed:
            cluster.publish(post)
        assert failed.value.code is FailureCode.DISK
        assert cluster.publish(post)["a"].commit == cluster.tip()


# Its cost


def test_a_drain_with_a_clone_only_pushes(cluster: Cluster, http: HttpRemote) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    http.asked.clear()
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert http.asked == ["GET git-receive-pack", "POST git-receive-pack"]


# Its credentials


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_credential_is_used_and_is_nowhere_to_be_seen(
    cluster: Cluster,
    http: HttpRemote,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    serve = asks_for("blog", SECRET)
    seen: list[str] = []

    def look(exchange: Exchange) -> None:
        for process in psutil.process_iter(["cmdline"]):
            seen.extend(process.info["cmdline"] or ())
        serve(exchange)

    http.behaviour = look
    monkeypatch.setenv("BLOG_TOKEN", SECRET)
    (cluster.root / "token").write_text(f"{SECRET}\n")
    place = {"env": "BLOG_TOKEN", "file": str(cluster.root / "token")}
    cluster.credentials = {kind: place[kind], "username": "blog"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit == cluster.tip()
    assert not [word for word in seen if SECRET in word]
    assert any("git-remote-http" in word for word in seen)
    for file in cluster.folder().rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    http.behaviour = asks_for("blog", "rotated-token")
    with pytest.raises(PublishError) as failure:
        cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), node="two")
    assert failure.value.code is FailureCode.AUTH
    assert SECRET not in failure.value.message + caplog.text + "".join(cluster.warned)
    monkeypatch.setenv("BLOG_TOKEN", "rotated-token")  # rotated: the next publication reads it anew
    (cluster.root / "token").write_text("rotated-token\n")
    assert (
        cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), node="two")["c"].commit == cluster.tip()
    )


def test_no_helper_of_the_node_is_told_the_credential(
    cluster: Cluster, http: HttpRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cluster.root / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[credential]\n\thelper = store\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BLOG_TOKEN", SECRET)
    http.behaviour = asks_for("x-access-token", SECRET)
    cluster.credentials = {"env": "BLOG_TOKEN"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit
    assert [path.name for path in home.iterdir()] == [".gitconfig"]


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ({"env": "BLOG_TOKEN"}, "BLOG_TOKEN .* holds no credential"),
        ({"file": "/nowhere/token"}, "/nowhere/token .* cannot be read"),
        ({"sshKey": "/nowhere/key"}, "/nowhere/key .* cannot be read"),
        ({"file": "/bin/sh"}, "holds no credential in one line"),
    ],
)
def test_a_credential_that_cannot_be_used_is_named_with_its_place(
    credentials: dict[str, str], words: str
) -> None:
    with pytest.raises(PublishError, match=words) as failure:
        clone.open_access("https://example.org/x.git", credentials)
    assert failure.value.code is FailureCode.AUTH
    assert failure.value.fix


def test_an_ssh_key_is_used_by_its_place(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with sshd(cluster.root / "ssh") as host:
        key = host.folder / "client"
        key.rename(host.folder / "deploy key")
        home = cluster.root / "home"
        home.mkdir()
        ssh = host.command.replace(f"-i {key} ", "").replace(f"-p {host.port} ", "")
        (home / ".gitconfig").write_text(f'[core]\n\tsshCommand = "{ssh}"\n')
        monkeypatch.setenv("HOME", str(home))
        cluster.url = f"ssh://127.0.0.1:{host.port}{cluster.remote}"
        cluster.credentials = {"sshKey": str(host.folder / "deploy key")}
        assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit == cluster.tip()
        cluster.credentials = None
        with pytest.raises(PublishError) as failure:
            cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
        assert failure.value.code is FailureCode.AUTH
