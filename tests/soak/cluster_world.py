"""A cluster with everybody around it, and what befalls its hosts; then peace, and an audit of all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
from postgres import Server
from sites import Site as DiskSite
from sites import events_in

from briter_worker.cluster import sites
from briter_worker.queues.postgres.database import Database
from briter_worker.settings import load_settings
from briter_worker.wiring import open_database, open_rows
from soak import ledger
from soak.cluster_hosts import Fate, Host
from soak.cluster_people import Cms, Colleague
from soak.ledger import Found
from soak.networks import Daemon, open_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_ENVIRONMENT = {
    "BRITER_WORKER_DRY_RUN": "false",
    "BRITER_WORKER_BACKOFF_MS": "500,2000,5000",
    "BRITER_WORKER_SHUTDOWN_TIMEOUT_MS": "15000",
    "BRITER_GIT_TIMEOUT_MS": "10000",
}
_WRITERS = 3
_PATIENCE = 120.0
"""So long nothing may happen while anything waits: twice what a site in doubt may rest."""
_STILL = {
    "rows": "SELECT count(*) FROM publications WHERE state <> 'failed'",
    "claimed": "SELECT count(*) FROM publications WHERE state = 'claimed'",
    "words": "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
}
_LEFT = {
    "jobs of the engine": "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')",
    "publications": "SELECT count(*) FROM publications",
    "batches": "SELECT count(*) FROM batches",
    "plans": "SELECT count(*) FROM plans",
    "contents": "SELECT count(*) FROM contents",
    "parts of contents": "SELECT count(*) FROM content_parts",
    "files of publications": "SELECT count(*) FROM delivered",
    "contents that no start needs": (
        "SELECT count(*) FROM start_contents c WHERE NOT EXISTS"
        " (SELECT FROM starts s WHERE s.site = c.site AND s.start = c.blob)"
    ),
}


class Cluster:
    """`count` sites, each with `saves` publications; `hosts` hosts of `slots` slots each."""

    def __init__(
        self, root: Path, seed: int, *, count: int, saves: int, pause: float, hosts: int = 3, slots: int = 2
    ) -> None:
        self._root = root
        self._dice = random.Random(seed)
        self._count = count
        self._saves = saves
        self._pause = pause
        self._size = (hosts, slots)
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._backlog = 0
        self._last_seen = (0, 0)
        self._moved = time.monotonic()
        self.found = Found()
        self.about: dict[str, str | float] = {}

    def live(self, tell: Callable[[str], None]) -> Found:
        """All of it; what was broken."""
        with ExitStack() as stack:
            self._set_up(stack)
            began = time.monotonic()
            self._suffer(tell)
            tell(f"peace: {self._backlog} rows are left")
            self._come_to_rest(tell)
            lasted = time.monotonic() - began
            self._retire()
            self._audit()
            published = self.found.figures["commits of the worker's"]
            self.about["publications/s under all this"] = round(published / lasted, 2)
        return self.found

    # The surroundings

    def _set_up(self, stack: ExitStack) -> None:
        network = open_network()
        stack.callback(network.close)
        folder = self._root / "postgres"
        self._root.chmod(0o755)
        addresses = ",".join(dict.fromkeys(["127.0.0.1", network.address]))
        host = str(folder) if network.within else "127.0.0.1"
        self._server = Server(folder, addresses=addresses, host=host, within=network.within)
        self._server.start()
        stack.callback(self._server.stop)
        self._server.create("soak")
        self._url = self._server.url("soak")
        with Database(self._url) as database:
            database.upgrade()
        remotes = self._root / "remotes"
        remotes.mkdir()
        address = stack.enter_context(Daemon(network, remotes, _free_port()))
        base = {key: value for key, value in os.environ.items() if not key.startswith(("BRITER_", "PG"))}
        self._hosts = []
        for number in range(self._size[0]):
            way = network.join()
            url = self._server.url("soak", host=network.address)
            url = url.replace(f":{self._server.port}/", f":{way.port(self._server.port)}/")
            environment = {**base, **_ENVIRONMENT, "BRITER_DATABASE_URL": url}
            self._hosts.append(Host(self._root / f"host-{number}", way, environment, self._size[1]))
            stack.callback(self._hosts[-1].kill, whole=True)
        self._fate = Fate(self._hosts, self._server, self._new_dice(), self._pause)
        self.about["hosts"] = f"{self._size[0]} in {network.kind}, of {self._size[1]} slots each"
        self._populate(remotes, address)
        stack.callback(lambda: open_database(self._settings).close())

    def _populate(self, remotes: Path, address: str) -> None:
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
        self._cms: list[Cms] = []
        self._colleagues: list[Colleague] = []
        self._remotes: list[Path] = []
        for number in range(self._count):
            name = f"site{number:03}"
            remote = remotes / f"{name}.git"
            shutil.copytree(first.remote, remote, symlinks=True)
            sites.add(
                database,
                sites.Site(name, f"{address}/{name}.git", "main", "local-mdx", created_at=time.time()),
                self._settings,
            )
            settings = sites.settings_of(sites.get(database, name), self._settings)
            cms = Cms(settings, self._root / "cms" / name, self._new_dice(), self.found.figures)
            clone = self._root / "colleagues" / name
            self._remotes.append(remote)
            self._cms.append(cms)
            self._colleagues.append(Colleague(remote, clone, cms.ledger, self._new_dice()))

    def _new_dice(self) -> random.Random:
        return random.Random(self._dice.random())

    # What happens

    def _suffer(self, tell: Callable[[str], None]) -> None:
        for host in self._hosts:
            host.start()
        writers = [
            threading.Thread(target=self._going_on, args=(self._write, number, self._new_dice()))
            for number in range(_WRITERS)
        ]
        others = [
            threading.Thread(target=self._going_on, args=(self._push, self._new_dice())),
            threading.Thread(target=self._going_on, args=(self._count_rows,)),
        ]
        for thread in (*writers, *others):
            thread.start()
        told = time.monotonic()
        try:
            while not self._is_enough(writers):
                self._fate.step()
                time.sleep(0.02)
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    deeds = self._fate.figures.total()
                    tell(f"{self.found.figures['saves']} saves, {self._backlog} rows, {deeds} events")
        finally:
            self._over.set()
            self._fate.calm()
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
        if time.monotonic() - self._moved < _PATIENCE and (
            any(thread.is_alive() for thread in writers) or self._backlog > max(4, self._count // 4)
        ):
            return False
        self._fate.last()
        return self._fate.is_done

    def _going_on(self, act: Callable[..., None], *args: object) -> None:
        try:
            act(*args)
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits for it
            self._errors.append(error)

    def _write(self, number: int, dice: random.Random) -> None:
        """All saves of some of the sites, in any order, as fast as about half of them is published."""
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

    def _count_rows(self) -> None:
        while not self._over.is_set():
            try:
                self._backlog = self._still()[0]
            except psycopg.Error:
                self.found.figures["looks in vain"] += 1
            time.sleep(0.3)

    def _still(self) -> tuple[int, ...]:
        with psycopg.connect(self._url, autocommit=True, options="-c search_path=briter") as connection:
            return tuple(_one(connection, query) for query in _STILL.values())

    # Peace

    def _come_to_rest(self, tell: Callable[[str], None]) -> None:
        self._settle(tell)
        database = open_database(self._settings)
        dead = 0
        for cms in self._cms:
            dead += len(open_rows(cms.settings).retry_all(time.time()))
        self.found.figures["dead letters that were retried"] += dead
        if dead:
            self._settle(tell)
        with database.transaction() as connection:
            rows = connection.execute(
                "SELECT site, slug, state, attempts, failure, token, document FROM publications"
            ).fetchall()
        (self._root / "left.json").write_text(json.dumps(rows, indent=1))
        self.found.wedged += [
            f"{site}: {slug} is {state} ({failure})" for site, slug, state, _, failure, *_ in rows
        ]

    def _settle(self, tell: Callable[[str], None]) -> None:
        began = last = time.monotonic()
        before = self._still()
        while True:
            self._fate.watch()
            now = self._still()
            if now != before:
                before, last = now, time.monotonic()
            if not any(now):
                break
            if time.monotonic() - last > _PATIENCE:
                self.found.wedged.append(
                    f"for {_PATIENCE:g} s nothing happens: {dict(zip(_STILL, now, strict=True))}"
                )
                break
            time.sleep(0.2)
        took = time.monotonic() - began
        self.about["seconds to come to rest"] = round(took, 1)
        tell(f"at rest after {took:.1f} s")

    def _retire(self) -> None:
        self._fate.calm()
        for host in self._hosts:
            host.terminate()
        for host in self._hosts:
            status = host.end(40)
            if status != 0 and (status != -signal.SIGTERM or host.is_at_work()):
                self.found.wedged.append(f"{host.logs[-1]}: told to stop, it ended with {status}")
            self.found.unsound += [f"{host.folder.name}: {line} still runs" for line in host.left_over()]

    # The audit

    def _audit(self) -> None:
        found = self.found
        found.figures.update(self._fate.figures)
        found.wedged += self._fate.surprises
        for cms, remote in zip(self._cms, self._remotes, strict=True):
            commits = ledger.history(remote)
            there = ledger.judge(cms.ledger, commits, ledger.contents(remote), ())
            done = subprocess.run(
                ["git", "fsck", "--strict"], cwd=remote, capture_output=True, text=True, check=False
            )
            if done.returncode:
                there.unsound.append(f"fsck: {done.stdout} {done.stderr}")
            for name in ("lost", "twice", "extra", "wedged", "unsound"):
                getattr(found, name).extend(f"{cms.name}: {line}" for line in getattr(there, name))
            # For whoever has to find out what happened, should a promise be broken.
            (self._root / "cms" / f"{cms.name}.ledger").write_text("\n".join(map(str, cms.ledger.saves)))
            messages = {save.message for save in cms.ledger.saves}
            found.figures["commits of the worker's"] += sum(each.message in messages for each in commits)
            found.figures["commits of people's"] += sum(each.message not in messages for each in commits) - 1
        found.unsound += self._left_in_database()
        self._read_logs()

    def _left_in_database(self) -> Iterator[str]:
        if self.found.wedged:
            return  # that says it all
        with psycopg.connect(self._url, autocommit=True, options="-c search_path=briter") as connection:
            for name, query in _LEFT.items():
                if left := _one(connection, query):
                    yield f"{left} {name} are left"

    def _read_logs(self) -> None:
        for log in [log for host in self._hosts for log in host.logs]:
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


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
