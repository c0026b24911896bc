"""A person pushes, or rewrites the branch, where the worker has only a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from caches import LINES, Cluster, named, small
from faults.servers import Exchange, http_remote, serve

from briter_worker.errors import Failure, PublishError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return small(tmp_path)


def test_a_persons_commit_is_built_upon(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.person({"content/theirs.md": "theirs\n"})
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert cluster.log() == ["Publish c", "Somebody else's", "Publish a", "Start the site"]


def test_lines_of_one_post_are_merged_with_a_persons(cluster: Cluster) -> None:
    cluster.publish(cluster.save("b", {"content/posts/b.md": LINES + "first\n"}))
    cluster.person({"content/posts/b.md": LINES.replace("line 1\n", "line one\n") + "first\n"})
    mine = LINES.replace("line 12\n", "line twelve\n") + "first\n"
    outcome = cluster.publish(cluster.save("b", {"content/posts/b.md": mine}), host="two")["b"]
    assert outcome.failure is None
    merged = mine.replace("line 1\n", "line one\n")
    assert cluster.file("content/posts/b.md") == merged
    # The CMS has not got the person's line: its next edit is still one of its own version.
    cluster.publish(cluster.save("b", {"content/posts/b.md": mine + "more\n"}), host="three")
    assert cluster.file("content/posts/b.md") == merged + "more\n"


def test_what_the_author_started_from_is_merged_with_where_it_is_known(cluster: Cluster) -> None:
    cluster.person({"content/posts/b.md": LINES.replace("line 1\n", "line one\n")})
    mine = LINES.replace("line 18\n", "line eighteen\n")
    request = cluster.save(
        "b", {"content/posts/b.md": mine}, bases={"content/posts/b.md": named(LINES.encode())}
    )
    assert cluster.publish(request)["b"].failure is None
    assert cluster.file("content/posts/b.md") == mine.replace("line 1\n", "line one\n")


def test_a_conflict_concerns_its_own_post_alone_and_the_next_save_resolves_it(cluster: Cluster) -> None:
    cluster.publish(cluster.save("w", {"content/posts/welcome.md": "# Hello\n"}))
    cluster.person({"content/posts/welcome.md": "# Theirs\n"})
    ours = {"content/posts/welcome.md": "# Ours\n"}
    for host in ("one", "two"):  # the same content conflicts again, also elsewhere
        outcomes = cluster.publish(
            cluster.save("w", ours), cluster.save("a", {"content/a.md": f"{host}\n"}), host=host
        )
        assert outcomes["w"].failure is Failure.CONFLICT
        assert "conflict/w" in outcomes["w"].text
        assert outcomes["a"].failure is None
        assert cluster.file("content/posts/welcome.md") == "# Theirs\n"
        assert cluster.file("content/posts/welcome.md", "conflict/w") == "# Ours\n"
    cluster.publish(cluster.save("w", {"content/posts/welcome.md": "# Theirs, and ours\n"}), host="three")
    assert cluster.file("content/posts/welcome.md") == "# Theirs, and ours\n"


def test_a_start_that_the_remote_never_had_is_a_conflict_not_an_error(cluster: Cluster) -> None:
    request = cluster.save(
        "b", {"content/posts/b.md": LINES + "x\n"}, bases={"content/posts/b.md": named(b"never pushed\n")}
    )
    a = cluster.save("a", {"content/a.md": "A\n"})
    outcomes = cluster.publish(request, a)
    assert outcomes["b"].failure is Failure.CONFLICT
    assert outcomes["a"].commit
    assert cluster.file("content/posts/b.md") == LINES


def test_a_deleted_branch_is_not_recreated(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "-d", "refs/heads/main")
    c = cluster.save("c", {"content/c.md": "C\n"})
    for host in ("one", "fresh"):
        with pytest.raises(PublishError) as failure:
            cluster.publish(c, host=host)
        assert failure.value.failure is Failure.REMOTE_REWRITTEN
        assert "no branch main" in failure.value.text
    assert cluster.git("for-each-ref") == ""


@pytest.mark.parametrize("lost", [False, True], ids=["cache", "fresh"])
def test_a_rewritten_branch_is_built_upon_and_never_set_back(cluster: Cluster, *, lost: bool) -> None:
    first = cluster.tip()
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "refs/heads/main", first)
    cluster.person({"content/theirs.md": "theirs\n"})
    host = "fresh" if lost else "one"
    outcome = cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), host=host)["c"]
    assert outcome.failure is None
    assert cluster.log() == ["Publish c", "Somebody else's", "Start the site"]
    if not lost:
        assert "rewritten" in cluster.warned[0]


REJECT_BAD = """#!/bin/sh
while read old new ref; do
  for c in $(git rev-list $old..$new); do
    if git show $c | grep -q '^+.*SECRET'; then echo "found a secret in $c" >&2; exit 1; fi
  done
