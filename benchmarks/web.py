"""What the dashboard costs: its pages when much waits, its readers while a post is published, and at rest."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from benchmarks.held import settle
from benchmarks.lab import daemon, memory_of, say, worker
from benchmarks.latency import save
from benchmarks.report import Check, Section, Series, ratio
from briter_worker.sinks.history.database import SCHEMA
from briter_worker.sinks.sqlite import open_to_write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lab import Lab, Site

_WHAT = """\
Pages: `serve` alone, {held:,} jobs on hold and {held:,} receipts in the history, each page asked for \
{asked} times over one connection after `/readyz`, until its last byte; the processor time is that of the \
dashboard's process. Readers: `serve` and the worker as services on a site of {posts:,} posts, {saves} saves \
each, in blocks of {block} by turns with nobody and with {readers} readers of `/events`; a process of its \
own reads them all on the same machine, and each reader must have been told of each post. At rest: `serve` \
on a site with 100 jobs on hold and 100 receipts, every page asked for once before, then left alone for \
{seconds} s."""
_READY_WITHIN = 120.0
_TOLD_WITHIN = 60.0
_SMALL = 100
_PAUSE = 0.5
_PAGES = (
    *("/", "/scheduled", "/scheduled?start={late}", "/failed", "/published", "/published?show=failed"),
    *("/published?q=nothing-like-it&show=all", "/post?id=job-77", "/figures", "/site"),
    *("/api/queue", "/api/jobs?offset={late}", "/api/history", "/api/status", "/metrics"),
)
_READERS = """\
import resource, selectors, socket, sys, time
port, count, expected = map(int, sys.argv[1:])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
FIRST, NEWS = b"event: snapshot\\n", b"event: published\\n"
asks = f"GET /events HTTP/1.1\\r\\nHost: 127.0.0.1:{port}\\r\\nAccept: text/event-stream\\r\\n\\r\\n".encode()
selector = selectors.DefaultSelector()
begun, told, ends = {}, {}, {}
for _ in range(count):
    reader = socket.create_connection(("127.0.0.1", port))
    reader.sendall(asks)
    reader.setblocking(False)
    selector.register(reader, selectors.EVENT_READ)
    begun[reader], told[reader], ends[reader] = False, 0, b""
missing, said = count * expected, False
while missing:
    for key, _ in selector.select():
        reader = key.fileobj
        data = reader.recv(65536)
        if not data:
            sys.exit("a reader was dropped")
        text = ends[reader] + data
        # What a name is cut in two by comes again with its other half.
        ends[reader] = text[-(len(NEWS) - 1):]
        begun[reader] = begun[reader] or FIRST in text
        news = text.count(NEWS)
        told[reader] += news
        missing -= news
    if not said and all(begun.values()):
        said = True
        print("ready", flush=True)
if set(told.values()) != {expected}:
    sys.exit(f"readers were told of {min(told.values())} to {max(told.values())} posts, not of {expected}")
"""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    quick = lab.scale.quick
    held, asked = (10_000, 10) if quick else (100_000, 30)
    readers, blocks, block = (100, 3, 5) if quick else (500, 20, 5)
    seconds = 5 if quick else 60
    wall, busy, full = _pages(lab, held, asked)
    alone, followed, loaded = _followed(lab, readers, blocks, block)
    memory, share = _at_rest(lab, seconds)
    medians = {page: statistics.median(values) for page, values in wall.items()}
    slowest = max(filter(_is_page, medians), key=medians.__getitem__)
    busiest = max(filter(_is_page, busy), key=busy.__getitem__)
    answer = max((path for path in medians if not _is_page(path)), key=medians.__getitem__)
    return Section(
        f"Dashboard: {held:,} jobs on hold, {held:,} receipts; {readers} readers",
        _WHAT.format(
            held=held,
            asked=asked,
            posts=lab.scale.posts,
            saves=blocks * block,
            block=block,
            readers=readers,
            seconds=seconds,
        ),
        [
            Check(f"slowest page, {slowest}", medians[slowest], " ms", 50, headline=True),
            Check(f"processor time of the costliest page, {busiest}", busy[busiest], " ms", 50),
            Check(f"slowest answer of the API, {answer}", medians[answer], " ms", 50),
            Check(
                f"save to remote with {readers} readers, of that with none",
                ratio(_medians(followed, block), _medians(alone, block)),
                "×",
                1.05,
                headline=True,
            ),
            Check(f"resident memory at rest, {_SMALL} jobs on hold", memory, " MiB", 80, headline=True),
        ],
        [
            *(Series(f"page {page}", "ms", values) for page, values in wall.items()),
            *(Series(f"processor, page {page}", "ms", [value]) for page, value in busy.items()),
            Series("save to remote, no reader", "ms", alone),
            Series(f"save to remote, {readers} readers", "ms", followed),
            Series(f"processor at rest, {_SMALL} jobs on hold", "% of a core", [share]),
            Series(f"resident after the pages, {held:,} jobs and receipts", "MiB", [full]),
            Series(f"resident with {readers} readers", "MiB", loaded),
        ],
    )


