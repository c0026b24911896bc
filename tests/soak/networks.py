"""Hosts with a network of their own, which can be cut; Postgres and the remotes are at the hub between them.

Where that is allowed, each is a network namespace, joined to the hub's by a veth pair. They last as long as
the process that holds each, and so no longer than this one. Elsewhere a relay stands before Postgres for
each host, and the way to the remotes cannot be cut.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")
_HUB = "198.18.0.1"  # of a range that is set aside for such tests


class Way(Protocol):
    """What joins one host to the hub."""

    @property
    def within(self) -> Sequence[str]:
        """A command that runs another on this host."""
        ...

    def port(self, port: int) -> int:
        """At which port of the hub's address this host finds what listens there at `port`."""
        ...

    def cut(self, *, noticed: bool) -> None:
        """Nothing gets through, which the host's own kernel notices or not."""
        ...

    def mend(self) -> None:
        """What was on its way goes on."""
        ...


class Network(Protocol):
    """The hub and the ways to it."""

    address: str
    within: Sequence[str]
    """A command that runs another at the hub."""
    kind: str

    def join(self) -> Way:
        """A host more."""
        ...

    def close(self) -> None:
        """All of it is gone."""
        ...


def open_network() -> Network:
    """Of namespaces where they can be had."""
    if os.geteuid() == 0 and all(map(shutil.which, _PROGRAMS)):
        with suppress(subprocess.CalledProcessError):
            return Namespaces()
    return Relays()


class _Namespace:
    """A network namespace, with the process that holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        )
        self.pid = self._holder.pid
        self.within = ("nsenter", f"--net=/proc/{self.pid}/ns/net")
        ours = Path("/proc/self/ns/net").readlink()
        deadline = time.monotonic() + 10
        while self._holder.poll() is None and time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                if Path(f"/proc/{self.pid}/ns/net").readlink() != ours:
                    return
            time.sleep(0.005)
        self.end()
        raise subprocess.CalledProcessError(1, "unshare --net")

    def ip(self, *words: str) -> None:
        subprocess.run([*self.within, "ip", *words], check=True, capture_output=True)

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()


class Namespaces:
    """Each host as a machine of its own, as far as the network goes."""

    address = _HUB
    kind = "network namespaces"

    def __init__(self) -> None:
        self._hub = _Namespace()
        self._all = [self._hub]
        self.within: Sequence[str] = self._hub.within
        try:
            self._hub.ip("link", "set", "lo", "up")
            self._hub.ip("link", "add", "hub", "type", "bridge")
            self._hub.ip("addr", "add", f"{_HUB}/24", "dev", "hub")
            self._hub.ip("link", "set", "hub", "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def join(self) -> Way:
        """See `Network`."""
        host = _Namespace()
        number = len(self._all)
        self._all.append(host)
        port = f"host{number}"
        self._hub.ip(*f"link add {port} type veth peer name eth0 netns {host.pid}".split())
        self._hub.ip("link", "set", port, "master", "hub", "up")
        host.ip("link", "set", "lo", "up")
        host.ip("addr", "add", f"198.18.0.{number + 1}/24", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")
        return _Veth(self._hub, port, host)

    def close(self) -> None:
        """See `Network`."""
        for each in self._all:
            each.end()


@dataclass
class _Veth:
    hub: _Namespace
    name: str
    host: _Namespace

    @property
    def within(self) -> Sequence[str]:
        return self.host.within

    def port(self, port: int) -> int:
        return port

    def cut(self, *, noticed: bool) -> None:
        if noticed:
            self.host.ip("link", "set", "eth0", "down")
        else:
            # As a cable that is cut behind the next switch: the host's own link is up.
            self.hub.ip("link", "set", self.name, "nomaster")

    def mend(self) -> None:
        self.hub.ip("link", "set", self.name, "master", "hub", "up")
        self.host.ip("link", "set", "eth0", "up")


class Relays:
    """All in the network of this process."""

    address = "127.0.0.1"
    within: Sequence[str] = ()
    kind = "relays"

    def __init__(self) -> None:
        self._ways: list[_Relayed] = []

    def join(self) -> Way:
        """See `Network`."""
        way = _Relayed()
        self._ways.append(way)
        return way

    def close(self) -> None:
        """See `Network`."""
        for way in self._ways:
            way.close()


@dataclass
class _Relayed:
    within: Sequence[str] = ()
    _flows: threading.Event = field(default_factory=threading.Event)
    _servers: dict[int, socket.socket] = field(default_factory=dict)
    _sockets: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._flows.set()

    def port(self, port: int) -> int:
        if port not in self._servers:
            self._servers[port] = server = socket.create_server(("127.0.0.1", 0))
            threading.Thread(target=self._serve, args=(server, port), daemon=True).start()
        found: int = self._servers[port].getsockname()[1]
        return found

    def cut(self, *, noticed: bool) -> None:
        self._flows.clear()
        if noticed:
            self._hang_up()

    def mend(self) -> None:
        self._flows.set()

    def close(self) -> None:
        for server in self._servers.values():
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self._hang_up()
        self._flows.set()

    def _hang_up(self) -> None:
        while self._sockets:
            with suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def _serve(self, server: socket.socket, port: int) -> None:
        with suppress(OSError):  # it is closed
            while True:
                ours = server.accept()[0]
                threading.Thread(target=self._join, args=(ours, port), daemon=True).start()

    def _join(self, ours: socket.socket, port: int) -> None:
        self._flows.wait()
        with suppress(OSError), ours, socket.create_connection(("127.0.0.1", port)) as theirs:
            self._sockets += [ours, theirs]
            back = threading.Thread(target=self._pump, args=(theirs, ours), daemon=True)
            back.start()
            self._pump(ours, theirs)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class Daemon:
    """`git daemon` over the repositories in a folder, at the hub."""

    network: Network
    folder: Path
    port: int

    def __enter__(self) -> str:
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*self.network.within, "setpriv", "--pdeathsig", "TERM", "git", "daemon"),
                    *("--export-all", "--enable=receive-pack", "--reuseaddr", "--max-connections=0"),
                    *("--init-timeout=10", "--timeout=20", f"--base-path={self.folder}"),
                    *(f"--listen={self.network.address}", f"--port={self.port}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return f"git://{self.network.address}:{self.port}"

    def __exit__(self, *_: object) -> None:
        # With those that still wait for a client that was cut off.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
