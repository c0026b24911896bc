"""The hosts of a cluster as processes, and what befalls them: kills, long sleeps, cuts, a lost database."""

from __future__ import annotations

import heapq
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from postgres import Server

    from soak.networks import Way

SILENCE = (12.0, 16.0)
"""Longer than a host may be silent before it is taken for dead, in seconds."""


_START = 30.0
"""A worker that cannot reach its database at the start may give up within so many seconds."""
_STEADY = 25.0
"""A Postgres that went again and again before that would let nobody find out who is dead."""


class Host:
    """One machine: its network, its disk, and the worker that its supervisor starts again and again."""

    def __init__(self, folder: Path, way: Way, environment: Mapping[str, str], slots: int) -> None:
        self.folder = folder
        self.way = way
        self.cache = folder / "cache"
        self.sleeps = False
        self.is_cut = False
        self._slots = slots
        self._environment = {**environment, "BRITER_STORAGE_ROOT": str(folder)}
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen: list[psutil.Process] = []
        self._starts = 0
        self._born = 0.0
        folder.mkdir()

    @property
    def runs(self) -> bool:
        """Whether there is a worker."""
        return self._process is not None

    @property
    def lived(self) -> float:
        """For how long the last of them has been there."""
        return time.monotonic() - self._born

    @property
    def logs(self) -> list[Path]:
        """What its workers have written, one file for each."""
        return sorted(self.folder.glob("worker-*.log"))

    def start(self) -> None:
        """A worker, as a supervisor starts it."""
        self._starts += 1
        self._born = time.monotonic()
        with (self.folder / f"worker-{self._starts:04}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(*self.way.within, sys.executable, "-m", "briter_worker"),
                    *("run", "--workers", str(self._slots)),
                ],
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> int | None:
        """The status of a worker that has ended by itself, which is then gone."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            self._process = None
        return status

    def kill(self, *, whole: bool) -> None:
        """SIGKILL: the worker, or with all that it has started, as the machine's end would."""
        process, self._process = self._process, None
        if process is None:
            return
        self.sleeps = False
        if whole:
            _send(_tree(process.pid), signal.SIGKILL)
        process.kill()
        process.wait()
        if not whole:
            _send(self._frozen, signal.SIGCONT)
        self._frozen = []

    def freeze(self, *, whole: bool) -> None:
        """SIGSTOP."""
        if self._process is not None:
            self.sleeps = True
            self._frozen = _tree(self._process.pid) if whole else [psutil.Process(self._process.pid)]
            _send(self._frozen, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.sleeps = False
        _send(self._frozen, signal.SIGCONT)
        self._frozen = []

    def cut(self, *, noticed: bool) -> None:
        """Its network is gone."""
        self.is_cut = True
        self.way.cut(noticed=noticed)

    def mend(self) -> None:
        """And there again."""
        self.is_cut = False
        self.way.mend()

    def lose_caches(self, dice: random.Random) -> None:
        """Some of its disk is gone, while it is in use: a site's, a part of a site's, or all of it."""
        sites = sorted(self.cache.glob("*"))
        if not sites:
            return
        site = dice.choice(sites)
        parts = [site, self.cache, site / "0" / ".git", site / "0" / ".git" / "objects"]
        shutil.rmtree(dice.choice(parts), ignore_errors=True)

    def terminate(self) -> None:
        """Tell it to stop, in order."""
        if self._process is not None:
            self._process.terminate()

    def is_at_work(self) -> bool:
        """Whether the worker is between its first word and its last: only there a signal is heard."""
        said = self.logs[-1].read_text()
        return said.count('"worker-started"') > said.count('"worker-stopped"')

    def end(self, patience: float) -> int | None:
        """The status of a worker that was told to stop; None when it did not."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill(whole=True)

    def left_over(self) -> list[str]:
        """What still runs in this host's folder."""
        found: list[str] = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd().startswith(f"{self.folder}/"):
                    found.append(" ".join(process.cmdline()))
        return found


class Fate:
    """Lets things happen to the hosts, one after the other, each followed by its end. In the main thread."""

    def __init__(self, hosts: Sequence[Host], database: Server, dice: random.Random, pause: float) -> None:
        self.figures: Counter[str] = Counter()
        self.surprises: list[str] = []
        self._hosts = hosts
        self._database = database
        self._dice = dice
        self._pause = pause
        self._is_away = self._is_last = False
        self._back = -_STEADY
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._next = time.monotonic() + pause
        deeds = [self._kill, self._sleep, self._cut, self._restart, self._lose]
        self._deck = dice.sample(deeds, len(deeds))
        self._deeds = [*deeds, self._kill, self._doze, self._flicker, self._retire, self._die]

    @property
    def is_done(self) -> bool:
        """Whether each of the great things has happened, and has ended."""
        return not self._deck and not self._ends

    def step(self) -> None:
        """What is to happen by now."""
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()
        self._supervise()
        if now >= self._next:
            self._next = now + self._dice.expovariate(1 / self._pause)
            if self._deck:
                # The first of the great ones that finds a host with nothing else to bear.
                done = next((deed for deed in self._deck if deed()), None)
                self._deck = [deed for deed in self._deck if deed is not done]
            elif not self._is_last:
                self._dice.choice(self._deeds)()

    def last(self) -> None:
        """Nothing new happens, once each of the great things has happened."""
        self._is_last = True

    def calm(self) -> None:
        """All that was begun ends."""
        while self._ends:
            heapq.heappop(self._ends)[2]()
        self._supervise()

    def watch(self) -> None:
        """Only see to it that a worker that ended is started again."""
        self._supervise()

    def _supervise(self) -> None:
        for host in self._hosts:
            status = host.ended()
            if status is None:
                continue
            started = "worker-started" in host.logs[-1].read_text()
            if status and started and host.lived > _START:
                tail = host.logs[-1].read_text()[-1500:]
                self.surprises.append(f"{host.logs[-1]} ended by itself with status {status}: {tail}")
            self.figures["starts without a database"] += status != 0
            self._after(self._dice.uniform(0.3, 1.0), host.start)

    def _after(self, seconds: float, end: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._ends, (time.monotonic() + seconds, self._number, end))

    def _one(self, *, but: int = 0) -> Host | None:
        """A host that nothing has befallen, if there are more than so many of them."""
        well = [host for host in self._hosts if host.runs and not host.sleeps and not host.is_cut]
        return self._dice.choice(well) if len(well) > but else None

    def _kill(self) -> bool:
        if (host := self._one()) is None:
            return False
        whole = self._dice.random() < 0.5
        host.kill(whole=whole)
        self.figures["SIGKILL of a host's processes" if whole else "SIGKILL of a worker"] += 1
        self._after(self._dice.uniform(0.2, 4), host.start)
        return True

    def _die(self) -> bool:
        """As a machine does that loses its power: nobody is told that its connections end."""
        if (host := self._one(but=1)) is None:
            return False
        host.cut(noticed=False)
        host.kill(whole=True)
        self.figures["power cuts"] += 1
        later = self._dice.uniform(1, 16)
        self._after(later, host.mend)
        self._after(later + 0.1, host.start)
        return True

    def _sleep(self) -> bool:
        return self._freeze("SIGSTOP, longer than the silence", *SILENCE)

    def _doze(self) -> bool:
        return self._freeze("SIGSTOP, for a moment", 0.1, 3)

    def _freeze(self, name: str, shortest: float, longest: float) -> bool:
        if (host := self._one(but=1)) is None:
            return False
        host.freeze(whole=self._dice.random() < 0.6)
        self.figures[name] += 1
        # Now and then it is killed in its sleep.
        dies = self._dice.random() < 0.15
        end = (lambda: self._kill_asleep(host)) if dies else host.thaw
        self._after(self._dice.uniform(shortest, longest), end)
        return True

    def _kill_asleep(self, host: Host) -> None:
        host.kill(whole=True)
        self.figures["SIGKILL in sleep"] += 1
        host.start()

    def _cut(self) -> bool:
        return self._disconnect("networks cut, longer than the silence", *SILENCE)

    def _flicker(self) -> bool:
        return self._disconnect("networks cut, for a moment", 0.1, 5)

    def _disconnect(self, name: str, shortest: float, longest: float) -> bool:
        if (host := self._one(but=1)) is None:
            return False
        host.cut(noticed=self._dice.random() < 0.5)
        self.figures[name] += 1
        self._after(self._dice.uniform(shortest, longest), host.mend)
        return True

    def _retire(self) -> bool:
        """A rolling restart: told to stop, started again by the supervisor when it has."""
        if (host := self._one(but=1)) is None:
            return False
        host.terminate()
        self.figures["SIGTERM"] += 1
        return True

    def _restart(self) -> bool:
        if self._is_away or time.monotonic() - self._back < _STEADY:
            return False
        how = self._dice.choice([signal.SIGQUIT, signal.SIGQUIT, signal.SIGINT])
        self._database.stop(how)
        self._is_away = True
        self.figures["Postgres, immediate" if how is signal.SIGQUIT else "Postgres, in order"] += 1
        self._after(self._dice.choice([0, 0.5, 4]), self._bring_back)
        return True

    def _bring_back(self) -> None:
        self._database.start()
        self._is_away = False
        self._back = time.monotonic()

    def _lose(self) -> bool:
        self._dice.choice(self._hosts).lose_caches(self._dice)
        self.figures["caches deleted"] += 1
        return True


def _tree(pid: int) -> list[psutil.Process]:
    """A process, stopped, and all that it has started."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = [psutil.Process(pid)]
        _send(found, signal.SIGSTOP)
        found += found[0].children(recursive=True)
    return found


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
