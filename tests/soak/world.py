"""One site with everybody around it, and a worker that is killed again and again; then peace and audit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import psutil
from sites import Site, events_in, eventually

from soak import ledger
from soak.cms import CONTESTED, Cms, Gate
from soak.ledger import Found, Ledger
from soak.persons import Colleague, Person
from soak.weather import Weather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_FAST = {"BRITER_WORKER_BACKOFF_MS": "50", "BRITER_WORKER_POLL_INTERVAL_MS": "100"}
_RUNS = 8
_MOMENT = 2.0
"""So many runs of a worker that nobody disturbs have to empty the queue."""
_LIVE, _DRY = {"BRITER_WORKER_DRY_RUN": "false"}, {"BRITER_WORKER_DRY_RUN": "true"}


class Actor(Protocol):
    """Somebody around the worker."""

    def act(self) -> None:
        """One small thing."""
        ...


class World:
    """`kills` lists, for each worker in turn, whether its whole process group goes with it."""

    def __init__(self, root: Path, seed: int, kills: list[bool]) -> None:
        self._dice = random.Random(seed)
        self._kills = kills
        self._ledger = Ledger(contested={CONTESTED})
        self._gate = Gate()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._log = root / "worker.log"
        self.found = Found()
        self._site = site = Site.make(root)
        notes = {f"notes/{name}.txt": f"{name}\n" for name in ("a", "b", "c", "unstaged")}
        for path, text in notes.items():
            site.write_post(path, text)
        site.git("add", "notes")
        site.git("commit", "--quiet", "--message=Start the notes")
        site.git("push", "--quiet", "origin", "main")
        self._ledger.persons["Start the notes"] = frozenset(notes)
        self._cms = Cms(site, self._ledger, self._new_dice(), self._gate)
        self._person = Person(site, self._ledger, self._new_dice(), self._gate)
        # Some sites begin with dry runs, and go live in the middle of it all.
        self._dry_until = len(kills) // 2 if self._dice.random() < 0.4 else 0

    def live(self) -> Found:
        """All of it; what was broken."""
        colleague = Colleague(self._site, self._ledger, self._new_dice())
        weather = Weather(self._site, self._new_dice())
        with self._acting(self._cms, self._person, colleague, weather):
            for number, whole_group in enumerate(self._kills):
                self._kill_one(_DRY if number < self._dry_until else _LIVE, whole_group=whole_group)
                if self._errors:
                    break
        if self._errors:
            raise self._errors[0]
        self._come_to_rest()
        self._audit()
        return self.found

    def _new_dice(self) -> random.Random:
        return random.Random(self._dice.random())

    @contextmanager
    def _acting(self, *actors: Actor) -> Iterator[None]:
        threads = [threading.Thread(target=self._go_on, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(_MOMENT)
                while thread.is_alive():
                    # Somebody may wait for the killed worker's lock of the index: the next one lets go of it.
                    with self._gate.worker:
                        self._site.run_once(**_FAST)
                    thread.join(_MOMENT)

    def _go_on(self, actor: Actor) -> None:
        try:
            while not self._over.is_set():
                actor.act()
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits for it
            self._errors.append(error)

    # Kills

    def _kill_one(self, mode: dict[str, str], *, whole_group: bool) -> None:
        """Start workers until one of them is killed as it was meant to be."""
        while not self._errors:
            while self._gate.wanted.is_set():
                time.sleep(0.01)
            with self._gate.worker, self._log.open("ab") as log, self._worker(log, mode) as worker:
                if self._approach(worker) and self._stall(worker, log, mode):
                    self.found.figures["kills while work was in flight"] += self._in_flight()
                    self.found.figures["kills while a push was planned"] += self._planned()
                    if whole_group:
                        _send(_everything_of(worker), signal.SIGKILL)
                    else:
                        worker.kill()
                    worker.wait()
                    self.found.figures["group kills" if whole_group else "worker kills"] += 1
                    return
                self.found.figures["kept out by an orphan"] += 1

    @contextmanager
    def _worker(self, log: Any, mode: dict[str, str], *args: str) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401
        with subprocess.Popen(
            [sys.executable, "-m", "briter_worker", "run", *args],
            cwd=self._site.root,
            env=self._site.environment(**_FAST, **mode),
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as worker:
            try:
                yield worker
            finally:
                if worker.poll() is None:
                    worker.kill()

    def _approach(self, worker: subprocess.Popen[bytes]) -> bool:
        """Let it come to a random moment; whether it still runs then."""
        # By the clock alone, most kills would hit the start, which takes longer than the rest.
        moment, spread = self._dice.choice(
            [(None, 0.6), (self._in_flight, 0.5), (self._planned, 0.03), (self._planned, 0.3)]
        )
        deadline = time.monotonic() + 2
        while moment and worker.poll() is None and time.monotonic() < deadline and not moment():
            time.sleep(0.002)
        return self._lasts(worker, self._dice.uniform(0, spread))

    def _lasts(self, worker: subprocess.Popen[bytes], seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(seconds)
        return worker.poll() is None

    def _stall(self, worker: subprocess.Popen[bytes], log: Any, mode: dict[str, str]) -> bool:  # noqa: ANN401
        """Now and then it is stopped for a while, and perhaps another one started meanwhile."""
        if self._dice.random() < 0.15:
            stopped = _everything_of(worker) if self._dice.random() < 0.5 else [psutil.Process(worker.pid)]
            _send(stopped, signal.SIGSTOP)
            if self._dice.random() < 0.3:
                with self._worker(log, mode, "--once") as second:
                    # It is told that another one is active; or it is quicker, and killed at its work.
                    self._lasts(second, 1.5)
            else:
                time.sleep(self._dice.uniform(0, 0.3))
            self.found.figures["stopped for a while"] += 1
            going_on = self._dice.random() < 0.5
            _send(stopped if going_on else stopped[1:], signal.SIGCONT)
            if going_on:
                return self._lasts(worker, self._dice.uniform(0, 0.2))
        return True

    def _in_flight(self) -> bool:
        return any(name.startswith(".journal-") for name in _names(self._site.queue / ".claimed"))

    def _planned(self) -> bool:
        for name in _names(self._site.queue / ".claimed"):
            with suppress(FileNotFoundError):
                if (
                    name.startswith(".journal-")
                    and b'"plan"' in (self._site.queue / ".claimed" / name).read_bytes()
                ):
                    return True
        return False

    # Peace

    def _come_to_rest(self) -> None:
        site = self._site
        # What was killed leaves its git for a moment; and its locks, until there is something to do.
        self._cms.save("new")
        time.sleep(max(0.0, self._ledger.saves[-1].held_until - time.time()))
        eventually(lambda: site.run_once(**_FAST).names() != ["worker-skipped"], within=30)
        self._person.finish()
        time.sleep(max(0.0, *(save.held_until - time.time() for save in self._ledger.saves[-50:])))
        self._drain()
        if any(job.get("status") == "failed" for job in site.jobs()):
            site.command("retry", "--all")
            self._drain()
        self._person.finish()
        self._person.push()
        # A last post brings the site up to the remote, as any post does; and what is removed by its age
        # only, is old by then.
        for path in self._debris():
            os.utime(path, (0, 0))
        self._cms.save("new")
        time.sleep(max(0.0, self._ledger.saves[-1].held_until - time.time()))
        self._drain()

    def _drain(self) -> None:
        for _ in range(_RUNS):
            last = self._site.run_once(**_FAST)
            with self._log.open("a") as log:
                log.write(last.stdout + last.stderr)
            if not self._waiting():
                return
            time.sleep(0.06)  # longer than the backoff
        self.found.wedged.append(f"after {_RUNS} runs there wait {self._waiting()}: {last.stdout[-1500:]}")

    def _waiting(self) -> list[str]:
        claimed = [name for name in _names(self._site.queue / ".claimed") if not name.startswith(".lock")]
        return claimed + [job["slug"] for job in self._site.jobs() if job.get("status") != "failed"]

    # The audit

    def _audit(self) -> None:
        site, found = self._site, self.found
        dead = [job for job in site.jobs() if job.get("status") == "failed"]
        # For whoever has to find out what happened, should a promise be broken.
        notes = [*map(str, self._ledger.saves), str(self._ledger.titles), str(dead)]
        (site.root / "ledger.txt").write_text("\n".join(notes))
        commits = ledger.history(site.remote)
        found.add(ledger.judge(self._ledger, commits, ledger.contents(site.remote), dead))
        found.extra += self._person.disturbed()
        if site.git("rev-parse", "main") != site.git("rev-parse", "main", cwd=site.remote):
            found.wedged.append("the site is not where the remote is")
        for repository in (site.worktree, site.remote):
            done = subprocess.run(
                ["git", "fsck", "--strict"], cwd=repository, capture_output=True, text=True, check=False
            )
            if done.returncode:
                found.unsound.append(f"fsck of {repository.name}: {done.stdout} {done.stderr}")
        found.unsound += self._left_over()
        figures = found.figures
        figures["sites"] += 1
        figures["saves"] += len(self._ledger.saves)
        messages = {save.message for save in self._ledger.saves}
        figures["commits of the worker's"] += sum(commit.message in messages for commit in commits)
        figures["commits of people's"] += sum(commit.message not in messages for commit in commits)
        figures["dead letters of true conflicts"] += len(dead)
        told = events_in(self._log.read_text(errors="replace"))
        for event in ("published", "failed", "dead-lettered", "revived"):
            figures[f"times {event}"] += sum(entry.get("event") == event for entry in told)

    def _debris(self) -> list[Path]:
        git = self._site.worktree / ".git"
        return [*git.glob("fast_import_crash_*"), *git.glob("briter*"), *git.glob("objects/pack/tmp_*")]

    def _left_over(self) -> Iterator[str]:
        site = self._site
        left = [*self._debris(), *(site.worktree / ".git").rglob("*.lock")]
        left += [*(site.remote / "refs").rglob("*.lock"), *site.storage.rglob("*.tmp")]
        left += [site.queue / ".claimed" / name for name in self._waiting() if name.startswith(".")]
        for each in left:
            yield f"{each.relative_to(site.root)} is left over"
        mine = ("notes/", "drafts/", "side/")
        dead = {path for job in site.jobs() for path in job["paths"]}
        # Where both sides changed the same line, the person has kept the author's in the work tree.
        dead |= self._person.decided(self._ledger.contested)
        for line in site.git("status", "--porcelain", "--untracked-files=all").splitlines():
            path = line.split(maxsplit=1)[1]
            if not path.startswith(mine) and path not in dead:
                yield f"git status tells {line!r}"


def _everything_of(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The worker, stopped meanwhile, then what it has started: all of it dies with a container.

    What serves the remote is another machine's, though here it is git's child.
    """
    found = [psutil.Process(worker.pid)]
    _send(found, signal.SIGSTOP)
    for process in found:  # it grows
        with suppress(psutil.NoSuchProcess):
            if not _serves_remote(process):
                found += process.children()
    return [each for each in found if not _serves_remote(each)]


def _serves_remote(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any("receive-pack" in word for word in process.cmdline()[:3])
    return False


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, and often
    except FileNotFoundError:
        return []
