"""What a cluster's jobs bring along, and how nodes publish it from clones that may be lost or damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest
import requirements
from links import link
from remotes import Exchange, HttpRemote, asks_for, cuts_after, http_remote, sshd

from briter_worker.allowlist import Allowlist
from briter_worker.client import compose
from briter_worker.cluster import sites
from briter_worker.cluster.submit import enqueue
from briter_worker.errors import FailureCode, PublishError
from briter_worker.git import clone
from briter_worker.git.payloads import Gathered, gather
from briter_worker.ports import Payload, blob_id
from briter_worker.queues.postgres.payloads import PayloadSource, submit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from cluster_farm import Farm
    from sites import Result, Site

LATE, PAST = "2099-01-01", "2020-01-01"
"""A job that was scheduled, for whenever, comes after those that were not."""
B = "content/posts/b.md"
LINES = "".join(f"line {n}\n" for n in range(20))


@pytest.fixture
def blog(farm: Farm) -> Site:
    """The one site of a cluster, with a few posts: its remote, and a clone in which people work."""
    farm.add("blog")
    site = farm.site("blog")
    site.git("config", "uploadpack.allowFilter", "true", cwd=site.remote)
    site.push_elsewhere({B: LINES})
    return site


def save(
    farm: Farm,
    slug: str,
    files: Mapping[str, str | None],
    *,
    folders: Sequence[str] = (),
    bases: Mapping[str, str | None] | None = None,
    at: str | None = None,
    also: Sequence[str] = (),
) -> None:
    """A CMS sends a post with all that it publishes, whatever the paths are."""
    contents = {path: None if text is None else text.encode() for path, text in files.items()}
    source = PayloadSource.of(contents)
    submitted = tuple(
        file._replace(base=(bases or {}).get(file.path), has_base=file.path in (bases or {}))
        for file in source.payload.files
    )
    document = compose(slug, [*(folders or files), *also], at=at)
    with farm.database.transaction() as connection:
        submit(connection, "blog", document, source._replace(payload=Payload(submitted, tuple(folders))))


def move(farm: Farm, remote: str, branch: str = "main", **credentials: str) -> None:
    site = sites.Site("blog", remote, branch, "local-mdx", credentials=credentials or None)
    sites.change(farm.database, site, farm.settings())


def clone_of(farm: Farm, host: str = "one") -> Path:
    """The folder in which this host has the site."""
    (found,) = (farm.root / "hosts" / host).rglob("clone.git")
    return found


# What jobs carry


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_what_a_job_brought_is_published_from_a_fresh_clone(farm: Farm, blog: Site, *, filters: bool) -> None:
    blog.git("config", "uploadpack.allowFilter", str(filters).lower(), cwd=blog.remote)
    save(farm, "a", {"content/posts/a.md": "A\n"})
    (published,) = farm.once().of("published")
    assert blog.remote_log()[0] == (published["commit"], "Publish a")
    assert blog.subjects() == ["Publish a", "Theirs", "Start the site"]
    assert (blog.remote_file("content/posts/a.md"), blog.remote_file(B)) == ("A\n", LINES)
    who = blog.git("show", "-s", "--format=%an %cn", "main", cwd=blog.remote)
    assert who == "Briter Worker Briter Worker"
    objects = blog.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)", cwd=clone_of(farm))
    assert (blob_id(LINES.encode()) in objects) is not filters


@pytest.mark.parametrize("declared", ["content/posts", "content/posts/x"])
def test_what_was_deleted_below_a_declared_folder_of_a_clone_is_deleted(
    farm: Farm, blog: Site, declared: str
) -> None:
    blog.push_elsewhere({"content/posts/x/gone.md": "gone\n"})
    blog.git("pull", "--quiet")
    blog.push_elsewhere({"content/posts/x/theirs.md": "theirs\n"})
    shutil.rmtree(blog.worktree / "content/posts/x")
    enqueue("x", [declared], site="blog", root=blog.worktree, settings=farm.settings())
    farm.once()
    assert blog.remote_file("content/posts/x/gone.md") is None
    assert blog.remote_file("content/posts/x/theirs.md") == "theirs\n"


def test_a_folder_takes_nothing_away_that_its_author_never_had(farm: Farm, blog: Site) -> None:
    save(farm, "c", {"content/x/c.md": "c\n"})
    farm.once()
    blog.push_elsewhere({"content/x/theirs.md": "theirs\n", "content/x/b.md": "b\n"})
    # The author's git has seen b, which is gone, and a; the worker has published c; theirs is nobody's here.
    bases = {"content/x/a.md": None, "content/x/b.md": blob_id(b"b\n")}
    save(farm, "x", {"content/x/a.md": "a\n", "content/x/b.md": None}, folders=["content/x"], bases=bases)
    farm.once()
    names = blog.git("ls-tree", "-r", "--name-only", "main", "content/x", cwd=blog.remote).splitlines()
    assert names == ["content/x/a.md", "content/x/theirs.md"]


def test_a_folder_never_carries_what_a_scheduled_post_declares(farm: Farm, blog: Site) -> None:
    files = {"content/posts/x/now.md": "now\n", "content/posts/x/later.md": "later\n"}
    save(farm, "later", {"content/posts/x/later.md": "later\n"}, at=LATE)
    save(farm, "x", files, folders=["content/posts/x"])
    farm.once()
    assert blog.remote_file("content/posts/x/now.md") == "now\n"
    assert blog.remote_file("content/posts/x/later.md") is None


def test_what_a_scheduled_post_withholds_goes_out_with_its_job_when_that_is_cancelled(
    farm: Farm, blog: Site
) -> None:
    files = {"content/posts/x/now.md": "now\n", "content/posts/x/later.md": "later\n"}
    save(farm, "later", {"content/posts/x/later.md": "later\n"}, at="2099-01-01T00:00:00Z")
    save(farm, "x", files, folders=["content/posts/x"])
    (published,) = farm.once().of("published")
    assert published["waitingPaths"] == ["content/posts/x"]
    (row,) = farm.command("list", "--site", "blog", "--status", "pending", "--json").json()
    assert (row["slug"], row["paths"], row["attempts"]) == ("x", ["content/posts/x"], 0)
    assert farm.command("cancel", "later", "--site", "blog").returncode == 0
    assert [each["slug"] for each in farm.once().of("published")] == ["x"]
    assert blog.remote_file("content/posts/x/later.md") == "later\n"
    assert farm.command("list", "--site", "blog", "--json").json() == []


def test_a_deletion_of_what_nobody_ever_had_is_never_missing(farm: Farm, blog: Site) -> None:  # noqa: ARG001
    save(farm, "a", {"content/never.md": None})
    assert [each["slug"] for each in farm.once().of("nochange")] == ["a"]


def test_a_declared_path_without_a_content_is_missing(farm: Farm, blog: Site) -> None:
    save(farm, "a", {"content/a.md": "a\n"}, also=["content/never.md"])
    (published,) = farm.fail_once().of("published")
    assert published["waitingPaths"] == ["content/never.md"]
    assert blog.remote_file("content/a.md") == "a\n"


def test_what_is_not_allowed_is_refused_with_the_reason_and_never_written(farm: Farm, blog: Site) -> None:
    refused = ("../../escaped.md", "content/.git/config", "x.md")
    save(farm, "a", {"content/a.md": "A\n", **dict.fromkeys(refused, "no\n")})
    (published,) = farm.once().of("published")
    assert set(published["rejectedPaths"]) == set(refused)
    assert blog.git("show", "--format=", "--name-only", "main", cwd=blog.remote) == "content/a.md"
    assert not list(farm.root.rglob("escaped.md"))


@pytest.mark.parametrize("at", [LATE, PAST], ids=["published before", "in the same batch"])
def test_an_older_save_takes_no_newer_version_away(farm: Farm, blog: Site, at: str) -> None:
    save(farm, "old", {"content/a.md": "old\n", "content/only.md": "only\n"}, at=at)
    save(farm, "gone", {"content/b.md": None}, at=at)
    save(farm, "folder", {"content/x/1.md": "1\n"}, folders=["content/x"], at=at)
    save(farm, "new", {"content/a.md": "new\n", "content/b.md": "new\n", "content/x/2.md": "2\n"})
    assert farm.once().of("published")[0]["slug"] == "new"
    for slug in ("old", "gone", "folder") if at == LATE else ():
        assert farm.command("publish-now", slug, "--site", "blog").returncode == 0
    farm.once()
    assert farm.rows() == 0
    for path, text in (("a", "new\n"), ("b", "new\n"), ("only", "only\n"), ("x/1", "1\n"), ("x/2", "2\n")):
        assert blog.remote_file(f"content/{path}.md") == text, path


def test_of_two_folders_in_a_batch_the_newer_one_counts_whichever_comes_first(farm: Farm, blog: Site) -> None:
    files = {"content/x/a.md": "old\n", "content/x/b.md": "gone since\n"}
    save(farm, "old", files, folders=["content/x"], at=PAST)
    save(farm, "new", {"content/x/a.md": "new\n"}, folders=["content/x"])
    assert [event["slug"] for event in farm.once().of("start")] == ["new", "old"]
    assert blog.remote_file("content/x/a.md") == "new\n"
    assert blog.remote_file("content/x/b.md") is None


def test_what_the_site_ignores_is_refused_unless_git_has_it(farm: Farm, blog: Site) -> None:
    blog.push_elsewhere({"content/tracked.tmp": "tracked\n"})
    blog.push_elsewhere({".gitignore": "*.tmp\n", "content/posts/.gitignore": "draft-*\n"})
    save(farm, "ignored", {"content/a.tmp": "no\n"})
    save(farm, "draft", {"content/posts/draft-a.md": "no\n"})
    save(farm, "tracked", {"content/tracked.tmp": "new\n"})
    save(farm, "folder", {"content/y/a.md": "a\n", "content/y/b.tmp": "no\n"}, folders=["content/y"])
    assert {event["slug"] for event in farm.fail_once().of("nopaths")} == {"ignored", "draft"}
    assert blog.remote_file("content/tracked.tmp") == "new\n"
    assert blog.git("ls-tree", "--name-only", "main", "content/y/", cwd=blog.remote) == "content/y/a.md"


# Beside other people


def test_what_the_author_started_from_is_merged_with_where_it_is_known(farm: Farm, blog: Site) -> None:
    blog.push_elsewhere({B: LINES.replace("line 1\n", "line one\n")})
    mine = LINES.replace("line 18\n", "line eighteen\n")
    save(farm, "b", {B: mine}, bases={B: blob_id(LINES.encode())})
    farm.once()
    assert blog.remote_file(B) == mine.replace("line 1\n", "line one\n")


def test_a_deleted_branch_is_not_recreated(farm: Farm, blog: Site) -> None:
    save(farm, "a", {"content/a.md": "A\n"})
    farm.once()
    blog.git("update-ref", "-d", "refs/heads/main", cwd=blog.remote)
    save(farm, "c", {"content/c.md": "C\n"})
    for host in ("one", "fresh"):
        (failed,) = farm.fail_once(host).of("failed")
        assert (failed["failure"], "no branch main" in failed["error"]) == ("remote-rewritten", True)
        farm.command("retry", "c", "--site", "blog")
    assert blog.git("for-each-ref", cwd=blog.remote) == ""


@pytest.mark.parametrize("host", ["one", "fresh"])
def test_a_rewritten_branch_is_built_upon_and_never_set_back(farm: Farm, blog: Site, host: str) -> None:
    first = blog.remote_log()[0][0]
    save(farm, "a", {"content/a.md": "A\n"})
    farm.once()
    blog.git("update-ref", "refs/heads/main", first, cwd=blog.remote)
    blog.git("reset", "-q", "--hard", first, cwd=blog.root / "other")
    blog.push_elsewhere({"content/theirs.md": "theirs\n"})
    save(farm, "c", {"content/c.md": "C\n"})
    done = farm.once(host)
    assert blog.subjects() == ["Publish c", "Theirs", "Theirs", "Start the site"]
    assert host == "fresh" or "no longer contains" in done.of("warning")[0]["error"]


@pytest.fixture
def http(farm: Farm, blog: Site) -> Iterator[HttpRemote]:
    """The site's remote, reached by HTTP."""
    with http_remote(farm.root / "sites") as server:
        move(farm, server.url(blog.remote))
        yield server


