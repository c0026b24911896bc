"""Many sites on three nodes: each save is published once, whatever happens to nodes and Postgres."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from postgres import Server, free_port
from sites import Site as DiskSite
from sites import events_in

from briter_worker.client import compose
from briter_worker.cluster import sites
from briter_worker.cluster.submit import send
from briter_worker.errors import UnavailableError
from briter_worker.queues.postgres.database import Database
from briter_worker.queues.postgres.payloads import PayloadSource, collect_blobs, submit
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database, open_queue
from soak.cluster_nodes import Incidents, Node
from soak.ledger import PROMISES, Found, Ledger, Save, judge
from soak.networks import HUB, Network, git_daemon
from soak.report import IN_MEMORY, Report
from soak.repository import fsck, read_files, read_history
from soak.users import AUTHOR, FILLER, FLEETING, TITLED, Colleague, post_path

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping

    from briter_worker.settings import Settings
    from soak.networks import Namespace
    from soak.report import Options

_ENVIRONMENT = {
    "BRITER_WORKER_DRY_RUN": "false",
    "BRITER_WORKER_BACKOFF_MS": "500,2000,5000",
    "BRITER_WORKER_SHUTDOWN_TIMEOUT_MS": "15000",
    "BRITER_GIT_TIMEOUT_MS": "10000",
}
_NODES, _SLOTS, _WRITERS = 3, 2, 3
_PAUSE_S = 1.5
"""Between two incidents, on average."""
_HANGING = tuple(f"hangs{number}" for number in range(3))
_RESTORED = 6
"""Sites whose last post is saved again around a backup and its restore."""
_FEW = 12
_PATIENCE_S = 120.0
"""For so long nothing may happen while anything waits: twice what a site in doubt may rest."""
_OPEN = {
    "jobs": "SELECT count(*) FROM publications WHERE state <> 'failed'",
    "claimed": "SELECT count(*) FROM publications WHERE state = 'claimed'",
    "drains": (
        "SELECT count(*) FROM sites JOIN nodes ON nodes.name = worker"
        " WHERE seen_at > extract(epoch FROM clock_timestamp()) - 10"
    ),
    "plans": "SELECT count(*) FROM plans",
}
_LEFT = {
    "drains": _OPEN["drains"],
    "jobs": "SELECT count(*) FROM publications",
    "plans": _OPEN["plans"],
    "files of jobs": "SELECT count(*) FROM files",
    "blobs that no base version needs": (
        "SELECT count(*) FROM blobs b WHERE NOT EXISTS (SELECT FROM base_versions v WHERE v.kept = b.blob)"
    ),
}


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Let everything happen to a cluster, then look at every site's remote and at the database."""
    count = options.of(200, _FEW)
    saves = 25 if count > _FEW else 6
    root = Path(tempfile.mkdtemp(prefix="briter-soak-", dir=IN_MEMORY))
    cluster = Cluster(root, options.seed, count=count, saves=saves)
    try:
        found = cluster.live(tell)
    except BaseException:
        tell(f"seed {options.seed} broke the soak itself; it is kept in {root}")
        raise
    if failures := found.lines():
        tell(f"it is kept in {root}")
    else:
        shutil.rmtree(root)
    return Report("cluster", {**found.counts(), "sites": count, **cluster.about}, failures)


_LOGO = bytes(range(256)) * 64
"""A picture that many posts of many sites have."""


