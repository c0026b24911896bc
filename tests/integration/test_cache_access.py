"""What opens a remote is used by git, and is nowhere to be seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from caches import Cluster, small
from faults.servers import Exchange, HttpRemote, asks_for, http_remote, sshd

from briter_worker.errors import Failure, PublishError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return small(tmp_path)


@pytest.fixture
def http(cluster: Cluster) -> Iterator[HttpRemote]:
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        yield server


SECRET = "s3cret-canary-0451"  # noqa: S105 - the canary


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_credential_is_used_and_is_nowhere_to_be_seen(
    cluster: Cluster,
    http: HttpRemote,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    http.behaviour = asks_for("blog", SECRET)
    seen: list[str] = []
    serve = http.behaviour

    def look(exchange: Exchange) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                seen.append((process / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
        serve(exchange)

    http.behaviour = look
    if kind == "env":
        monkeypatch.setenv("BLOG_TOKEN", SECRET)
        cluster.credentials = {"env": "BLOG_TOKEN", "username": "blog"}
    else:
        (cluster.root / "token").write_text(f"{SECRET}\n")
        cluster.credentials = {"file": str(cluster.root / "token"), "username": "blog"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit == cluster.tip()
    assert not [line for line in seen if SECRET in line]
    assert any("git-remote-http" in line for line in seen)
    for file in cluster.cache().rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    http.behaviour = asks_for("blog", "another")
    with pytest.raises(PublishError) as failure:
        cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), host="two")
    assert failure.value.failure is Failure.AUTH
    assert SECRET not in failure.value.text + caplog.text + "".join(cluster.warned)


def test_no_helper_of_the_hosts_is_told_the_credential(
    cluster: Cluster, http: HttpRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cluster.root / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[credential]\n\thelper = store\n")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BLOG_TOKEN", SECRET)
    http.behaviour = asks_for("x-access-token", SECRET)
    cluster.credentials = {"env": "BLOG_TOKEN"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit
    assert [path.name for path in home.iterdir()] == [".gitconfig"]


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ({"env": "BLOG_TOKEN"}, "BLOG_TOKEN"),
        ({"file": "/nowhere/token"}, "/nowhere/token"),
        ({"sshKey": "/nowhere/key"}, "/nowhere/key"),
    ],
)
def test_a_credential_that_is_missing_is_named_with_its_place(
    cluster: Cluster, credentials: dict[str, str], words: str
) -> None:
    cluster.credentials = credentials
    with pytest.raises(PublishError) as failure:
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    assert failure.value.failure is Failure.AUTH
    assert words in failure.value.text


def test_an_ssh_key_is_used_by_its_place(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with sshd(cluster.root / "ssh") as host:
        key = host.folder / "client"
        key.rename(host.folder / "deploy key")
        home = cluster.root / "home"
        home.mkdir()
        ssh = host.command.replace(f"-i {key} ", "").replace(f"-p {host.port} ", "")
        (home / ".gitconfig").write_text(f'[core]\n\tsshCommand = "{ssh}"\n')
        monkeypatch.delenv("GIT_CONFIG_GLOBAL")
        monkeypatch.setenv("HOME", str(home))
        cluster.url = f"ssh://127.0.0.1:{host.port}{cluster.remote}"
        cluster.credentials = {"sshKey": str(host.folder / "deploy key")}
        assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit == cluster.tip()
        cluster.credentials = None
        with pytest.raises(PublishError) as failure:
            cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
        assert failure.value.failure is Failure.AUTH


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe", "holds no text"), (None, "name neither env, file nor sshKey")]
)
def test_credentials_that_hold_none_say_what_is_wrong_with_them(
    cluster: Cluster, content: bytes | None, words: str
) -> None:
    cluster.credentials = {"username": "blog"}
    if content is not None:
        (cluster.root / "token").write_bytes(content)
        cluster.credentials = {"file": str(cluster.root / "token")}
    with pytest.raises(PublishError, match=words) as failure:
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    assert failure.value.failure is Failure.AUTH