@pytest.mark.parametrize("host", ["one", "fresh"])
def test_a_push_whose_answer_was_lost_is_found_by_any_node_and_the_next_save_is_an_edit_of_it(
    farm: Farm, blog: Site, http: HttpRemote, host: str
) -> None:
    start = blob_id(LINES.encode())
    save(farm, "b", {B: LINES + "one\n"}, bases={B: start})

    def then_nothing(exchange: Exchange) -> None:
        cuts_after(exchange)
        http.behaviour = Exchange.hang_up

    http.on_push = then_nothing
    farm.fail_once()
    commit = blog.remote_log()[0][0]
    for number in range(3):  # however much was published upon it
        blog.push_elsewhere({B: f"their {number}\n" + LINES + "one\n"})
    http.heal()
    save(farm, "b", {B: LINES + "one and more\n"}, bases={B: start})
    first, second = farm.once(host).of("published")
    assert (first["commit"], second["commit"]) == (commit, blog.remote_log()[0][0])
    assert blog.remote_file(B) == "their 2\n" + LINES + "one and more\n"


# What is sent: everything that the job declares, and nothing else


def gathered(root: Path, *paths: str) -> Gathered:
    return gather(root, paths, allowlist=Allowlist(["content"]), max_bytes=1 << 20)


def test_a_clone_tells_which_version_the_author_started_from(site: Site) -> None:
    old = blob_id(b"# Welcome\n")
    site.write_post("content/posts/welcome.md", "# Changed\n")
    site.write_post("content/posts/new.md", "# New\n")
    found = gathered(site.worktree, "content/posts/welcome.md", "content/posts/new.md")
    was, new = found.payload.files
    assert (was.base, was.has_base) == (old, True)
    assert was.blob != old
    assert (new.base, new.has_base) == (None, True)


