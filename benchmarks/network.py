"""A remote behind a network: git's own HTTP server on loopback, at once and through a delay."""

from __future__ import annotations

import gzip
import os
import queue
import socket
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.drain import commands, ours
from benchmarks.lab import daemon, say
from benchmarks.latency import commit, save
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
`git http-backend` on loopback, in a site of {posts:,} posts: one save until the remote's branch has \
moved, beside `git add`, `git commit`, `git push` of one post, in turns; then {jobs} due jobs by \
`run --once` beside the same commands with a push per job. First directly, then through {delay:.0f} ms each \
way. The delay is a relay's, which hands on each piece of a connection that much later, and lets the first \
one wait for the connection's own round trip: `tc netem` in a network namespace, which does the same to each \
packet, needs root and a kernel with `CONFIG_NET_SCH_NETEM`. {netem}"""
_HOST = "127.0.0.1"
_DELAY = 0.05
_POSTS = 1_000
_PIECE = 1 << 16


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    saves, jobs, times = (3, 5, 1) if lab.scale.quick else (20, 20, 3)
    taken: dict[str, list[float]] = {}
    for name, delay in (("loopback", 0.0), (f"{1000 * _DELAY:.0f} ms each way", _DELAY)):
        say(f"network, {name}: {saves} saves, then {times} times {jobs} jobs")
        with _reached(lab, delay) as served, _reached(lab, delay) as plain, daemon(served) as process:
            for number in range(saves + 1):
                one, other = 1000 * save(served, process, number), 1000 * commit(plain, number)
                if number:  # the first one warms up
                    taken.setdefault(f"save to remote, {name}", []).append(one)
                    taken.setdefault(f"git add, commit, push, {name}", []).append(other)
        for _ in range(times):
            with _reached(lab, delay) as served, _reached(lab, delay) as plain:
                batch, each = ours(served, jobs), commands(plain, jobs)
            taken.setdefault(f"{jobs} jobs, run --once, {name}", []).append(1000 * batch)
            taken.setdefault(f"{jobs} jobs, push per job, {name}", []).append(1000 * each)
    mine, theirs, batch_near, each_near, far, far_git, batch_far, each_far = taken.values()
    return Section(
        f"Network: git over HTTP, {1000 * _DELAY:.0f} ms each way",
        _WHAT.format(posts=_POSTS, jobs=jobs, delay=1000 * _DELAY, netem=_netem()),
        [
            Check("a save, of bare git's, loopback", ratio(mine, theirs), "×", 1.3),
            Check("a save, of bare git's, through the delay", ratio(far, far_git), "×", 1.1, headline=True),
            Check(
                f"{jobs} jobs, faster than a push per job, loopback",
                ratio(each_near, batch_near),
                "×",
                1,
                at_least=True,
            ),
            Check(
                f"{jobs} jobs, faster than a push per job, through the delay",
                ratio(each_far, batch_far),
                "×",
                1,
                at_least=True,
                headline=True,
            ),
        ],
        [Series(name, "ms", values) for name, values in taken.items()],
    )


def _netem() -> str:
    """What becomes of `tc netem` here."""
    try:
        done = subprocess.run(
            [
                *("unshare", "--map-root-user", "--net"),
                *("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "50ms"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "Here, util-linux is missing."
    if not done.returncode:
        return "Here it could be had; the relay is used on every machine, so that their figures compare."
    return f"Here, it says: `{' '.join(done.stderr.split())}`"


@contextmanager
def _reached(lab: Lab, delay: float) -> Iterator[Site]:
    """A site whose remote is reached over HTTP, through the delay."""
    with lab.site(_POSTS) as site, _served(site.root) as port, _delayed(port, delay) as near:
        site.git("remote", "set-url", "origin", f"http://{_HOST}:{near}/{site.remote.name}")
        yield site


@contextmanager
def _served(folder: Path) -> Iterator[int]:
    """Git's own server for the repositories in `folder`; the port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            body = b""
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            self._answer(body)

        def _answer(self, body: bytes) -> None:
            url = urlsplit(self.path)
            env = {
                "PATH": os.environ["PATH"],
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_GLOBAL": os.devnull,
                "GIT_CONFIG_COUNT": "2",
                "GIT_CONFIG_KEY_0": "http.receivepack",
                "GIT_CONFIG_VALUE_0": "true",
                "GIT_CONFIG_KEY_1": "safe.directory",
                "GIT_CONFIG_VALUE_1": "*",
                "GIT_PROJECT_ROOT": str(folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "PATH_INFO": url.path,
                "QUERY_STRING": url.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "REMOTE_ADDR": _HOST,
            }
            done = subprocess.run(
                ["git", "http-backend"], input=body, env=env, capture_output=True, check=True
            )
            head, _, content = done.stdout.partition(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
            self.send_response(int(fields.pop("Status", "200").split()[0]))
            for name, value in {**fields, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the terminal is the bench's."""

    with ThreadingHTTPServer((_HOST, 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _delayed(port: int, delay: float) -> Iterator[int]:
    """A port that leads to `port`, with everything that is said arriving `delay` later; `port` for none."""
    if not delay:
        yield port
        return
    with socket.create_server((_HOST, 0)) as server:
        threading.Thread(target=_relay, args=(server, port, delay), daemon=True).start()
        yield server.getsockname()[1]
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread's accept


def _relay(server: socket.socket, port: int, delay: float) -> None:
    with suppress(OSError):
        while True:
            near, _ = server.accept()
            far = socket.create_connection((_HOST, port))
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Before the first byte can be said, a connection has gone there and back.
            _pass_on(near, far, delay, first=2 * delay)
            _pass_on(far, near, delay, first=0.0)


def _pass_on(one: socket.socket, other: socket.socket, delay: float, *, first: float) -> None:
    pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def hear() -> None:
        extra, piece = first, b"-"
        while piece:
            try:
                piece = one.recv(_PIECE)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + delay + extra, piece))
            extra = 0.0

    def say_later() -> None:
        while True:
            due, piece = pieces.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with suppress(OSError):
                if piece:
                    other.sendall(piece)
                    continue
                other.shutdown(socket.SHUT_WR)
            return

    for work in (hear, say_later):
        threading.Thread(target=work, daemon=True).start()
