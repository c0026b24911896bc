"""Nodes with a network of their own, which can be cut; Postgres and the remotes are at the hub between them.

Each is a network namespace, joined to the hub's by a veth pair. A namespace lasts as long as the process that
holds it, and so no longer than this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HUB = "198.18.0.1"  # of a range that is set aside for such tests
_PROGRAMS = ("ip", "nsenter", "setpriv", "unshare")


def why_no_networks() -> str:
    """Return why this machine can have no network namespaces; empty if it can."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"not installed: {', '.join(missing)}"
    try:
        network = Network()
    except subprocess.CalledProcessError as error:
        return str(error.stderr or error)
    network.close()
    return ""


class Namespace:
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


class Network:
    """The hub, and a link to it for each node."""

    def __init__(self) -> None:
        self.hub = Namespace()
        self._all = [self.hub]
        try:
            self.hub.ip("link", "set", "lo", "up")
            self.hub.ip("link", "add", "hub", "type", "bridge")
            self.hub.ip("addr", "add", f"{HUB}/24", "dev", "hub")
            self.hub.ip("link", "set", "hub", "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def join(self) -> Link:
        node = Namespace()
        number = len(self._all)
        self._all.append(node)
        port = f"node{number}"
        self.hub.ip(*f"link add {port} type veth peer name eth0 netns {node.pid}".split())
        self.hub.ip("link", "set", port, "master", "hub", "up")
        node.ip("link", "set", "lo", "up")
        node.ip("addr", "add", f"198.18.0.{number + 1}/24", "dev", "eth0")
        node.ip("link", "set", "eth0", "up")
        return Link(self.hub, port, node)

    def close(self) -> None:
        for each in self._all:
            each.end()


@dataclass
class Link:
    """The link between one node and the hub."""

    hub: Namespace
    name: str
    node: Namespace

    def cut(self, *, noticed: bool) -> None:
        """Let nothing through; the node's own kernel notices or not."""
        if noticed:
            self.node.ip("link", "set", "eth0", "down")
        else:
            # As a cable that is cut behind the next switch: the node's own link is up.
            self.hub.ip("link", "set", self.name, "nomaster")

    def restore(self) -> None:
        self.hub.ip("link", "set", self.name, "master", "hub", "up")
        self.node.ip("link", "set", "eth0", "up")


@contextmanager
def git_daemon(hub: Namespace, folder: Path, port: int) -> Iterator[str]:
    """Serve the repositories in a folder at the hub; yield the address."""
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(*hub.within, "setpriv", "--pdeathsig", "TERM", "git", "daemon"),
                *("--export-all", "--enable=receive-pack", "--reuseaddr", "--max-connections=0"),
                *("--init-timeout=10", "--timeout=20", f"--base-path={folder}"),
                *(f"--listen={HUB}", f"--port={port}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield f"git://{HUB}:{port}"
    finally:
        # With its processes that still wait for a client that was cut off.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