def test_a_deleted_file_is_gone_and_a_path_that_never_was_is_told(site: Site) -> None:
    old = blob_id(b"# Welcome\n")
    (site.worktree / "content/posts/welcome.md").unlink()
    found = gathered(site.worktree, "content/posts/welcome.md", "content/tpyo.md")
    gone, never = found.payload.files
    assert (gone.path, gone.blob, gone.base) == ("content/posts/welcome.md", None, old)
    assert (never.path, never.blob) == ("content/tpyo.md", None)
    assert found.missing == ("content/tpyo.md",)


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
def test_a_clone_that_is_lost_or_damaged_costs_no_attempt(farm: Farm, blog: Site, damage: str) -> None:
    save(farm, "a", {"content/posts/a.md": "A\n"})
    farm.once()
    found = clone_of(farm)
    env = os.environ | {"node": str(found.parent), "clone": str(found), "remote": str(blog.remote)}
    subprocess.run(["sh", "-euc", DAMAGES[damage]], env=env, check=True)
    save(farm, "c", {"content/posts/c/c.md": "C\n"}, folders=["content/posts/c"])
    assert [event["attempt"] for event in farm.once().of("published")] == [1]
    assert blog.subjects() == ["Publish c", "Publish a", "Theirs", "Start the site"]
    assert blog.remote_file(B) == LINES
    blog.git("fsck", "--strict", "--no-dangling", cwd=blog.remote)


