"""Several hosts publish one site, each from its own cache, and any may die."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from caches import LINES, NOW, Cluster, named, small
from faults.servers import Exchange, HttpRemote, cuts_after, http_remote

from briter_worker.errors import Failure, LockLostError, PublishError
from briter_worker.ports import Delivered, Delivery

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return small(tmp_path)


@pytest.fixture
def http(cluster: Cluster) -> Iterator[HttpRemote]:
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        yield server


def test_two_hosts_publish_one_site_by_turns(cluster: Cluster) -> None:
    for number in range(6):
        text = f"{number}\n" + LINES
        outcome = cluster.publish(
            cluster.save("b", {"content/posts/b.md": text}), host="one" if number % 2 else "two"
        )
        assert outcome["b"].commit == cluster.tip()
    assert cluster.file("content/posts/b.md") == "5\n" + LINES
    assert len(cluster.log()) == 7


def test_hosts_that_race_for_the_branch_lose_no_post(cluster: Cluster) -> None:
    failed: list[Exception] = []

    def drain(host: str) -> None:
        try:
            for number in range(6):
                slug = f"{host}-{number}"
                request = replace(cluster.save(slug, {f"content/{slug}.md": slug}), key=f"{slug}-key")
                cluster.database.deliveries[request.key] = Delivery(
                    (Delivered(f"content/{slug}.md", "100644", named(slug.encode()), NOW),)
                )
                while True:
                    try:
                        assert cluster.publish(request, host=host, settle=False)[slug].commit
                        break
                    except PublishError as failure:
                        if failure.failure is not Failure.LOST_RACE:
                            raise
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=drain, args=[host]) for host in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    expected = [f"Publish {host}-{number}" for host in ("one", "two") for number in range(6)]
    assert sorted(cluster.log()) == sorted([*expected, "Start the site"])


def test_a_host_that_lost_the_site_pushes_nothing(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with pytest.raises(LockLostError):
        cluster.publish(a, still_ours=lambda: False)
    assert cluster.log() == ["Start the site"]


def test_a_push_that_went_out_late_is_refused_and_what_landed_is_found(cluster: Cluster) -> None:
    """A worker is stopped right before its push; another host publishes the same job meanwhile."""
    a = cluster.save("a", {"content/a.md": "A\n"})

    def stopped_meanwhile() -> bool:
        if len(cluster.plans) == 1:
            cluster.publish(a, host="two", settle=False)
        return True

    outcome = cluster.publish(a, still_ours=stopped_meanwhile, settle=False)["a"]
    assert cluster.log() == ["Publish a", "Start the site"]
    assert outcome.commit == cluster.tip()
    assert not cluster.landed(cluster.plans[0], host="three")
    assert cluster.landed(cluster.plans[1], host="three")


def test_a_push_whose_answer_was_lost_is_found_by_another_host(cluster: Cluster, http: HttpRemote) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})

    def then_nothing(exchange: Exchange) -> None:
        cuts_after(exchange)
        http.behaviour = lambda each: each.hang_up()

    http.on_push = then_nothing
    with pytest.raises(PublishError) as failure:
        cluster.publish(a)
    assert failure.value.failure is Failure.NETWORK
    http.heal()
    assert cluster.log() == ["Publish a", "Start the site"]
    (plan,) = cluster.plans
    assert cluster.landed(plan, host="two")
    # However much was published upon it, and whatever the host has of it.
    cluster.flood(60)
    assert cluster.landed(plan, host="three")
    assert cluster.landed(plan, host="two")
    assert cluster.landed(plan, host="one")


def test_a_push_that_never_arrived_is_not_found_and_only_so_much_is_asked(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with pytest.raises(LockLostError):
        cluster.publish(a, still_ours=lambda: False)
    (plan,) = cluster.plans
    cluster.flood(60)
    assert not cluster.landed(plan, host="two")
    assert not cluster.landed(plan, host="one")
    assert cluster.publish(a, host="two")["a"].commit == cluster.tip()


def test_an_edit_of_what_landed_unsettled_is_no_conflict_with_ourselves(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = named(LINES.encode())
    first = cluster.save("b", {path: LINES + "one\n"}, bases={path: start})
    cluster.publish(first, settle=False)  # it landed, and the worker died before it could say so
    cluster.database.known.clear()
    cluster.database.tip = None
    second = cluster.save("b", {path: LINES + "two\n"}, bases={path: start})
    for host in ("fresh", "one"):
        assert cluster.publish(second, host=host, settle=False)["b"].failure is None
    assert cluster.file(path) == LINES + "two\n"


def test_a_persons_edit_of_what_landed_unsettled_is_kept(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = named(LINES.encode())
    cluster.publish(cluster.save("b", {path: LINES + "one\n"}, bases={path: start}), settle=False)
    cluster.database.known.clear()
    cluster.person({path: "their first\n" + LINES + "one\n"})
    second = cluster.save("b", {path: LINES + "one and more\n"}, bases={path: start})
    assert cluster.publish(second, host="fresh")["b"].failure is None
    assert cluster.file(path) == "their first\n" + LINES + "one and more\n"


def test_of_commits_of_one_message_the_one_that_touched_the_post_is_its_own(cluster: Cluster) -> None:
    cluster.publish(cluster.save("other", {"content/other.md": "other\n"}))  # host one knows the branch
    same = {"a": "content/a.md", "b": "content/b.md"}
    first, second = (replace(cluster.save(slug, {path: slug}), message="Same") for slug, path in same.items())
    landed = [cluster.publish(each, host="two", settle=False)[each.slug].commit for each in (first, second)]
    cluster.database.tip = None  # as host one knows it
    outcome = cluster.publish(first)["a"]
    assert outcome.commit == landed[0]


def test_what_became_of_a_start_is_asked_once_though_the_batch_is_built_anew(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = named(LINES.encode())
    cluster.person({path: LINES.replace("line 1\n", "line one\n")})
    request = cluster.save("b", {path: LINES + "two\n"}, bases={path: start})
    other = cluster.save("c", {"content/c.md": "C\n"})
    asked: list[int] = []

    def at_the_last_moment() -> list[str]:
        asked.append(1)
        return [other.key] if len(asked) > 1 else []

    with cluster.publisher() as (_, publisher):
        outcomes = [
            outcome
            for some in publisher.publish(
                [request, other],
                held=(),
                examine=lambda _key, _changes: None,
                cancelled=at_the_last_moment,
                record=cluster.plans.append,
                now=NOW,
            )
            for outcome in some
        ]
    assert [outcome.key for outcome in outcomes if outcome.cancelled] == [other.key]
    assert cluster.file(path) == LINES.replace("line 1\n", "line one\n") + "two\n"
    assert cluster.file("content/c.md") is None
