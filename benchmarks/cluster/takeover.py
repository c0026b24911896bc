"""How soon another node publishes when the node that has the site dies during a push."""

from __future__ import annotations

import subprocess  # noqa: TC003
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.cluster.ground import make_post
from benchmarks.lab import daemon, post_path, say, wait_until
from benchmarks.latency import tip, wait_until_moved
from briter_worker.cluster.submit import enqueue
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from benchmarks.cluster.ground import Ground

_SITE = "site"
_SLOW = """#!/bin/sh
# A remote that accepts no push that began while the file `slow` existed.
[ -e slow ] || exit 0
while [ -e slow ]; do sleep 0.05; done
exit 1
"""


def measure(ground: Ground, count: int) -> list[float]:
    """Return the seconds from each SIGKILL until another node has published the post."""
    taken = []
    with (
        ground.remotes([_SITE]) as remotes,
        ground.cluster([_SITE], remotes) as cluster,
        ExitStack() as nodes,
    ):
        remote = remotes / f"{_SITE}.git"
        hook, slow = remote / "hooks" / "pre-receive", remote / "slow"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(_SLOW, encoding="utf-8")
        hook.chmod(0o755)
        settings = cluster.settings()

        def start_node() -> subprocess.Popen[str]:
            return nodes.enter_context(daemon(ground.lab.root, cluster.environment(), is_read=True))

        holder = start_node()
        for number in range(count):
            say(f"cluster, takeover {number + 1} of {count}")
            slow.touch()
            files = {post_path(0): make_post(number)}
            enqueue("post", files=files, site=_SITE, settings=settings, message="Publish")
            wait_until(lambda: cluster.ask("SELECT count(*) FROM plans") == 1)
            other = start_node()
            time.sleep(1)  # until it waits
            before, began = tip(remote), time.perf_counter()
            holder.kill()
            holder.wait()
            slow.unlink()
            taken.append(wait_until_moved(remote, before) - began)
            wait_until(cluster.is_drained)
            holder = other
        open_database(settings).close()
    return taken
