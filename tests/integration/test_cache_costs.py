"""What publishing from a cache asks of the remote, and how much goes over the wire."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from caches import LINES, Cluster, blobs_here, named, small
from faults.servers import HttpRemote, git_daemon, http_remote

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


@pytest.mark.slow
def test_a_file_of_50_megabytes_is_published_in_parts(cluster: Cluster) -> None:
    content = os.urandom(50 << 20)
    outcome = cluster.publish(cluster.save("large", {"content/large.bin": content}))["large"]
    assert outcome.commit
    assert cluster.git("cat-file", "-s", "main:content/large.bin") == str(50 << 20)


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_publishing_by_gits_own_protocol_fetches_no_contents(cluster: Cluster, *, filters: bool) -> None:
    cluster.git("config", "uploadpack.allowFilter", str(filters).lower())
    with git_daemon(cluster.root, "--enable=receive-pack") as address:
        cluster.url = f"{address}/remote.git"
        for number in range(3):
            cluster.publish(cluster.save("b", {"content/posts/b.md": f"{number}\n" + LINES}))
    assert len(cluster.log()) == 4
    assert (named(b"Hello\n") in blobs_here(cluster)) is not filters
    assert (named(LINES.encode()) in blobs_here(cluster)) is not filters


def test_a_drain_asks_the_remote_once_and_then_pushes(cluster: Cluster, http: HttpRemote) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    http.asked.clear()
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert http.asked == ["GET git-receive-pack", "POST git-receive-pack"]