def _is_page(path: str) -> bool:
    """Whether it is for people."""
    return not path.startswith(("/api/", "/metrics"))


def _pages(lab: Lab, held: int, asked: int) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """Of each page: milliseconds for each answer, and of processor time for one; MiB in the end."""
    say(f"web, {held:,} jobs on hold and as many receipts")
    pages = [page.format(late=held * 9 // 10) for page in _PAGES]
    with lab.site(_SMALL) as site:
        _fill(site, held)
        os.sync()
        with _serving(site) as (process, port):
            _warm(port, pages)
            _wait_until_drawn(port)
            settle(process.pid)
            waiting = json.loads(_asked(_connection(port), "/api/status"))["jobs"]["scheduled"]
            if waiting != held:
                raise RuntimeError(f"the dashboard knows of {waiting} jobs on hold, not of {held}")
            wall: dict[str, list[float]] = {page: [] for page in pages}
            busy: dict[str, float] = {}
            for page in pages:
                connection, before = _connection(port), _processor(process)
                for _ in range(asked):
                    began = time.perf_counter()
                    _asked(connection, page)
                    wall[page].append(1000 * (time.perf_counter() - began))
                busy[page] = 1000 * (_processor(process) - before) / asked
                connection.close()
            return wall, busy, memory_of(process.pid, "VmRSS")


def _fill(site: Site, count: int) -> None:
    """So many jobs on hold, and a history of the last day or so: one in fifty did not go live."""
    for number in range(count):
        partial = site.queue / "job.tmp"
        job = {"id": f"job-{number}", "slug": f"post-{number:06}", "paths": [site.post(number % _SMALL)]}
        job["scheduledFor"] = f"2099-{1 + number % 12:02}-{1 + number % 28:02}T00:00:00Z"
        partial.write_text(json.dumps(job), encoding="utf-8")
        partial.rename(site.queue / f"job-{number:06}.json")
    now = time.time()
    connection = open_to_write(site.root / "storage" / "history.db", SCHEMA)
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO attempts (job_id, slug, title, attempt, saved_at, began, ended, outcome, duration_ms, "
        "\"commit\", branch, remote) VALUES (?, ?, 'Update', 1, ?, ?, ?, ?, 400, ?, 'main', 'origin')",
        (
            (
                *(f"old-{age}", f"old-post-{age}", now - age - 1, now - age - 0.5, now - age),
                *("nopaths" if age % 50 == 0 else "published", f"{age:040x}"),
            )
            for age in range(count, 0, -1)
        ),
    )
    connection.execute("COMMIT")
    connection.close()


def _followed(
    lab: Lab, readers: int, blocks: int, block: int
) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds from save to remote with nobody and with readers, and the dashboard's MiB with them."""
    taken: dict[int, list[float]] = {0: [], readers: []}
    memory = []
    with lab.site(lab.scale.posts) as site, daemon(site) as publisher, _serving(site) as (process, port):
        numbers = iter(range(lab.scale.posts))
        for _ in range(2):  # imports here, packed refs there
            save(site, publisher, next(numbers))
        order = [0, readers]
        for turn in range(blocks):
            say(f"web, {readers} readers, block {turn + 1} of {blocks}")
            for count in order:
                with _reading(port, count, block):
                    time.sleep(_PAUSE)
                    for _ in range(block):
                        taken[count].append(1000 * save(site, publisher, next(numbers)))
                        time.sleep(_PAUSE)
                    if count:
                        memory.append(memory_of(process.pid, "VmRSS"))
                time.sleep(_PAUSE)
            order.reverse()
    return taken[0], taken[readers], memory


def _at_rest(lab: Lab, seconds: float) -> tuple[float, float]:
    """MiB resident, and per cent of a core."""
    say("web, at rest")
    with lab.site(_SMALL) as site:
        _fill(site, _SMALL)
        with _serving(site) as (process, port):
            _warm(port, [page.format(late=0) for page in _PAGES])
            settle(process.pid)
            before, began = _processor(process), time.perf_counter()
            time.sleep(seconds)
            share = 100 * (_processor(process) - before) / (time.perf_counter() - began)
            return memory_of(process.pid, "VmRSS"), share


@contextmanager
def _serving(site: Site) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The dashboard as a service, and its port; it has said that it is ready."""
    with subprocess.Popen(
        worker("serve"),
        cwd=site.root,
        env=site.environment(BRITER_DASHBOARD_PORT="0"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for
            line = process.stdout.readline()
            if "http://" not in line:
                raise RuntimeError(f"the dashboard did not start: {line.strip()}")
            port = int(line.split()[-1].rpartition(":")[2])
            _wait_until_ready(port)
            yield process, port
            process.terminate()
            process.wait(timeout=60)
        finally:
            process.kill()


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + _READY_WITHIN
    while time.monotonic() < deadline:
        connection = _connection(port)
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
        connection.close()
        if status == http.client.OK:
            return
        time.sleep(0.2)
    raise RuntimeError(f"the dashboard was not ready within {_READY_WITHIN:.0f} s")


@contextmanager
def _reading(port: int, count: int, posts: int) -> Iterator[None]:
    """So many readers, who have all begun; on leaving, each must have been told of so many posts."""
    if not count:
        yield
        return
    command = [sys.executable, "-c", _READERS, str(port), str(count), str(posts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - asked for
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"the readers: {process.communicate()[1].strip()}")
            yield
            try:
                complaint = process.communicate(timeout=_TOLD_WITHIN)[1]
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"not every reader was told of {posts} posts") from None
            if process.returncode:
                raise RuntimeError(f"the readers: {complaint.strip()}")
        finally:
            process.kill()


def _warm(port: int, pages: list[str]) -> None:
    """Ask for each page once."""
    connection = _connection(port)
    for page in pages:
        _asked(connection, page)
    connection.close()


def _wait_until_drawn(port: int) -> None:
    """The figures have been counted: the dashboard does that by itself, after somebody has asked."""
    deadline = time.monotonic() + _READY_WITHIN
    connection = _connection(port)
    while b"<rect" not in _asked(connection, "/figures"):
        if time.monotonic() > deadline:
            raise RuntimeError("the dashboard did not draw its figures")
        time.sleep(0.2)
    connection.close()


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=60)


def _asked(connection: http.client.HTTPConnection, page: str) -> bytes:
    """The answer, which must be a good one."""
    accepts = "text/html" if _is_page(page) else "*/*"
    connection.request("GET", page, headers={"Accept": accepts})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise RuntimeError(f"{page}: {answer.status} {body[:300]!r}")
    return body


def _processor(process: subprocess.Popen[str]) -> float:
    """Seconds that its own threads kept a core busy."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def _medians(values: list[float], block: int) -> list[float]:
    """Of each block."""
    return [statistics.median(values[at : at + block]) for at in range(0, len(values), block)]