class ClusterCms:
    """One site's CMS. Its copies of the posts never see what a colleague pushes."""

    def __init__(self, settings: Settings, dice: random.Random, figures: Counter[str]) -> None:
        self.name = settings.site
        self.ledger = Ledger()
        self.settings = settings
        self._dice = dice
        self._figures = figures
        self._count = 0

    def save(self, *, given_up: Callable[[], bool], again: str = "") -> None:
        """Save any post, or this one again, to be published at once."""
        self._count += 1
        marker = f"m{self._count}"
        slug = self._dice.choice([*TITLED, *TITLED, *FLEETING, "new", "new"])
        slug = again or (f"new-{marker}" if slug == "new" else slug)
        held = time.time() + self._dice.uniform(1, 12) if not again and self._dice.random() < 0.12 else 0.0
        files = self._files(slug, marker, held=bool(held))
        author = AUTHOR if self._dice.random() < 0.3 else None
        save = Save(marker, slug, tuple(files), files, f"{marker}: save {slug}", author, held)
        at = datetime.fromtimestamp(held, UTC) if held else None
        document = compose(slug, save.paths, message=save.message, at=at, author=author)
        way = self._dice.choices([self._send, self._send_without_waking], [90, 10])[0]
        if self._insist(lambda: way(document, files), given_up):
            self.ledger.saves.append(save)
            self._figures["saves"] += 1

    def _files(self, slug: str, marker: str, *, held: bool) -> dict[str, bytes | None]:
        path = post_path(slug)
        if slug in FLEETING and self._dice.random() < 0.3:
            self._figures["deletions"] += 1
            return {path: None}
        lines = ["title: -", *FILLER, f"body: {slug} {marker}"]
        files: dict[str, bytes | None] = {path: ("\n".join(lines) + "\n").encode()}
        luck = self._dice.random()
        if not held and luck < 0.1:
            files[f"content/posts/{slug}.png"] = _LOGO
        elif not held and luck < 0.12:
            files[f"content/posts/{slug}.bin"] = self._dice.randbytes(1_300_000) + f"\n{marker}".encode()
        return files

    def _insist(self, ask: Callable[[], object], given_up: Callable[[], bool]) -> bool:
        """Ask until there is an answer. A request without an answer may have been carried out."""
        while not given_up():
            try:
                ask()
            except UnavailableError:
                self._figures["saves asked for again"] += 1
                time.sleep(0.2)
            else:
                return True
        return False

    def _send(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        send(self.settings, document, files=files)

    def _send_without_waking(self, document: dict[str, Any], files: Mapping[str, bytes | None]) -> None:
        """Die, as it were, between the commit and the waking of a node: the sweep has to find the job."""
        source = PayloadSource.of(files)
        with open_database(self.settings).transaction() as connection:
            submit(connection, self.name, document, source, now=time.time())


class Cluster:
    """`count` sites, each with `saves` publications."""

    def __init__(self, root: Path, seed: int, *, count: int, saves: int) -> None:
        self._root = root
        self._dice = random.Random(seed)
        self._count = count
        self._saves = saves
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._backlog = 0
        self._last_seen = (0, 0)
        self._moved = time.monotonic()
        self.found = Found()
        self.about: dict[str, str | float] = {}

    def live(self, tell: Callable[[str], None]) -> Found:
        """Save, suffer incidents, come to rest, and return which promises were broken."""
        with ExitStack() as stack:
            self._set_up(stack)
            began = time.monotonic()
            self._suffer(tell)
            tell(f"no more incidents: {self._backlog} jobs are left")
            self._come_to_rest(tell)
            took = time.monotonic() - began
            self._stop_nodes()
            self._restore(tell)
            self._audit()
            published = self.found.figures["commits of the worker"]
            self.about["publications/s under all this"] = round(published / took, 2)
        return self.found

    # The surroundings

    def _set_up(self, stack: ExitStack) -> None:
        network = Network()
        stack.callback(network.close)
        folder = self._root / "postgres"
        self._root.chmod(0o755)
        self._server = Server(
            folder, addresses=f"127.0.0.1,{HUB}", host=str(folder), within=network.hub.within
        )
        self._server.start()
        stack.callback(self._server.stop)
        self._server.create("soak")
        self._url = self._server.url("soak")
        with closing(Database(self._url)) as database:
            database.upgrade()
        remotes = self._root / "remotes"
        remotes.mkdir()
        address = stack.enter_context(git_daemon(network.hub, remotes, free_port()))
        base = {key: value for key, value in os.environ.items() if not key.startswith(("BRITER_", "PG"))}
        environment = {**base, **_ENVIRONMENT, "BRITER_DATABASE_URL": self._server.url("soak", host=HUB)}
        self._nodes = []
        for number in range(_NODES):
            ahead = (7200, 0, -3600)[number % 3]
            node = Node(self._root / f"node-{number}", network.join(), environment, _SLOTS, ahead)
            self._nodes.append(node)
            stack.callback(self._nodes[-1].kill, whole=True)
        self._incidents = Incidents(self._nodes, self._server, self._new_dice(), _PAUSE_S)
        self._add_sites(remotes, address)
        self._add_hanging(stack, network.hub)
        stack.callback(lambda: open_database(self._settings).close())

    def _add_sites(self, remotes: Path, address: str) -> None:
        (self._root / "first").mkdir()
        first = DiskSite.make(self._root / "first")
        first.git("config", "uploadpack.allowFilter", "true", cwd=first.remote)
        first.git("config", "receive.fsckObjects", "true", cwd=first.remote)
        self._settings = load_settings(
            {
                **_ENVIRONMENT,
                "BRITER_DATABASE_URL": self._url,
                "BRITER_STORAGE_ROOT": str(self._root / "cms"),
                "HOME": str(self._root),
            }
        )
        database = open_database(self._settings)
        self._cms: list[ClusterCms] = []
        self._colleagues: list[Colleague] = []
        self._remotes: list[Path] = []
        for number in range(self._count):
            name = f"site{number:03}"
            remote = remotes / f"{name}.git"
            shutil.copytree(first.remote, remote, symlinks=True)
            url = f"{address}/{name}.git"
            site = sites.Site(name, url, "main", "local-mdx", created_at=time.time())
            sites.add(database, site, self._settings)
            settings = sites.settings_of(sites.get(database, name), self._settings)
            cms = ClusterCms(settings, self._new_dice(), self.found.figures)
            self._remotes.append(remote)
            self._cms.append(cms)
            self._colleagues.append(Colleague(remote, cms.ledger, self._new_dice(), TITLED))

    def _add_hanging(self, stack: ExitStack, hub: Namespace) -> None:
        """Add sites whose remote takes connections and never answers; they have posts all the time."""
        port = free_port()
        listen = f"import socket, time; s = socket.create_server(('{HUB}', {port})); time.sleep(1e9)"
        command = [*hub.within, "setpriv", "--pdeathsig", "KILL", sys.executable, "-c", listen]
        process = subprocess.Popen(command)
        stack.callback(process.wait)
        stack.callback(process.kill)
        for name in _HANGING:
            site = sites.Site(name, f"git://{HUB}:{port}/{name}.git", "main", "local-mdx")
            sites.add(open_database(self._settings), site, self._settings)
            document = compose("post", ["content/posts/post.md"])
            settings = sites.settings_of(sites.get(open_database(self._settings), name), self._settings)
            send(settings, document, files={"content/posts/post.md": b"never\n"})

    def _new_dice(self) -> random.Random:
        return random.Random(self._dice.random())

    # What happens

    def _suffer(self, tell: Callable[[str], None]) -> None:
        for node in self._nodes:
            node.start()
        writers = [self._thread(self._write, number, self._new_dice()) for number in range(_WRITERS)]
        others = [self._thread(self._push, self._new_dice()), self._thread(self._count_jobs)]
        for thread in (*writers, *others):
            thread.start()
        told = time.monotonic()
        try:
            while not self._is_enough(writers):
                self._incidents.step()
                time.sleep(0.02)
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    incidents = self._incidents.figures.total()
                    tell(f"{self.found.figures['saves']} saves, {self._backlog} wait, {incidents} incidents")
        finally:
            self._over.set()
            self._incidents.calm()
            for name in _HANGING:
                with open_database(self._settings).transaction() as connection:
                    sites.remove(connection, name, discard=True)
            for thread in (*writers, *others):
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _is_enough(self, writers: list[threading.Thread]) -> bool:
        if self._errors:
            return True
        now = (self.found.figures["saves"], self._backlog)
        if now != self._last_seen:
            self._last_seen, self._moved = now, time.monotonic()
        if time.monotonic() - self._moved < _PATIENCE_S and (
            any(thread.is_alive() for thread in writers) or self._backlog > max(4, self._count // 4)
        ):
            return False
        self._incidents.last()
        return self._incidents.is_done

    def _thread(self, act: Callable[..., None], *args: object) -> threading.Thread:
        def run() -> None:
            try:
                act(*args)
            except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for this one
                self._errors.append(error)

        return threading.Thread(target=run)

    def _write(self, number: int, dice: random.Random) -> None:
        """Save on some of the sites, in any order, as fast as about half of it is published."""
        mine = [cms for cms in self._cms[number::_WRITERS] for _ in range(self._saves)]
        dice.shuffle(mine)
        for cms in mine:
            while self._backlog > max(20, self._count) and not self._over.is_set():
                time.sleep(0.1)
            if self._over.is_set():
                return
            cms.save(given_up=self._over.is_set)
            time.sleep(dice.choice([0, 0.02, 0.1, 0.4]))

    def _push(self, dice: random.Random) -> None:
        while not self._over.is_set():
            dice.choice(self._colleagues).push()
            time.sleep(dice.uniform(0.2, 2.0))

    def _count_jobs(self) -> None:
        while not self._over.is_set():
            try:
                self._backlog = self._open()[0]
            except psycopg.Error:
                self.found.figures["looks in vain"] += 1
            time.sleep(0.3)

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self._url, autocommit=True, options="-c search_path=briter")

    def _open(self) -> tuple[int, ...]:
        with self._connect() as connection:
            return tuple(_one(connection, query) for query in _OPEN.values())

    # Rest

    def _come_to_rest(self, tell: Callable[[str], None]) -> None:
        self._await_rest(tell)
        dead = sum(len(open_queue(cms.settings).retry_all(time.time())) for cms in self._cms)
        self.found.figures["dead letters that were retried"] += dead
        if dead:
            self._await_rest(tell)
        with self._connect() as connection:
            rows = connection.execute(
                "SELECT site, slug, state, failure, document::text FROM publications"
            ).fetchall()
        (self._root / "left.json").write_text(json.dumps(rows, indent=1))
        self.found.wedged += [
            f"{site}: {slug} is {state} ({failure})" for site, slug, state, failure, _ in rows
        ]

    def _await_rest(self, tell: Callable[[str], None]) -> None:
        began = last = time.monotonic()
        before = self._open()
        while True:
            self._incidents.supervise()
            now = self._open()
            if now != before:
                before, last = now, time.monotonic()
            if not any(now):
                break
            if time.monotonic() - last > _PATIENCE_S:
                self.found.wedged.append(
                    f"for {_PATIENCE_S:g} s nothing happens: {dict(zip(_OPEN, now, strict=True))}"
                )
                break
            time.sleep(0.2)
        took = time.monotonic() - began
        self.about["seconds to come to rest"] = round(took, 1)
        tell(f"at rest after {took:.1f} s")

    def _restore(self, tell: Callable[[str], None]) -> None:
        """Back up, publish what waits and a later save of it, and restore: nothing may be reverted."""
        posts = [(cms, cms.ledger.saves[-1].slug) for cms in self._cms if cms.ledger.saves][:_RESTORED]
        for cms, slug in posts:
            cms.save(given_up=lambda: False, again=slug)
        backup = self._root / "postgres" / "backup"
        self._copy_data(self._root / "postgres" / "data", backup)
        self._publish(tell)
        for cms, slug in posts:
            cms.save(given_up=lambda: False, again=slug)
        self._publish(tell)
        tips = [read_files(remote) for remote in self._remotes]
        shutil.rmtree(self._root / "postgres" / "data")
        self._copy_data(backup, self._root / "postgres" / "data")
        done = self._nodes[0].command("db", "restored")
        self.found.wedged += [f"db restored: {line}" for line in done.stderr.splitlines()]
        self._publish(tell)
        if [read_files(remote) for remote in self._remotes] != tips:
            self.found.unsound.append("a restored backup changed what is on the remotes")
        for cms, slug in posts:
            queue = open_queue(cms.settings)
            if queue.find(slug, time.time()):
                queue.cancel(slug, time.time())
                self.found.figures["saves that a restore made outdated"] += 1

    def _publish(self, tell: Callable[[str], None]) -> None:
        """Run the nodes until nothing is left to do."""
        for node in self._nodes:
            node.start()
        self._await_rest(tell)
        self._stop_nodes()

    def _copy_data(self, source: Path, target: Path) -> None:
        """Copy the database's files while no server runs."""
        open_database(self._settings).close()
        self._server.stop()
        subprocess.run(["cp", "-a", source, target], check=True)
        self._server.start()

    def _stop_nodes(self) -> None:
        self._incidents.calm()
        for node in self._nodes:
            node.terminate()
        for node in self._nodes:
            status = node.end(40)
            if status != 0 and (status != -signal.SIGTERM or node.is_at_work()):
                self.found.wedged.append(f"{node.logs[-1]}: asked to stop, it ended with {status}")
            self.found.unsound += [f"{node.folder.name}: {line} still runs" for line in node.left_over()]

    # The audit

    def _audit(self) -> None:
        found = self.found
        found.figures.update(self._incidents.figures)
        found.wedged += self._incidents.surprises
        for cms, remote in zip(self._cms, self._remotes, strict=True):
            commits = list(read_history(remote, "main"))
            there = judge(cms.ledger, commits, read_files(remote), ())
            there.unsound += fsck(remote)
            for name in PROMISES:
                getattr(found, name).extend(f"{cms.name}: {line}" for line in getattr(there, name))
            # For whoever has to find out what happened, should a promise be broken.
            (self._root / f"{cms.name}.ledger").write_text("\n".join(map(str, cms.ledger.saves)))
            found.figures.update(there.figures)
        found.unsound += self._left_in_database()
        self._read_logs()

    def _left_in_database(self) -> Iterator[str]:
        if self.found.wedged:
            return  # what is left is named there
        collect_blobs(open_database(self._settings))
        with self._connect() as connection:
            for name, query in _LEFT.items():
                if left := _one(connection, query):
                    yield f"{left} {name} are left"

    def _read_logs(self) -> None:
        for log in [log for node in self._nodes for log in node.logs]:
            text = log.read_text(errors="replace")
            for event in events_in(text):
                if event["event"] in ("published", "reaped", "failed", "dead-lettered", "revived"):
                    self.found.figures[f"times {event['event']}"] += 1
                if "an error in the worker itself" in (event.get("error") or ""):
                    self.found.unsound.append(f"{log.name}: {event['error']}")
            if "Traceback" in text:
                self.found.unsound.append(f"{log}: {text[text.index('Traceback') :][:1500]}")


def _one(connection: psycopg.Connection, query: str) -> int:
    row = connection.execute(query.encode()).fetchone()
    return int(row[0]) if row else 0
