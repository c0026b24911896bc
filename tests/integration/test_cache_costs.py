"""What publishing from a cache asks of the remote, and how much goes over the wire."""

from __future__ import annotations

import os
import random
import socket
import socketserver
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from caches import LINES, NOW, Cluster, blobs_here, made, named, small
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


@dataclass
class Wire:
    """What went through it, in bytes."""

    port: int = 0
    up: int = 0
    down: int = 0

    def carry(self, source: socket.socket, to: socket.socket, *, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if up:
                    self.up += len(data)
                else:
                    self.down += len(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)


@contextmanager
def wire(to: int) -> Iterator[Wire]:
    """Counts what goes to and from a port of this machine's."""
    counter = Wire()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", to)) as there:
                back = threading.Thread(
                    target=counter.carry, args=(there, self.request), kwargs={"up": False}
                )
                back.start()
                counter.carry(self.request, there, up=True)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        counter.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield counter
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_large_site_costs_its_names_once_and_then_what_changed(tmp_path: Path) -> None:
    posts, size = 10_000, 1_000
    text = "".join(f"{random.Random(n).getrandbits(4 * size):x}\n" for n in range(posts)).split("\n")
    cluster = made(tmp_path, {f"content/posts/{n:05}.md": text[n] for n in range(posts)})
    with git_daemon(cluster.root, "--enable=receive-pack") as address, wire(port_of(address)) as counted:
        cluster.url = f"git://127.0.0.1:{counted.port}/remote.git"
        cluster.publish(cluster.save("p1", {"content/posts/00001.md": text[1] + "edited\n"}))
        assert counted.down < 60 * posts
        for number in range(2, 5):
            counted.up = counted.down = 0
            edited = text[number] + "edited\n"
            cluster.publish(cluster.save(f"p{number}", {f"content/posts/{number:05}.md": edited}))
            assert counted.down < 1_000
            assert counted.up < 2_000 + size
    assert len(blobs_here(cluster)) == 4  # those that were published from here


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_a_drain_starts_as_many_git_commands_for_one_job_as_for_many(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    counts: list[int] = []
    for jobs in (1, 50):
        with cluster.publisher() as (cache, publisher):
            requests = [cluster.save(f"p{n}", {f"content/{n}.md": f"{jobs}\n"}) for n in range(jobs)]
            list(
                publisher.publish(
                    requests,
                    held=(),
                    examine=lambda _key, _changes: None,
                    cancelled=tuple,
                    record=cluster.plans.append,
                    now=NOW,
                )
            )
            counts.append(cache.commands.started)
            cluster.database.tip = cache.tip
    assert counts == [3, 3]  # it reads, it writes, it pushes