def test_a_clone_of_another_address_or_branch_is_not_used(farm: Farm, blog: Site) -> None:
    save(farm, "a", {"content/a.md": "A\n"})
    farm.once()
    farm.add("other")
    move(farm, str(farm.remote("other")))
    save(farm, "c", {"content/c.md": "C\n"})
    farm.once()
    assert farm.site("other").subjects() == ["Publish c", "Start the site"]
    blog.git("branch", "drafts", "main~1", cwd=blog.remote)
    move(farm, str(blog.remote), "drafts")
    save(farm, "d", {"content/d.md": "D\n"})
    farm.once()
    assert blog.subjects("drafts") == ["Publish d", "Theirs", "Start the site"]
    assert blog.subjects() == ["Publish a", "Theirs", "Start the site"]


@pytest.mark.parametrize("made_before", [False, True], ids=["before it is made", "while posts are written"])
def test_a_full_disk_under_the_clone_is_the_nodes_condition(
    farm: Farm, blog: Site, *, made_before: bool
) -> None:
    with requirements.small(farm.root / "cache", size="4m") as place:
        cache = {"BRITER_CACHE_ROOT": str(place)}
        if made_before:
            save(farm, "b", {"content/b.md": "B\n"})
            farm.once(**cache)
        save(farm, "a", {"content/a.md": "A\n" * 100_000})
        with requirements.full(place):
            done = farm.fail_once(**cache)
        assert "takes no sites" in done.of("warning")[0]["error"]
        assert [event["attempt"] for event in farm.once(**cache).of("published")] == [1]
    assert blog.remote_file("content/a.md") == "A\n" * 100_000


def test_a_drain_with_a_clone_only_pushes(farm: Farm, http: HttpRemote) -> None:
    save(farm, "a", {"content/a.md": "A\n"})
    farm.once()
    http.asked.clear()
    save(farm, "c", {"content/c.md": "C\n"})
    farm.once()
    assert http.asked == ["GET git-receive-pack", "POST git-receive-pack"]


