"""Node health: the stored heartbeat, and checks of disk, memory, network and git.

A failure of the node's own costs a post no attempt, and a node that is sick leaves the sites to others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from briter_worker.errors import Failure, FailureCode, PublishError
from briter_worker.events import Warned
from briter_worker.worker import loop_backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_ALIVE_S = 15.0
"""A node that has sent no heartbeat for this time is not counted."""
_FORGET_S = 86_400.0
_MAX_SKEW_S = 2.0
_MIN_BYTES = 16 << 20
_MIN_MEMORY_BYTES = 64 << 20
_FIRST_PROBE_S = 0.5
_OWN = frozenset(
    {
        FailureCode.DISK,
        FailureCode.GIT_MISSING,
        FailureCode.CORRUPT,
        FailureCode.NOT_A_REPOSITORY,
        FailureCode.LOCKED,
        FailureCode.INTERNAL,
    }
)
"""Failures that the node's surroundings, or a deleted or damaged clone, may have caused."""
_OF_ONE_NODE = re.compile(
    "root|metrics|dashboard|concurrency|per_host|database|proxies|token|secret|_site$|^site$|^git_worktree"
)
"""Settings in which the nodes of a cluster may differ."""
_HOST = re.compile(
    r"(?:[a-z+]+://)?(?:[^@/]*@)?(\[[^\]]*\](?::\d+)?|[^/:]+(?::\d+(?=/))?)[/:]", re.IGNORECASE
)
_REPORT = """
INSERT INTO nodes (name, seen_at, facts) VALUES (%s, %s, %s)
ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, facts = excluded.facts
"""
_RUNNING = (
    "SELECT name, facts FROM nodes WHERE seen_at > extract(epoch FROM clock_timestamp()) - %s ORDER BY 1"
)


class NodeRecord(NamedTuple):
    """What one running node has said of itself."""

    name: str
    facts: Mapping[str, Any]


class Health:
    """The health of one node. Safe in several threads."""

    def __init__(self, settings: Settings, log: Callable[[Warned], None]) -> None:
        self.problem: Failure | None = None
        """The failure of the node's own that keeps it from publishing."""
        self._settings = settings
        self._log = log
        self._guard = threading.Lock()
        self._unreachable: dict[str, str] = {}
        """Hosts that could not be reached since any was reached, by site."""
        self._damaged: set[str] = set()
        """Sites whose last drain met a damaged clone."""
        self._probes = 0

    def blames_node(self, site: str, host: str, failure: Failure) -> bool:
        """Return True if the failure of a drain is the node's own, and no attempt of the posts."""
        if failure.code is FailureCode.NETWORK and host:
            with self._guard:
                self._unreachable[site] = host
                hosts = sorted(set(self._unreachable.values()))
            if len(hosts) == 1:
                return False
            text = f"no network: neither {' nor '.join(hosts[:3])} can be reached"
            self._fall_sick(Failure(FailureCode.NETWORK, text, "check this node's network and name servers"))
            return True
        if failure.code not in _OWN:
            return False
        if (problem := self._find_problem()) is not None:
            self._fall_sick(problem)
            return True
        with self._guard:
            is_first = failure.code is not FailureCode.INTERNAL and site not in self._damaged
            self._damaged.add(site)
        return is_first  # the site is cloned again; what fails again is no accident

    def succeed(self, site: str) -> None:
        """Note that the node has published."""
        with self._guard:
            self._damaged.discard(site)
            self._unreachable.clear()
            self._probes = 0

    def unreachable_sites(self) -> list[str]:
        """Return the sites whose hosts could not be reached since any was reached."""
        with self._guard:
            return list(self._unreachable)

    def pause(self) -> float:
        """Return how long to wait before the next probe: longer each time."""
        self._probes += 1
        return loop_backoff(self._probes, _FIRST_PROBE_S)

    def probe(self) -> None:
        """Look whether the node may take sites again."""
        before, self.problem = self.problem, self._find_problem()
        if before is not None and self.problem is None:
            self._log(Warned(error="this node takes sites again"))

    def _fall_sick(self, problem: Failure) -> None:
        with self._guard:
            is_new = self.problem is None
            self.problem = problem
        if is_new:
            self._log(Warned(error=f"this node takes no sites: {problem.message}", fix=problem.fix))

    def _find_problem(self) -> Failure | None:
        try:
            self._settings.cache_root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._settings.cache_root) as file:
                os.posix_fallocate(file.fileno(), 0, _MIN_BYTES)
        except OSError as error:
            what = f"the cache {self._settings.cache_root} cannot be written"
            return PublishError.from_os(what, error).failure
        if shutil.which("git") is None:
            return Failure(FailureCode.GIT_MISSING, "git was not found", "install git 2.38 or newer")
        if psutil.virtual_memory().available < _MIN_MEMORY_BYTES:
            return Failure(FailureCode.INTERNAL, "the memory does not suffice", "give the node more memory")
        return None


