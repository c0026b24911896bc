"""From the save of a post to its commit on a remote at the other end of a link with a round-trip time."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from links import Link, link
from remotes import HOST, Exchange, asks_for, http_server, sshd

from benchmarks.lab import commit_job, daemon, say, wait_for
from benchmarks.latency import commit, gitwatch, save, watch
from benchmarks.report import Check, Section, Series, ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from benchmarks.lab import Lab, Site

_WHAT = """\
As the latency of one save, in a site of 1,000 posts, but the remote is at the other end of a link: a proxy \
on loopback that delivers each byte half a round-trip time later. Behind it is sshd, or `git http-backend` \
with TLS and a password that a credential helper knows. *Fresh connection* is the worker with \
`BRITER_GIT_SSH_KEEP_MS=0`, and so a first save after a pause. A burst is many saves at once, until the last \
is on the remote; bare git adds, commits and pushes each."""
_POSTS = 1_000
_ROUND_TRIPS_MS = (0, 20, 50, 100)
_REST_S = 0.2
_WARM_UP = 2
_BURST_MS = 50
_PASSWORD = "password-of-the-benchmark"  # noqa: S105 - of a server on loopback
OURS, FRESH, BARE, WATCHED = "ours", "ours, fresh connection", "git add, commit, push", "gitwatch -s 0"
_TARGETS = (
    ("ssh", 0, OURS, FRESH, 1.0),
    ("ssh", 20, OURS, BARE, 0.5),
    ("ssh", 50, OURS, BARE, 0.4),
    ("ssh", 50, FRESH, BARE, 1.1),
    ("https", 50, OURS, BARE, 0.75),
)


@dataclass
class Remote:
    """A server behind a link, and how a site is connected to it."""

    scheme: str
    line: Link
    connect: Callable[[Site], None]


def measure(lab: Lab) -> Section:
    """Measure one save over links of several lengths, and bursts over one of them, by ssh and https."""
    saves = 3 if lab.quick else 15
    taken: dict[tuple[str, int, str], list[float]] = {}
    bursts: dict[tuple[str, int, str], list[float]] = {}
    for scheme, open_remote in (("ssh", _ssh), ("https", _https)):
        with open_remote(lab) as remote, ExitStack() as stack:
            ways = _ways(lab, remote, stack)
            numbers = count()
            for milliseconds in _ROUND_TRIPS_MS:
                remote.line.delay = milliseconds / 2000
                for turn in range(saves + _WARM_UP):
                    say(f"{scheme}, {milliseconds} ms, save {turn + 1} of {saves + _WARM_UP}")
                    for name, way in ways.items():
                        took = 1000 * way(next(numbers))
                        if turn >= _WARM_UP:
                            taken.setdefault((scheme, milliseconds, name), []).append(took)
                        time.sleep(_REST_S)
        with open_remote(lab) as remote:
            remote.line.delay = _BURST_MS / 2000
            for size in (20,) if lab.quick else (20, 200):
                say(f"{scheme}, a burst of {size} saves")
                for name, seconds in _burst(lab, remote, size).items():
                    bursts[scheme, size, name] = [1000 * seconds]
    return Section(
        "Over a link: one save, idle service, 1,000 posts",
        _WHAT,
        [_check(taken, *target) for target in _TARGETS],
        [
            *(
                Series(f"{scheme}, {ms} ms: {name}", "ms", values)
                for (scheme, ms, name), values in taken.items()
            ),
            *(
                Series(f"{scheme}, {_BURST_MS} ms, {size} saves at once: {name}", "ms", values)
                for (scheme, size, name), values in bursts.items()
            ),
        ],
    )


def _check(
    taken: dict[tuple[str, int, str], list[float]],
    scheme: str,
    milliseconds: int,
    name: str,
    peer: str,
    most: float,
) -> Check:
    one, other = (taken[scheme, milliseconds, each] for each in (name, peer))
    text = f"{scheme}, round trip {milliseconds} ms, {name}: time relative to {peer} (lower is better)"
    return Check(text, ratio(one, other), "×", most)


def _ways(lab: Lab, remote: Remote, stack: ExitStack) -> dict[str, Callable[[int], float]]:
    """Return the ways to publish one post. Each has a site of its own."""

    def site() -> Site:
        made = stack.enter_context(lab.site(_POSTS))
        remote.connect(made)
        return made

    served, plain = site(), site()
    process = stack.enter_context(daemon(served.root, served.environment()))
    ways: dict[str, Callable[[int], float]] = {
        OURS: lambda number: save(served, process, number),
        BARE: lambda number: commit(plain, number),
    }
    if remote.scheme == "ssh":
        fresh = site()
        other = stack.enter_context(daemon(fresh.root, fresh.environment(BRITER_GIT_SSH_KEEP_MS="0")))
        ways[FRESH] = lambda number: save(fresh, other, number)
    script = shutil.which("gitwatch") or shutil.which("gitwatch.sh")
    if script and shutil.which("inotifywait"):
        watched = site()
        stack.enter_context(gitwatch(watched, script))
        ways[WATCHED] = lambda number: watch(watched, number)
    return ways


def _burst(lab: Lab, remote: Remote, size: int) -> dict[str, float]:
    """Return the seconds until so many saves are on the remote, by the worker and by bare git."""
    with lab.site(_POSTS) as served, lab.site(_POSTS) as plain:
        remote.connect(served)
        remote.connect(plain)
        with daemon(served.root, served.environment()) as process:
            save(served, process, size)  # the connection is open, as in an author's session
            for number in range(size):
                served.edit(number)
            jobs = [served.prepare_job(number) for number in range(size)]
            began = time.perf_counter()
            for job in jobs:
                commit_job(job)
            for _ in jobs:
                wait_for(process, "published")
            ours = time.perf_counter() - began
        began = time.perf_counter()
        for number in range(size):
            path = plain.edit(number)
            plain.git("add", "--", path)
            plain.git("commit", "--quiet", f"--message=Publish post {number}")
            plain.git("push", "--quiet", "origin", "main")
        return {OURS: ours, BARE: time.perf_counter() - began}


@contextmanager
def _ssh(lab: Lab) -> Iterator[Remote]:
    folder = lab.root / "sshd"
    with sshd(folder) as server, link(server.port) as line:
        host = replace(server, port=line.port)
        host.introduce()

        def connect(site: Site) -> None:
            site.git("remote", "set-url", "origin", host.url(site.remote))
            site.git("config", "core.sshCommand", host.command)

        yield Remote("ssh", line, connect)
    shutil.rmtree(folder)


@contextmanager
def _https(lab: Lab) -> Iterator[Remote]:
    certificate = _make_certificate(lab.root)
    serve = asks_for("me", _PASSWORD)

    def behave(exchange: Exchange) -> None:
        exchange.folder = lab.root
        serve(exchange)

    with http_server(behave, certificate) as port, link(port) as line:

        def connect(site: Site) -> None:
            path = site.remote.relative_to(lab.root)
            site.git("remote", "set-url", "origin", f"https://{HOST}:{line.port}/{path}")
            site.git("config", "http.sslCAInfo", str(certificate))
            helper = f'!f() {{ [ "$1" != get ] || printf "username=me\\npassword={_PASSWORD}\\n"; }}; f'
            site.git("config", "credential.helper", helper)

        yield Remote("https", line, connect)


def _make_certificate(folder: Path) -> Path:
    """Return a file with a certificate for loopback and its key."""
    key, certificate, both = folder / "key", folder / "certificate", folder / "both"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    both.write_text(key.read_text() + certificate.read_text())
    return both