done
"""


def test_a_job_that_the_remote_refuses_fails_alone(cluster: Cluster) -> None:
    hook = cluster.remote / "hooks" / "pre-receive"
    hook.write_text(REJECT_BAD)
    hook.chmod(0o755)
    outcomes = cluster.publish(
        *(cluster.save(f"p{n}", {f"content/{n}.md": "SECRET\n" if n == 1 else "fine\n"}) for n in range(4))
    )
    assert [slug for slug, outcome in outcomes.items() if outcome.failure] == ["p1"]
    assert outcomes["p1"].failure is Failure.REJECTED
    assert len(cluster.log()) == 4


def test_a_dry_run_moves_nothing_anywhere(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    assert cluster.publish(a, dry_run=True)["a"].commit
    before = cluster.tip()
    assert cluster.log() == ["Start the site"]
    refs = cluster.git("for-each-ref", "--format=%(objectname)", cwd=cluster.repository()).splitlines()
    assert set(refs) == {before}
    assert not cluster.landed(cluster.plans[-1])
    assert cluster.publish(a)["a"].commit == cluster.tip()


def test_a_version_that_cannot_be_fetched_now_is_the_networks_fault(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
        cluster.person({path: LINES + "theirs\n"})
        cluster.database.tip = cluster.tip()
        request = cluster.save("b", {path: "mine\n" + LINES}, bases={path: named(LINES.encode())})
        fetches: list[str] = []

        def first_only(exchange: Exchange) -> None:
            if exchange.handler.command == "POST" and exchange.service == "git-upload-pack":
                fetches.append(exchange.service)
            if len(fetches) > 3:  # the branch's new commits have come, and its history
                exchange.hang_up()
            else:
                serve(exchange)

        server.behaviour = first_only
        with pytest.raises(PublishError) as failure:
            cluster.publish(request)
        assert failure.value.failure is Failure.NETWORK
        server.heal()
        assert cluster.publish(request)["b"].failure is None
    assert cluster.file(path) == "mine\n" + LINES + "theirs\n"


def test_what_a_save_left_unchanged_is_what_the_next_edit_starts_from(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    cluster.publish(cluster.save("b", {path: LINES + "mine\n"}))
    theirs = LINES.replace("line 1\n", "line one\n") + "mine\n"
    cluster.person({path: theirs})
    assert cluster.publish(cluster.save("b", {path: theirs}))["b"].commit is None
    mine = theirs.replace("line one\n", "line I\n")
    assert cluster.publish(cluster.save("b", {path: mine}), host="two")["b"].failure is None
    assert cluster.file(path) == mine


def test_a_conflict_whose_version_the_remote_does_not_take_is_still_with_its_job(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    cluster.person({path: LINES.replace("line 1\n", "line one\n")})
    hook = cluster.remote / "hooks" / "pre-receive"
    hook.write_text("#!/bin/sh\ngrep -q refs/heads/conflict && { echo no; exit 1; }; exit 0\n")
    hook.chmod(0o755)
    mine = LINES.replace("line 1\n", "line I\n")
    outcome = cluster.publish(cluster.save("b", {path: mine}, bases={path: named(LINES.encode())}))["b"]
    assert outcome.failure is Failure.CONFLICT
    assert "the post's with its job. Fix: " in outcome.text
    assert cluster.git("for-each-ref", "refs/briter/conflict", cwd=cluster.repository()) == ""
    assert cluster.git("for-each-ref", "refs/heads/conflict") == ""
