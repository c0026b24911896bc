"""The nodes of a cluster as processes, and incidents: kills, long stops, cut networks, a lost database."""

from __future__ import annotations

import heapq
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from remotes import left_over

from soak.processes import send, tree_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from postgres import Server

    from soak.networks import Link

_SKEW = Path(__file__).parents[1] / "skew"
"""With it, a process has a wrong clock."""
_SILENCE_S = (12.0, 16.0)
"""Longer than a node may be silent before it counts as dead."""
_START_S = 30.0
"""A worker that cannot reach its database at the start may give up within this time."""
_STEADY_S = 25.0
"""A Postgres that goes away more often would let no node find out which one is dead."""


class Node:
    """One machine: its network, its disk, and the worker that its supervisor starts again and again."""

    def __init__(
        self, folder: Path, link: Link, environment: Mapping[str, str], slots: int, ahead: int
    ) -> None:
        """`ahead`: by how many seconds the machine's clock is wrong."""
        skewed = ":".join(filter(None, [str(_SKEW), environment.get("PYTHONPATH")]))
        self.folder = folder
        self.link = link
        self.is_stopped = False
        self.is_cut = False
        self.is_sick = False
        self._slots = slots
        self._environment = {
            **environment,
            "BRITER_STORAGE_ROOT": str(folder),
            "PYTHONPATH": skewed,
            "SKEW_S": str(ahead),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen: list[psutil.Process] = []
        self._starts = 0
        self.started = 0.0
        folder.mkdir()

    @property
    def is_well(self) -> bool:
        """Return True if a worker runs here, undisturbed."""
        return self._process is not None and not (self.is_stopped or self.is_cut or self.is_sick)

    @property
    def logs(self) -> list[Path]:
        """Return the logs of its workers, one file for each."""
        return sorted(self.folder.glob("worker-*.log"))

    def start(self) -> None:
        self._starts += 1
        self.started = time.monotonic()
        with (self.folder / f"worker-{self._starts:04}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(*self.link.node.within, sys.executable, "-m", "briter_worker"),
                    *("run", "--workers", str(self._slots)),
                ],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.link.node.within, sys.executable, "-m", "briter_worker", *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def ended(self) -> int | None:
        """Return the status of a worker that has ended by itself, once; else None."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self._process = None
        return status

    def kill(self, *, whole: bool) -> None:
        """Kill the worker, or all that it has started too, as the machine's end would."""
        process, self._process = self._process, None
        if process is None:
            return
        self.is_stopped = False
        if whole:
            send(tree_of(process.pid), signal.SIGKILL)
        process.kill()
        process.wait()
        if not whole:
            send(self._frozen, signal.SIGCONT)
        self._frozen = []

    def freeze(self, *, whole: bool) -> None:
        """Stop the worker, or all that it has started too."""
        if self._process is not None:
            self.is_stopped = True
            self._frozen = tree_of(self._process.pid) if whole else [psutil.Process(self._process.pid)]
            send(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        self.is_stopped = False
        send(self._frozen, signal.SIGCONT)
        self._frozen = []

    def cut(self, *, noticed: bool) -> None:
        self.is_cut = True
        self.link.cut(noticed=noticed)

    def reconnect(self) -> None:
        self.is_cut = False
        self.link.restore()

    def lose_clones(self, dice: random.Random) -> None:
        """Delete a folder of its cache while it is in use, or all of it."""
        cache = self.folder / "cache"
        parts = [cache, *cache.glob("*"), *cache.rglob("objects"), *cache.rglob("refs")]
        shutil.rmtree(dice.choice(parts), ignore_errors=True)

    def spoil_disk(self) -> None:
        """Let nothing be written to its cache, and take away what was there."""
        self.is_sick = True
        cache = self.folder / "cache"
        while not cache.is_file():  # the node may make the folder again in between
            with suppress(FileNotFoundError):
                lost = cache.rename(self.folder / f"cache-lost-{time.monotonic_ns()}")
                shutil.rmtree(lost, ignore_errors=True)
            with suppress(IsADirectoryError):
                cache.write_text("no folder")

    def mend_disk(self) -> None:
        self.is_sick = False
        (self.folder / "cache").unlink()

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def is_at_work(self) -> bool:
        """Return True between the worker's first and last line: only then does it handle signals."""
        log = self.logs[-1].read_text()
        return log.count('"worker-started"') > log.count('"worker-stopped"')

    def end(self, patience: float) -> int | None:
        """Return the status of a worker that was asked to stop; None if it did not."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill(whole=True)

    def left_over(self) -> list[str]:
        return left_over(self.folder)


class Incidents:
    """Lets things happen to the nodes, one after the other, each followed by its end. In the main thread."""

    def __init__(self, nodes: Sequence[Node], database: Server, dice: random.Random, pause: float) -> None:
        self.figures: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._nodes = nodes
        self._database = database
        self._dice = dice
        self._pause = pause
        self._is_away = self._is_last = False
        self._back = -_STEADY_S
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._next = time.monotonic() + pause
        great: list[Callable[[], bool]] = [
            self._kill,
            partial(self._freeze, "SIGSTOP, longer than the silence", *_SILENCE_S),
            partial(self._disconnect, "networks cut, longer than the silence", *_SILENCE_S),
            self._restart_database,
            self._lose,
            self._spoil,
        ]
        self._due = dice.sample(great, len(great))
        """What has to happen at least once."""
        self._any: list[Callable[[], bool]] = [
            *(*great, self._kill, self._retire, self._lose_power),
            partial(self._freeze, "SIGSTOP, for a moment", 0.1, 3),
            partial(self._disconnect, "networks cut, for a moment", 0.1, 5),
        ]

    @property
    def is_done(self) -> bool:
        """Return True if each kind that has to happen has happened, and has ended."""
        return not self._due and not self._ends

    def step(self) -> None:
        """Let happen what is due by now."""
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()
        self.supervise()
        if now >= self._next:
            self._next = now + self._dice.expovariate(1 / self._pause)
            if self._due:
                # The first that finds a node without another incident.
                done = next((each for each in self._due if each()), None)
                self._due = [each for each in self._due if each is not done]
            elif not self._is_last:
                self._dice.choice(self._any)()

    def last(self) -> None:
        """Begin nothing new but what has to happen."""
        self._is_last = True

    def calm(self) -> None:
        """End all that was begun."""
        while self._ends:
            heapq.heappop(self._ends)[2]()
        self.supervise()

    def supervise(self) -> None:
        """Start workers that have ended again."""
        for node in self._nodes:
            status = node.ended()
            if status is None:
                continue
            log = node.logs[-1]
            if status and "worker-started" in log.read_text() and time.monotonic() - node.started > _START_S:
                self.surprises.append(f"{log} ended with status {status}: {log.read_text()[-1500:]}")
            self.figures["starts without a database"] += status != 0
            self._after(self._dice.uniform(0.3, 1.0), node.start)

    def _after(self, seconds: float, end: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._ends, (time.monotonic() + seconds, self._number, end))

    def _pick(self, *, leave: int = 0) -> Node | None:
        """Return a node without an incident, if there are more than `leave` of them."""
        well = [node for node in self._nodes if node.is_well]
        return self._dice.choice(well) if len(well) > leave else None

    def _kill(self) -> bool:
        if (node := self._pick()) is None:
            return False
        whole = self._dice.random() < 0.5
        node.kill(whole=whole)
        self.figures["SIGKILL of a node's processes" if whole else "SIGKILL of a worker"] += 1
        self._after(self._dice.uniform(0.2, 4), node.start)
        return True

    def _lose_power(self) -> bool:
        """No peer learns that the node's connections have ended."""
        if (node := self._pick(leave=1)) is None:
            return False
        node.cut(noticed=False)
        node.kill(whole=True)
        self.figures["power cuts"] += 1
        later = self._dice.uniform(1, 16)
        self._after(later, node.reconnect)
        self._after(later + 0.1, node.start)
        return True

    def _freeze(self, name: str, shortest: float, longest: float) -> bool:
        if (node := self._pick(leave=1)) is None:
            return False
        node.freeze(whole=self._dice.random() < 0.6)
        self.figures[name] += 1
        # Now and then it is killed while it is stopped.
        dies = self._dice.random() < 0.15
        end = (lambda: self._kill_stopped(node)) if dies else node.thaw
        self._after(self._dice.uniform(shortest, longest), end)
        return True

    def _kill_stopped(self, node: Node) -> None:
        node.kill(whole=True)
        self.figures["SIGKILL while stopped"] += 1
        node.start()

    def _disconnect(self, name: str, shortest: float, longest: float) -> bool:
        if (node := self._pick(leave=1)) is None:
            return False
        node.cut(noticed=self._dice.random() < 0.5)
        self.figures[name] += 1
        self._after(self._dice.uniform(shortest, longest), node.reconnect)
        return True

    def _retire(self) -> bool:
        """Ask a worker to stop, as a rolling restart does; the supervisor starts it again."""
        if (node := self._pick(leave=1)) is None:
            return False
        node.terminate()
        self.figures["SIGTERM"] += 1
        return True

    def _restart_database(self) -> bool:
        if self._is_away or time.monotonic() - self._back < _STEADY_S:
            return False
        how = self._dice.choice([signal.SIGQUIT, signal.SIGQUIT, signal.SIGINT])
        self._database.stop(how)
        self._is_away = True
        self.figures["Postgres stops, " + ("immediate" if how is signal.SIGQUIT else "in order")] += 1
        self._after(self._dice.choice([0, 0.5, 4]), self._bring_back)
        return True

    def _bring_back(self) -> None:
        self._database.start()
        self._is_away = False
        self._back = time.monotonic()

    def _spoil(self) -> bool:
        """Let a node fall sick: it leaves the sites to others, at no attempt, and comes back."""
        if (node := self._pick(leave=1)) is None:
            return False
        node.spoil_disk()
        self.figures["disks spoilt"] += 1
        self._after(self._dice.uniform(2, 8), node.mend_disk)
        return True

    def _lose(self) -> bool:
        self._dice.choice(self._nodes).lose_clones(self._dice)
        self.figures["clones deleted"] += 1
        return True