# Its credentials


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_credential_is_used_and_is_nowhere_to_be_seen(
    farm: Farm, blog: Site, http: HttpRemote, kind: str
) -> None:
    serve = asks_for("blog", SECRET)
    seen: list[str] = []

    def look(exchange: Exchange) -> None:
        for process in psutil.process_iter(["cmdline"]):
            seen.extend(process.info["cmdline"] or ())
        serve(exchange)

    def publish(slug: str, token: str, host: str) -> Result:
        (farm.root / "token").write_text(f"{token}\n")
        save(farm, slug, {f"content/{slug}.md": f"{slug}\n"})
        return farm.command("run", "--once", host=host, BLOG_TOKEN=token)

    http.behaviour = look
    place = {"env": "BLOG_TOKEN", "file": str(farm.root / "token")}[kind]
    move(farm, http.url(blog.remote), **{kind: place}, username="blog")
    said = publish("a", SECRET, "one")
    assert said.of("published")
    assert not [word for word in seen if SECRET in word]
    assert any("git-remote-http" in word for word in seen)
    for file in (farm.root / "hosts").rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    http.behaviour = asks_for("blog", "rotated-token")
    refused = publish("c", SECRET, "two")
    assert [event["failure"] for event in refused.of("failed")] == ["auth"]
    assert SECRET not in said.stdout + said.stderr + refused.stdout + refused.stderr
    # Rotated: the next publication reads it anew.
    assert "d" in [event["slug"] for event in publish("d", "rotated-token", "two").of("published")]


def test_no_helper_of_the_node_is_told_the_credential(farm: Farm, blog: Site, http: HttpRemote) -> None:
    home = farm.root / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[credential]\n\thelper = store\n")
    http.behaviour = asks_for("x-access-token", SECRET)
    move(farm, http.url(blog.remote), env="BLOG_TOKEN")
    save(farm, "a", {"content/a.md": "A\n"})
    assert farm.once(HOME=str(home), BLOG_TOKEN=SECRET).of("published")
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


def test_an_ssh_key_is_used_by_its_place(farm: Farm, blog: Site) -> None:
    with sshd(farm.root / "ssh") as host:
        key = host.folder / "client"
        key.rename(host.folder / "deploy key")
        home = farm.root / "home"
        home.mkdir()
        ssh = host.command.replace(f"-i {key} ", "").replace(f"-p {host.port} ", "")
        (home / ".gitconfig").write_text(f'[core]\n\tsshCommand = "{ssh}"\n')
        url = f"ssh://127.0.0.1:{host.port}{blog.remote}"
        move(farm, url, sshKey=str(host.folder / "deploy key"))
        save(farm, "a", {"content/a.md": "A\n"})
        assert farm.once(HOME=str(home)).of("published")
        move(farm, url)
        save(farm, "c", {"content/c.md": "C\n"})
        assert farm.fail_once(HOME=str(home)).of("failed")[0]["failure"] == "auth"


@pytest.mark.parametrize(("other_key", "connections"), [("client", 3), ("other", 4)])
def test_sites_of_a_host_share_a_connection_only_if_they_use_one_key(
    farm: Farm, other_key: str, connections: int
) -> None:
    """Each clone opens a connection of its own."""
    farm.add("blog", "shop")
    with sshd(farm.root / "ssh") as server, link(server.port) as line:
        host = replace(server, port=line.port)
        host.introduce()
        host.make_key("other")
        known = [(host.folder / f"{name}.pub").read_text() for name in ("client", "other")]
        (host.folder / "authorized_keys").write_text("".join(known))
        home = farm.root / "home"
        home.mkdir()
        ssh = host.command.replace(f"-i {host.folder}/client ", "").replace(f"-p {host.port} ", "")
        (home / ".gitconfig").write_text(f'[core]\n\tsshCommand = "{ssh}"\n')
        for name, key in (("blog", "client"), ("shop", other_key)):
            url = f"ssh://127.0.0.1:{host.port}{farm.remote(name)}"
            site = sites.Site(name, url, "main", "local-mdx", credentials={"sshKey": str(host.folder / key)})
            sites.change(farm.database, site, farm.settings())
            farm.save(name, "a")
        done = farm.once(HOME=str(home), BRITER_WORKER_CONCURRENCY="1")
        assert len(done.of("published")) == 2
        assert line.connections == connections
