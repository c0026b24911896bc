"""What a cluster's jobs bring along, and how nodes publish it from clones that may be lost or damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest
import requirements
from clones import LINES, Cluster, blobs_here, made, small
from queue_backends import NOW
from remotes import Exchange, HttpRemote, asks_for, cuts_after, http_remote, sshd

from briter_worker.allowlist import Allowlist
from briter_worker.errors import FailureCode, PublishError
from briter_worker.git import clone
from briter_worker.git.payloads import Gathered, gather
from briter_worker.ports import blob_id
from briter_worker.queues.postgres.payloads import PayloadSource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site

    from briter_worker.ports import Outcome
    from briter_worker.queues.postgres.database import Database


@pytest.fixture
def cluster(tmp_path: Path, database: Database) -> Cluster:
    return small(tmp_path, database)


def code(outcome: Outcome) -> FailureCode | None:
    return outcome.failure.code if outcome.failure else None


# What jobs carry


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_what_a_job_brought_is_published_from_a_fresh_clone(cluster: Cluster, *, filters: bool) -> None:
    cluster.git("config", "uploadpack.allowFilter", str(filters).lower())
    a = cluster.save("a", {"content/posts/a.md": "A\n"})
    outcome = cluster.publish(a)["a"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.file("content/posts/a.md") == "A\n"
    assert cluster.file("content/posts/b.md") == LINES
    assert cluster.log() == ["Publish a", "Start the site"]
    assert cluster.git("show", "-s", "--format=%an %cn", "main") == "Briter Worker Briter Worker"
    assert (blob_id(LINES.encode()) in blobs_here(cluster)) is not filters


@pytest.mark.parametrize("declared", ["content/posts", "content/posts/x"])
def test_what_was_deleted_below_a_declared_folder_of_a_clone_is_deleted(
    cluster: Cluster, declared: str
) -> None:
    cluster.person({"content/posts/x/gone.md": "gone\n"})
    cms = cluster.root / "cms"
    cluster.git("clone", "-q", str(cluster.remote), str(cms))
    cluster.person({"content/posts/x/theirs.md": "theirs\n"})
    shutil.rmtree(cms / "content/posts/x")
    found = gather(
        cms, [declared], allowlist=Allowlist(["content"]), max_bytes=1 << 20, saved_at=cluster.clock
    )
    cluster.submit("x", PayloadSource(found.payload, found.content))
    assert cluster.publish("x")["x"].failure is None
    assert cluster.file("content/posts/x/gone.md") is None
    assert cluster.file("content/posts/x/theirs.md") == "theirs\n"


def test_a_folder_takes_nothing_away_that_its_author_never_had(cluster: Cluster) -> None:
    cluster.publish(cluster.save("c", {"content/x/c.md": "c\n"}))
    cluster.person({"content/x/theirs.md": "theirs\n", "content/x/b.md": "b\n"})
    # The author's git has seen b, which is gone, and a; the worker has published c; theirs is nobody's here.
    bases = {"content/x/a.md": None, "content/x/b.md": blob_id(b"b\n")}
    files = {"content/x/a.md": "a\n", "content/x/b.md": None}
    cluster.publish(cluster.save("x", files, folders=["content/x"], bases=bases))
    names = cluster.git("ls-tree", "-r", "--name-only", "main", "content/x").splitlines()
    assert names == ["content/x/a.md", "content/x/theirs.md"]


def test_a_folder_never_carries_what_a_scheduled_post_declares(cluster: Cluster) -> None:
    request = cluster.save(
        "x",
        {"content/posts/x/now.md": "now\n", "content/posts/x/later.md": "later\n"},
        folders=["content/posts/x"],
    )
    cluster.publish(request, scheduled={"content/posts/x/later.md": NOW + 60})
    assert cluster.file("content/posts/x/now.md") == "now\n"
    assert cluster.file("content/posts/x/later.md") is None


def test_what_is_not_allowed_is_refused_with_the_reason_and_never_written(cluster: Cluster) -> None:
    request = cluster.save(
        "a",
        {"content/a.md": "A\n", "../../escaped.md": "no\n", "content/.git/config": "no\n", "x.md": "no\n"},
    )
    outcome = cluster.publish(request)["a"]
    assert outcome.commit
    assert set(outcome.rejected_paths) == {"../../escaped.md", "content/.git/config", "x.md"}
    assert cluster.git("show", "--format=", "--name-only", "main") == "content/a.md"
    assert not list(cluster.root.rglob("escaped.md"))


def test_an_older_version_never_takes_the_place_of_a_newer_one_that_is_published(cluster: Cluster) -> None:
    old = cluster.save("old", {"content/a.md": "old\n", "content/only.md": "only\n"})
    cluster.publish(cluster.save("new", {"content/a.md": "new\n"}))
    outcome = cluster.publish(old)["old"]
    assert outcome.failure is None
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/only.md") == "only\n"


def test_an_older_deletion_never_takes_a_newer_version_away(cluster: Cluster) -> None:
    gone = cluster.save("gone", {"content/a.md": None})
    folder = cluster.save("folder", {"content/x/1.md": "1\n"}, folders=["content/x"])
    cluster.publish(cluster.save("new", {"content/a.md": "new\n", "content/x/2.md": "2\n"}))
    cluster.publish(gone, folder)
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/x/2.md") == "2\n"
    assert cluster.file("content/x/1.md") == "1\n"


def test_what_the_site_ignores_is_refused_unless_git_has_it(cluster: Cluster) -> None:
    cluster.person({"content/tracked.tmp": "tracked\n"})
    cluster.person({".gitignore": "*.tmp\n", "content/posts/.gitignore": "draft-*\n"})
    outcomes = cluster.publish(
        cluster.save("ignored", {"content/a.tmp": "no\n"}),
        cluster.save("draft", {"content/posts/draft-a.md": "no\n"}),
        cluster.save("tracked", {"content/tracked.tmp": "new\n"}),
        cluster.save("folder", {"content/y/a.md": "a\n", "content/y/b.tmp": "no\n"}, folders=["content/y"]),
    )
    assert code(outcomes["ignored"]) is code(outcomes["draft"]) is FailureCode.NO_PATHS
    assert cluster.file("content/tracked.tmp") == "new\n"
    assert cluster.git("ls-tree", "--name-only", "main", "content/y/") == "content/y/a.md"


def test_of_two_versions_in_a_batch_the_newer_is_published_whichever_comes_first(cluster: Cluster) -> None:
    files = {"content/x/a.md": "old\n", "content/x/b.md": "gone since\n"}
    old = cluster.save("old", files, folders=["content/x"])
    new = cluster.save("new", {"content/x/a.md": "new\n"}, folders=["content/x"])
    cluster.publish(new, old)
    assert cluster.file("content/x/a.md") == "new\n"
    assert cluster.file("content/x/b.md") is None


# Beside other people


def test_what_the_author_started_from_is_merged_with_where_it_is_known(cluster: Cluster) -> None:
    cluster.person({"content/posts/b.md": LINES.replace("line 1\n", "line one\n")})
    mine = LINES.replace("line 18\n", "line eighteen\n")
    request = cluster.save(
        "b", {"content/posts/b.md": mine}, bases={"content/posts/b.md": blob_id(LINES.encode())}
    )
    assert cluster.publish(request)["b"].failure is None
    assert cluster.file("content/posts/b.md") == mine.replace("line 1\n", "line one\n")


def test_a_deleted_branch_is_not_recreated(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "-d", "refs/heads/main")
    c = cluster.save("c", {"content/c.md": "C\n"})
    for host in ("one", "fresh"):
        with pytest.raises(PublishError) as failure:
            cluster.publish(c, node=host)
        assert failure.value.code is FailureCode.REMOTE_REWRITTEN
        assert "no branch main" in failure.value.message
    assert cluster.git("for-each-ref") == ""


@pytest.mark.parametrize("lost", [False, True], ids=["cache", "fresh"])
def test_a_rewritten_branch_is_built_upon_and_never_set_back(cluster: Cluster, *, lost: bool) -> None:
    first = cluster.tip()
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "refs/heads/main", first)
    cluster.person({"content/theirs.md": "theirs\n"})
    host = "fresh" if lost else "one"
    outcome = cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), node=host)["c"]
    assert outcome.failure is None
    assert cluster.log() == ["Publish c", "Somebody else's", "Start the site"]
    if not lost:
        assert "no longer contains" in cluster.warned[0]


# On several nodes


def test_a_push_whose_answer_was_lost_is_found_by_another_node(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with http_remote(cluster.root) as server:
        url, cluster.url = cluster.url, server.url(cluster.remote)

        def then_nothing(exchange: Exchange) -> None:
            cuts_after(exchange)
            server.behaviour = lambda each: each.hang_up()

        server.on_push = then_nothing
        with pytest.raises(PublishError) as failure:
            cluster.publish(a)
        assert failure.value.code is FailureCode.NETWORK
    cluster.url = url
    assert cluster.log() == ["Publish a", "Start the site"]
    (plan,) = cluster.plans(0).plans()
    # However much was published upon it, and whatever the node has of it.
    for number in range(3):
        cluster.person({"content/theirs.md": f"{number}\n"})
    for node in ("two", "three", "two"):
        assert cluster.resolve(node) == 1
        cluster.plans(cluster.take()).record(plan)


def test_an_edit_of_what_landed_unsettled_is_no_conflict_with_ourselves(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = blob_id(LINES.encode())
    first = cluster.save("b", {path: LINES + "one\n"}, bases={path: start})
    cluster.publish(first, settle=False)  # it landed, and the worker died before it could say so
    cluster.resolve("two")
    second = cluster.save("b", {path: LINES + "two\n"}, bases={path: start})
    for host in ("fresh", "one"):
        assert cluster.publish(second, node=host, settle=False)["b"].failure is None
    assert cluster.file(path) == LINES + "two\n"


def test_a_persons_edit_of_what_landed_unsettled_is_kept(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = blob_id(LINES.encode())
    cluster.publish(cluster.save("b", {path: LINES + "one\n"}, bases={path: start}), settle=False)
    cluster.resolve("two")
    cluster.person({path: "their first\n" + LINES + "one\n"})
    second = cluster.save("b", {path: LINES + "one and more\n"}, bases={path: start})
    assert cluster.publish(second, node="fresh")["b"].failure is None
    assert cluster.file(path) == "their first\n" + LINES + "one and more\n"


# What is sent: everything that the job declares, and nothing else


SAVED = 1_700_000_000.0


def gathered(root: Path, *paths: str, most: int = 1 << 20) -> Gathered:
    allowlist = Allowlist(["content", "media"])
    return gather(root, paths, allowlist=allowlist, max_bytes=most, saved_at=SAVED)


def blob_of(path: Path) -> str:
    done = subprocess.run(
        ["git", "hash-object", "--no-filters", str(path)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def put(root: Path, path: str, content: bytes = b"x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_a_clone_tells_which_version_the_author_started_from(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    site.write_post("content/posts/welcome.md", "# Changed\n")
    site.write_post("content/posts/new.md", "# New\n")
    found = gathered(site.worktree, "content/posts/welcome.md", "content/posts/new.md")
    was, new = found.payload.files
    assert (was.base, was.has_base) == (old, True)
    assert was.blob != old
    assert (new.base, new.has_base) == (None, True)


def test_a_deleted_file_is_gone_and_a_path_that_never_was_is_told(site: Site) -> None:
    old = blob_of(site.worktree / "content/posts/welcome.md")
    (site.worktree / "content/posts/welcome.md").unlink()
    found = gathered(site.worktree, "content/posts/welcome.md", "content/tpyo.md")
    gone, never = found.payload.files
    assert (gone.path, gone.blob, gone.base) == ("content/posts/welcome.md", None, old)
    assert (never.path, never.blob) == ("content/tpyo.md", None)
    assert found.missing == ("content/tpyo.md",)


def test_what_the_allowlist_refuses_is_declared_and_the_worker_says_why(tmp_path: Path) -> None:
    put(tmp_path, "content/a.md")
    found = gathered(tmp_path, "content", "content/.git/config", "elsewhere/b.md")
    assert found.paths == ("content", "content/.git/config", "elsewhere/b.md")
    assert (found.payload.folders, found.left_out) == (("content",), {})


@pytest.mark.parametrize("kind", ["link", "pipe", "repository"])
def test_a_folder_that_is_not_sent_whole_names_what_was_deleted_instead(site: Site, kind: str) -> None:
    """Of a folder that is sent whole, the site loses what was not sent: here that would be too much."""
    odd = site.worktree / "content/posts/odd"
    odd.symlink_to("welcome.md")
    site.write_post("content/posts/gone.md", "gone")
    site.git("add", "--all")
    site.git("commit", "--quiet", "-m", "Two more")
    (site.worktree / "content/posts/gone.md").unlink()
    if kind != "link":
        odd.unlink()
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "repository":
        site.git("init", "--quiet", "content/posts/odd")
    found = gathered(site.worktree, "content/posts")
    files = {file.path: file.blob is not None for file in found.payload.files}
    assert files == {"content/posts/welcome.md": True, "content/posts/gone.md": False}
    assert found.payload.folders == ()
    assert list(found.left_out) == ["content/posts/odd"]
    assert found.paths == ("content/posts",)


# A clone that is lost, damaged, or another's; and what opens its remote, which is never seen


SECRET = "s3cret-canary-0451"  # noqa: S105 - the canary


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
