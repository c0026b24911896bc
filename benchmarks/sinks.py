"""What it costs that others are told: history, webhooks and metrics beside the log."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.drain import enqueue
from benchmarks.lab import say, worker
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lab import Lab, Site

_WHAT = """\
{jobs} due jobs in one folder of {posts:,} posts, by `run --once` as a process, start-up included, until \
`worker-stopped`: the posts are on the remote and settled then. Log alone: every other sink taken out. All: \
the history, one signed webhook for each post to a receiver in a process of its own, and metrics. Behind \
that the worker gives its receivers a bounded time: until the process ends. What a processor was busy for is \
of the whole process, git included."""
_JOBS, _QUICK_JOBS = 1_000, 100
_LOG_ALONE = """\
import sys
from briter_worker import wiring
from briter_worker.sinks.fan import Fan
wiring.open_outlets = lambda settings, *, once, log, metrics=None: Fan([], log)
from briter_worker.__main__ import main
sys.argv = ["briter-worker", "run", "--once"]
main()
"""
_RECEIVER = """\
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    jobs = _QUICK_JOBS if lab.scale.quick else _JOBS
    posts = lab.scale.posts
    repetitions = 1 if lab.scale.quick else 5
    ways = ("log alone", "log and history", "all: history, webhooks, metrics")
    drained: dict[str, list[float]] = {name: [] for name in ways}
    ended: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    with _receiver() as port:
        settings = {
            "BRITER_WEBHOOK_URLS": f"http://127.0.0.1:{port}/",
            "BRITER_WEBHOOK_ALLOW_PRIVATE": "true",
            "BRITER_WEBHOOK_SECRET": "whsec_" + "QUFB" * 8,
        }
        for repetition in range(repetitions):
            say(f"sinks, repetition {repetition + 1} of {repetitions}")
            for name in order:
                with lab.site(posts) as site:
                    enqueue(site, jobs)
                    command = (
                        [sys.executable, "-c", _LOG_ALONE] if name == ways[0] else worker("run", "--once")
                    )
                    env = {**settings, "BRITER_METRICS_PORT": str(_free_port())} if name == ways[2] else {}
                    before = _processor()
                    drain, end = _timed(command, site, env, jobs)
                    drained[name].append(drain)
                    ended[name].append(end)
                    busy[name].append(_processor() - before)
            order.append(order.pop(0))
    alone, history, everything = drained.values()
    return Section(
        f"Sinks: {jobs} jobs, {posts:,} posts",
        _WHAT.format(jobs=jobs, posts=posts),
        [
            Check("drain with all sinks, of that with the log alone", ratio(everything, alone), "×", 1.10),
            Check("drain with the history, of that with the log alone", ratio(history, alone), "×", 1.10),
        ],
        [
            *(Series(f"drained: {name}", "s", values) for name, values in drained.items()),
            *(Series(f"ended: {name}", "s", values) for name, values in ended.items()),
            *(Series(f"processor: {name}", "s", values) for name, values in busy.items()),
        ],
    )


def _processor() -> float:
    """Seconds that processes which have ended kept a core busy, git's included."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _timed(command: list[str], site: Site, env: dict[str, str], jobs: int) -> tuple[float, float]:
    """Seconds until the worker had stopped, and until its process had ended."""
    began = time.perf_counter()
    stopped = 0.0
    with subprocess.Popen(
        command, cwd=site.root, env=site.environment(**env), stdout=subprocess.PIPE, text=True
    ) as process:
        published = 0
        for line in process.stdout or ():
            event = json.loads(line.partition(" ")[2])["event"]
            published += event == "published"
            if event == "worker-stopped":
                stopped = time.perf_counter() - began
    ended = time.perf_counter() - began
    if process.returncode or published != jobs:
        raise RuntimeError(f"exit {process.returncode}, {published} of {jobs} published")
    return stopped, ended


@contextmanager
def _receiver() -> Iterator[int]:
    """The port of one that takes everything."""
    with subprocess.Popen([sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
