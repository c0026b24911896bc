"""Posts of many sites on their remotes: everything real, hosts as processes."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import Counter
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cluster_farm import AHEAD, Farm
from postgres import count_rows, execute
from requirements import full, small
from sites import events_in, eventually, write_files

from briter_worker.client import compose
from briter_worker.cluster import sites
from briter_worker.cluster.health import Health, describe_node, host_of, report_node, running_nodes
from briter_worker.cluster.leases import Leases
from briter_worker.cluster.submit import enqueue, send
from briter_worker.errors import Failure, FailureCode
from briter_worker.queues.postgres.database import Database
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from postgres import Server


def test_one_run_brings_all_that_is_due_on_all_sites_to_their_remotes(farm: Farm) -> None:
    farm.add("blog", "shop")
    for number in range(3):
        farm.save("blog", f"post{number}")
    farm.save("shop", "offer")
    farm.save("shop", "later", at=datetime.now(UTC) + timedelta(days=1))
    done = farm.once()
    assert farm.published("blog") == Counter({"post0": 1, "post1": 1, "post2": 1})
    assert farm.published("shop") == Counter({"offer": 1})
    assert farm.rows() == 1
    told = [(each["site"], each["slug"]) for each in events_in(done.stdout) if each["event"] == "published"]
    assert sorted(told) == [("blog", "post0"), ("blog", "post1"), ("blog", "post2"), ("shop", "offer")]
    assert farm.once().names() == ["worker-started", "worker-stopped"]


def test_a_plan_that_nobody_works_on_is_completed(farm: Farm) -> None:
    farm.add("blog")
    farm.save("blog", "hello")
    farm.once()
    tip = farm.site("blog").remote_log()[0][0]
    plan = {"id": "left", "base": None, "tip": tip, "commits": {"1": tip}, "blobs": {}}
    execute(farm.database, "INSERT INTO plans (site, id, plan) VALUES ('blog', 'left', %s)", json.dumps(plan))
    farm.once()
    assert count_rows(farm.database, "plans") == 0


def test_one_run_brings_more_than_one_drain_of_a_site_takes(farm: Farm) -> None:
    farm.add("blog")
    for number in range(501):
        farm.save("blog", f"post{number}")
    farm.once()
    assert (farm.rows(), farm.published("blog").total()) == (0, 501)


def test_a_page_is_published_without_what_its_site_excludes(farm: Farm) -> None:
    page = "content/hello"
    farm.add("blog", excludedPaths=["_changes/", ".lock"])
    blog = farm.site("blog")
    blog.push_elsewhere({f"{page}/.lock": "old\n", f"{page}/_changes/note.txt": "old\n"})
    root = blog.colleague()
    new = ("note.txt", "_changes/new.txt", "sub/_changes/new.txt", "note.txt~", ".DS_Store")
    write_files(root / page, {**dict.fromkeys(new, "new\n"), ".lock": None, "_changes/note.txt": None})
    assert enqueue("hello", [page], site="blog", root=root, settings=farm.settings()).left_out == {}
    with pytest.raises(ValueError, match="the pattern _changes/ excludes it"):
        enqueue("b", files={f"{page}/_changes/b.txt": b"x"}, site="blog", settings=farm.settings())
    done = farm.once()
    assert "rejectedPaths" not in done.stdout
    tree = blog.git("ls-tree", "-r", "--name-only", f"main:{page}", cwd=blog.remote).split()
    assert sorted(tree) == [".lock", "_changes/note.txt", "note.txt"]
    assert blog.remote_file(f"{page}/.lock") == "old\n"


@pytest.mark.parametrize("size", [3, 5 << 20], ids=["staged from memory", "read by git"])
def test_a_file_that_its_author_made_executable_stays_so(farm: Farm, size: int) -> None:
    farm.add("blog")
    root = farm.site("blog").colleague()
    for name, mode in (("run", 0o755), ("text", 0o644)):
        (root / f"content/{name}").write_bytes(b"x" * size)
        (root / f"content/{name}").chmod(mode)
    enqueue("files", ["content/run", "content/text"], site="blog", root=root, settings=farm.settings())
    farm.once()
    tree = farm.site("blog").git("ls-tree", "main:content", cwd=farm.remote("blog"))
    modes = {line.split("\t")[1]: line.split()[0] for line in tree.splitlines()}
    assert (modes["run"], modes["text"]) == ("100755", "100644")


def test_the_attributes_of_the_branch_hold_for_what_is_submitted(farm: Farm) -> None:
    farm.add("blog")
    farm.site("blog").push_elsewhere({".gitattributes": "*.md text eol=lf\n"})
    enqueue("a", files={"content/a.md": b"one\r\ntwo\r\n"}, site="blog", settings=farm.settings())
    farm.once()
    assert farm.site("blog").remote_file("content/a.md") == "one\ntwo\n"


def test_no_clock_but_the_databases_decides_what_is_due_and_which_save_is_newer(farm: Farm) -> None:
    farm.add("blog")
    settings = sites.settings_of(sites.get(farm.database, "blog"), farm.settings())
    for text, ahead in ((b"one\n", 3600), (b"two\n", 0)):
        document = compose("post", ["content/post.md"])
        document["createdAt"] = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        send(settings, document, files={"content/post.md": text})
        farm.once(**AHEAD)
        assert farm.site("blog").remote_file("content/post.md") == text.decode()
    farm.save("blog", "later", at=datetime.now(UTC) + timedelta(hours=1))
    farm.once(**AHEAD)
    assert farm.published("blog") == Counter({"Publish post": 2})
    clock = farm.command("doctor", "--json", **AHEAD).finding("clock")
    assert (clock["state"], "+7200 s off" in clock["message"]) == ("warning", True)


def test_a_site_whose_remote_is_gone_fails_alone(farm: Farm) -> None:
    farm.add("blog", "shop")
    farm.remote("blog").rename(farm.remote("blog").with_name("elsewhere.git"))
    farm.save("blog", "post")
    farm.save("shop", "offer")
    done = farm.fail_once(BRITER_WORKER_BACKOFF_MS="60000")
    assert farm.published("shop") == Counter({"offer": 1})
    (failed,) = done.of("failed")
    assert (failed["site"], failed["slug"]) == ("blog", "post")
    # And when the remote is back, it is published.
    farm.remote("blog").with_name("elsewhere.git").rename(farm.remote("blog"))
    execute(farm.database, "UPDATE publications SET next_attempt_at = 1")
    farm.once()
    assert farm.published("blog") == Counter({"post": 1})


def test_what_others_did_is_merged_also_where_another_host_published_before(farm: Farm) -> None:
    farm.add("blog")
    lines = [f"line {number}\n" for number in range(9)]
    farm.save("blog", "post", "".join(lines))
    farm.once("one")
    farm.site("blog").push_elsewhere({"content/post.md": "".join(["theirs\n", *lines[1:]])})
    farm.save("blog", "post", "".join([*lines[:8], "ours\n"]))
    farm.once("two")
    assert farm.site("blog").remote_file("content/post.md") == "".join(["theirs\n", *lines[1:8], "ours\n"])
    # The CMS knows nothing of theirs; its next save is no edit of it all the same.
    farm.save("blog", "post", "".join([*lines[:7], "ours\n", "ours\n"]))
    farm.once("three")
    assert farm.site("blog").remote_file("content/post.md") == "".join(
        ["theirs\n", *lines[1:7], "ours\n", "ours\n"]
    )


def test_a_save_is_on_the_remote_within_a_second_while_a_host_runs(farm: Farm) -> None:
    farm.add("blog")
    host = farm.start("one", BRITER_WORKER_POLL_INTERVAL_MS="60000")
    farm.save("blog", "first")
    eventually(lambda: farm.published("blog")["first"] == 1)
    began = time.monotonic()
    farm.save("blog", "second")
    eventually(lambda: farm.published("blog")["second"] == 1)
    assert time.monotonic() - began < 20, host.text()  # 0.3 s where nothing else runs


def test_a_save_during_a_drain_of_its_site_is_published_when_the_drain_ends(farm: Farm) -> None:
    farm.add("blog")
    push = farm.site("blog").hold_push()
    host = farm.start("one", BRITER_WORKER_POLL_INTERVAL_MS="300000")
    farm.save("blog", "first")
    push.wait()
    farm.save("blog", "second")
    push.release()
    eventually(lambda: farm.published("blog")["second"] == 1)
    assert "worker-stopped" not in host.text()


def test_a_host_that_is_told_to_stop_finishes_its_push(farm: Farm) -> None:
    farm.add("blog")
    push = farm.site("blog").hold_push()
    host = farm.start("one")
    farm.save("blog", "post")
    push.wait()
    host.process.terminate()
    eventually(lambda: "worker-stopping" in host.text())
    push.release()
    assert host.process.wait(60) == 0
    assert farm.published("blog") == Counter({"post": 1})
    assert farm.rows() == 0
    assert [each["event"] for each in events_in(host.text())][-1] == "worker-stopped"


def test_a_host_that_is_told_to_stop_gives_up_a_push_that_takes_too_long(farm: Farm) -> None:
    farm.add("blog")
    push = farm.site("blog").hold_push()
    host = farm.start("one", BRITER_WORKER_SHUTDOWN_TIMEOUT_MS="500")
    farm.save("blog", "post")
    push.wait()
    host.process.terminate()
    assert host.process.wait(60) == 0
    push.remove()
    assert farm.rows() == 1
    farm.once("two")
    assert farm.published("blog") == Counter({"post": 1})


def node_findings(farm: Farm) -> list[str]:
    """What the doctor has to say of the nodes."""
    found = farm.command("doctor", "--json").json()["findings"]
    return [each["message"] for each in found if each["check"] == "nodes"]


@pytest.mark.slow
def test_a_sick_node_leaves_the_sites_to_others_at_no_attempt_and_comes_back(farm: Farm) -> None:
    names = [f"site{number}" for number in range(6)]
    farm.add(*names)
    cache = farm.root / "hosts" / "sick" / "cache"
    with small(cache, size="20m"), ExitStack() as disk:
        disk.enter_context(full(cache))
        sick = farm.start("sick", BRITER_CACHE_ROOT=str(cache), BRITER_WORKER_MAX_ATTEMPTS="1")
        for name in names:
            farm.save(name, "one")
        eventually(lambda: "this node takes no sites" in sick.text())
        eventually(lambda: any(node.facts["problem"] for node in running_nodes(farm.database)))
        assert any("takes no sites" in text for text in node_findings(farm))
        well = farm.start("well", BRITER_WORKER_MAX_ATTEMPTS="1")
        eventually(lambda: farm.rows() == 0)
        assert not {"failed", "dead-lettered", "published"} & {
            each["event"] for each in events_in(sick.text())
        }
        shutil.rmtree(farm.root / "hosts/well/storage/cache", ignore_errors=True)  # anybody may, at any time
        for name in names:
            farm.save(name, "two")
        eventually(lambda: farm.rows() == 0)
        well.end()
        disk.close()
        for name in names:
            farm.save(name, "three")
        eventually(lambda: farm.rows() == 0)
    assert all(farm.published(name) == Counter({"one": 1, "two": 1, "three": 1}) for name in names)
    assert not {"failed", "dead-lettered"} & {each["event"] for each in events_in(sick.text() + well.text())}
    assert "this node takes sites again" in sick.text()


def test_without_network_no_node_counts_an_attempt_and_one_hosts_failure_is_that_hosts(farm: Farm) -> None:
    failure = Failure(FailureCode.NETWORK, "Could not resolve host", "")
    health = Health(farm.settings(), lambda _: None)
    assert not health.blames_node("a", "one.example", failure)
    assert not health.blames_node("b", "one.example", failure)
    health.succeed("c")
    assert not health.blames_node("b", "two.example", failure)
    assert health.blames_node("a", "one.example", failure)
    assert health.problem is not None
    health.probe()
    assert health.problem is None
    assert health.blames_node("c", "one.example", failure)  # nothing was reached since


def test_a_node_counts_as_alive_although_postgress_clock_was_set_forward(farm: Farm) -> None:
    farm.database.set_clock(farm.database.read_clock() - 60)  # as it was read before
    facts = describe_node(farm.settings(), Health(farm.settings(), lambda _: None), farm.database)
    report_node(farm.database, "one", facts)
    assert [node.name for node in running_nodes(farm.database)] == ["one"]


@pytest.mark.parametrize("ports", [1, 6], ids=["one host", "many hosts"])
def test_remotes_that_hang_starve_no_other_site(farm: Farm, ports: int) -> None:
    farm.add("blog")
    with ExitStack() as stack:
        found = [stack.enter_context(closing(socket.create_server(("127.0.0.1", 0)))) for _ in range(ports)]
        hanging = [(f"hangs{number}", found[number % ports].getsockname()[1]) for number in range(6)]
        for name, port in hanging:
            site = sites.Site(name, f"git://127.0.0.1:{port}/site.git", "main", "local-mdx")
            sites.add(farm.database, site, farm.settings())
            farm.save(name, "post")
        farm.start("one", "--workers", "2", BRITER_GIT_TIMEOUT_MS="60000")
        for number in range(3):
            farm.save("blog", f"post{number}")
            eventually(lambda: farm.published("blog").total() > number)  # noqa: B023 - used at once


def test_a_site_whose_drain_crawled_comes_from_the_lane_of_slow_ones_until_it_is_fast(farm: Farm) -> None:
    farm.add("blog")
    leases = Leases(farm.database, "node", farm.settings())

    def takes(*, slow: bool) -> bool:
        """Return True if the lane takes the site; it does not keep it."""
        with farm.database.connection() as connection:
            row = leases.take(connection, is_steady=True, besides=(), lanes=[slow])
        if row is not None:
            leases.release("blog", row["token"], is_slow=row["slow"])
        return row is not None

    farm.save("blog", "post")
    assert (takes(slow=False), takes(slow=True)) == (True, False)
    execute(farm.database, "UPDATE sites SET slow = true")
    assert (takes(slow=False), takes(slow=True)) == (False, True)
    farm.once()
    farm.save("blog", "again")
    assert (takes(slow=False), takes(slow=True)) == (True, False)


@pytest.mark.parametrize(
    ("remote", "host"),
    [
        ("https://git.example.org:8443/a.git", "git.example.org:8443"),
        ("https://Git.Example.org/a.git", "git.example.org"),
        ("ssh://git@git.example.org:22/a.git", "git.example.org:22"),
        ("git@git.example.org:a/b.git", "git.example.org"),
        ("git://[::1]:9418/a.git", "[::1]:9418"),
        ("/srv/a.git", ""),
        ("file:///srv/a.git", ""),
    ],
)
def test_the_host_of_a_remote(remote: str, host: str) -> None:
    assert host_of(remote) == host


def test_a_node_that_differs_is_named(farm: Farm) -> None:
    live, dry = farm.start("live"), farm.start("dry", BRITER_WORKER_DRY_RUN="true")
    eventually(lambda: len(running_nodes(farm.database)) == len((live, dry)))
    third = farm.start("third")
    eventually(lambda: len(running_nodes(farm.database)) == len((live, dry, third)))
    name = f":{dry.process.pid} is in dry run, unlike other nodes"
    assert any(text.endswith(name) for text in node_findings(farm))


def test_containers_of_one_name_are_nodes_of_their_own(farm: Farm) -> None:
    (farm.root / "sitecustomize.py").write_text("import os\nos.getpid = lambda: 1\n")
    for host in ("one", "two"):
        farm.start(host, PYTHONPATH=str(farm.root))
    eventually(lambda: len(running_nodes(farm.database)) == 2)


def test_a_node_that_starts_while_postgres_is_away_waits(farm: Farm, postgres_server: Server) -> None:
    farm.add("blog")
    farm.save("blog", "post")
    postgres_server.stop()
    try:
        node = farm.start("one")
        eventually(lambda: "Postgres does not answer" in node.text())
    finally:
        postgres_server.start()
    eventually(lambda: farm.published("blog")["post"] == 1)


def test_a_node_ends_soon_although_postgres_is_away(farm: Farm, postgres_server: Server) -> None:
    node = farm.start("one")
    eventually(lambda: running_nodes(farm.database))
    postgres_server.stop()
    try:
        eventually(lambda: "Postgres does not answer" in node.text())
        node.process.terminate()
        assert node.process.wait(8) == 0
    finally:
        postgres_server.start()


@pytest.mark.parametrize("way", ["fresh", "another clone is behind", "db restored"])
def test_a_restored_backup_never_reverts_a_post(farm: Farm, postgres_server: Server, way: str) -> None:
    farm.add("blog")
    farm.save("blog", "post", "v0\n")
    farm.once("one")
    farm.save("blog", "post", "v1\n")
    farm.save("blog", "other", "other\n")
    for database in (farm.database, open_database(farm.settings())):
        database.close()  # a database in use cannot be copied
    postgres_server.create("backup", farm.url.rpartition("/")[2])
    try:
        farm.once("two" if way == "another clone is behind" else "one")
        farm.save("blog", "post", "v2\n")
        farm.once("two" if way == "another clone is behind" else "one")
        farm.url = postgres_server.url("backup")
        farm.database = Database(farm.url)
        if way == "db restored":
            found = farm.command("db", "restored", "--json", host="new").json()
            assert [(each["slug"], each["path"]) for each in found["outdated"]] == [
                ("post", "content/post.md")
            ]
            assert (found["compared"], found["unchecked"]) == (1, {})
        done = farm.fail_once("fresh" if way == "fresh" else "one")
        (letter,) = done.of("dead-lettered")
        assert (letter["slug"], letter["failure"]) == ("post", "outdated"), done.stdout
        assert farm.site("blog").git("rev-parse", "main", cwd=farm.remote("blog"))[:10] in letter["error"]
        assert (farm.site("blog").remote_file("content/post.md"), farm.rows()) == ("v2\n", 1)
        assert farm.command("publish-now", "post", "--over", "--site", "blog").returncode == 0
        farm.once("one")
        assert farm.site("blog").remote_file("content/post.md") == "v1\n"
        farm.save("blog", "post", "v3\n")
        farm.once("one")
        assert (farm.site("blog").remote_file("content/post.md"), farm.rows()) == ("v3\n", 0)
    finally:
        open_database(farm.settings()).close()
        farm.database.close()
        postgres_server.drop("backup")


def test_one_site_with_unreadable_settings_stops_nobodys_housekeeping(farm: Farm) -> None:
    farm.add("bad", "blog")
    farm.add("shop", historyKeepDays="20000")
    execute(farm.database, """UPDATE sites SET settings = '{"historyKeepDays": "soon"}' WHERE name = 'bad'""")
    row = "INSERT INTO attempts (site, job_id, slug, outcome, ended) VALUES (%s, 'a', 'a', 'published', 5)"
    for name in ("bad", "blog", "shop"):
        execute(farm.database, row, name)

    def kept() -> list[str]:
        with farm.database.connection() as connection:
            return [name for (name,) in connection.execute("SELECT site FROM attempts ORDER BY site")]

    node = farm.start("one")
    eventually(lambda: "old receipts of the site bad are not deleted" in node.text())
    eventually(lambda: kept() == ["bad"])
    farm.save("blog", "hello")
    eventually(lambda: farm.published("blog").total() == 1)