def host_of(remote: str) -> str:
    """Return the host of a remote's address, with its port; empty for a path."""
    found = None if remote.startswith(("/", "file:")) else _HOST.match(remote)
    return found[1].lower() if found else ""


def describe_node(settings: Settings, health: Health, database: Database) -> dict[str, Any]:
    """Return what a node says of itself. Raises DatabaseError."""
    values = settings.model_dump(mode="json")
    shared = {key: value for key, value in values.items() if not _OF_ONE_NODE.search(key)}
    text = json.dumps(shared, sort_keys=True, default=str)
    return {
        "dryRun": settings.worker_dry_run,
        "version": version("briter-worker"),
        "settings": hashlib.sha256(text.encode()).hexdigest()[:8],
        "ahead": time.time() - database.read_clock(),
        "problem": health.problem and health.problem.message,
        "fix": health.problem.fix if health.problem else "",
    }


def report_node(database: Database, name: str, facts: Mapping[str, Any]) -> None:
    """Store what the node says of itself, and forget nodes that are long gone. Raises DatabaseError."""
    now = database.now()
    with database.transaction() as connection:
        connection.execute("DELETE FROM nodes WHERE seen_at < %s", (now - _FORGET_S,))
        connection.execute(_REPORT, (name, now, json.dumps(facts)))


def forget_node(database: Database, name: str) -> None:
    """Remove a node that has stopped. Raises DatabaseError."""
    with database.connection() as connection:
        connection.execute("DELETE FROM nodes WHERE name = %s", (name,))


def running_nodes(database: Database) -> list[NodeRecord]:
    """Return the nodes that have said something of late, by name. Raises DatabaseError."""
    with database.connection() as connection:
        return [NodeRecord(*row) for row in connection.execute(_RUNNING, (_ALIVE_S,))]


def complaints(nodes: Sequence[NodeRecord]) -> list[tuple[str, str]]:
    """Return what is wrong with which node, and the fix: sick ones, wrong clocks, those that differ."""
    found = []
    for node in nodes:
        if node.facts["problem"]:
            found.append((f"{node.name} takes no sites: {node.facts['problem']}", str(node.facts["fix"])))
        if abs(node.facts["ahead"]) > _MAX_SKEW_S:
            text = f"the clock of {node.name} is {node.facts['ahead']:+.0f} s off Postgres's"
            found.append((text, "synchronise the clocks: timedatectl set-ntp true"))
    for key in ("dryRun", "version", "settings"):
        for value, _ in Counter(node.facts[key] for node in nodes).most_common()[1:]:
            names = ", ".join(node.name for node in nodes if node.facts[key] == value)
            what = f"has other {key} ({value})"
            if key == "dryRun":
                what = "is in dry run" if value else "is live"
            fix = "start all nodes with the same version and settings"
            found.append((f"{names} {what}, unlike other nodes", fix))
    return found
