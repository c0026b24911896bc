"""Kill the worker at random moments while everything around it moves."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil
from remotes import sshd
from sites import Site, events_in, eventually

from soak.ledger import PROMISES, Found, Ledger, judge
from soak.processes import send, tree_of
from soak.report import IN_MEMORY, Report
from soak.repository import fsck, read_files, read_history
from soak.users import CONTESTED, NOTES, TITLED, Cms, Colleague, Operator, RemoteFaults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from soak.report import Options

_PER_SITE = 30
"""A site's history stays small enough to be read when something is wrong."""
_FAST = {"BRITER_WORKER_BACKOFF_MS": "50", "BRITER_WORKER_POLL_INTERVAL_MS": "100"}
_SOMETIMES = {
    "quiet time": {"BRITER_WORKER_QUIET_MS": "300", "BRITER_WORKER_QUIET_MAX_MS": "1000"},
    "pulls": {"BRITER_GIT_PULL_INTERVAL_MS": "300"},
}
"""Settings that some of the sites have, while workers are killed."""
_BY_SSH = 0.3
"""This share of the sites has a remote by ssh, and workers that keep connections to it."""
_RECORDS = {"conflicts.json", "first-saves", "format.json", "scheduled", "lock", "undo.lock", "watch.lock"}
_LASTING = _RECORDS | {f"watch.db{suffix}" for suffix in ("", "-wal", "-shm")}
"""Files of the worker that stay."""
_RUNS = 8
"""This many undisturbed runs must empty the queue."""
_MOMENT_S = 2.0
_PATIENCE_S = 30.0


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Kill workers, two thirds of them alone, the others with their process group."""
    sites = list(_plan(options))
    total = Found()

    def one(number: int, seed: int, kills: list[bool]) -> Found:
        root = Path(tempfile.mkdtemp(prefix="briter-soak-", dir=IN_MEMORY))
        try:
            found = World(root, seed, kills).live()
        except BaseException:
            tell(f"site {number} of seed {seed} broke the soak itself; it is kept in {root}")
            raise
        broken = found.lines()
        for line in broken:
            tell(f"site {number} of seed {seed}: {line}")
        if broken:
            tell(f"it is kept in {root}")
        else:
            shutil.rmtree(root)
        return found

    with ThreadPoolExecutor(options.processes) as pool:
        for done, found in enumerate(pool.map(lambda each: one(*each), sites), 1):
            total.add(found)
            counts = ", ".join(f"{len(getattr(total, name))} {name}" for name in PROMISES)
            tell(f"{done} of {len(sites)} sites: {counts}")
    return Report("kills", total.counts(), total.lines())


def _plan(options: Options) -> list[tuple[int, int, list[bool]]]:
    workers, groups = options.of(1_000, 10), options.of(500, 6)
    dice = random.Random(options.seed)
    kills = [False] * workers + [True] * groups
    dice.shuffle(kills)
    # In a quick run, too, no core waits for the last site.
    count = max(options.processes, len(kills) // _PER_SITE)
    return [(number, dice.randrange(2**32), kills[number::count]) for number in range(count)]


class World:
    """One site with everybody around it. `kills`: for each worker, whether its process group dies too."""

    def __init__(self, root: Path, seed: int, kills: list[bool]) -> None:
        self._dice = random.Random(seed)
        self._kills = kills
        self._ledger = Ledger(contested={CONTESTED, f"posts/{CONTESTED}"})
        self._no_worker = threading.Lock()
        """Held by the worker's supervisor while a worker runs, and by whoever needs none to run."""
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self._log = root / "worker.log"
        self.found = Found()
        self._site = site = Site.make(root)
        for path, text in NOTES.items():
            site.write_post(path, text)
        site.git("add", "notes")
        site.git("commit", "--quiet", "--message=Start the notes")
        site.git("push", "--quiet", "origin", "main")
        self._ledger.persons["Start the notes"] = frozenset(NOTES)
        self._is_watched = self._dice.random() < 0.5
        self._cms = Cms(site, self._ledger, self._new_dice(), is_watched=self._is_watched)
        self._operator = Operator(site, self._ledger, self._new_dice())
        self._env = dict(_FAST)
        for name, values in _SOMETIMES.items():
            if self._dice.random() < 0.3:
                self._env |= values
                self.found.figures[f"sites with {name}"] += 1
        self.found.figures["sites with watch"] += self._is_watched
        self._is_by_ssh = self._dice.random() < _BY_SSH
        self.found.figures["sites by ssh"] += self._is_by_ssh
        # Some sites begin with dry runs, and go live in the middle of it all.
        self._dry_until = len(kills) // 2 if self._dice.random() < 0.4 else 0

    def live(self) -> Found:
        """Kill every worker, come to rest, and return which promises were broken."""
        with self._reached_by_ssh() if self._is_by_ssh else nullcontext():
            self._live()
        return self.found

    @contextmanager
    def _reached_by_ssh(self) -> Iterator[None]:
        """Have the site's remote behind sshd, and the workers keep connections to it."""
        sockets = Path(tempfile.mkdtemp(prefix="b", dir="/tmp"))  # a socket's path is short
        self._site = replace(self._site, env={**self._site.env, "TMPDIR": str(sockets)})
        with sshd(self._site.root / "sshd") as host:
            self._site.git("config", "core.sshCommand", host.command)
            self._site.git("remote", "set-url", "origin", host.url(self._site.remote))
            yield
        left = [*sockets.rglob("*")]
        self.found.unsound += [f"{path} is left of an ssh connection" for path in left if path.is_socket()]
        shutil.rmtree(sockets)

    def _live(self) -> None:
        site = self._site
        self._colleague = Colleague(site.remote, self._ledger, self._new_dice(), TITLED, CONTESTED)
        self._faults = RemoteFaults(site)
        with self._acting(self._cms.act, self._operate, self._collaborate, self._fail_remote):
            for number, whole_group in enumerate(self._kills):
                mode = {"BRITER_WORKER_DRY_RUN": "true" if number < self._dry_until else "false"}
                self._kill_one(mode, whole_group=whole_group)
                if self._errors:
                    break
        if self._errors:
            raise self._errors[0]
        self._come_to_rest()
        self._audit()

    def _new_dice(self) -> random.Random:
        return random.Random(self._dice.random())

    # What happens around the worker

    @contextmanager
    def _acting(self, *acts: Callable[[random.Random], None]) -> Iterator[None]:
        threads = [threading.Thread(target=self._repeat, args=(act, self._new_dice())) for act in acts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(_MOMENT_S)
                while thread.is_alive():
                    # It may wait for a killed worker's stale index lock, which the next worker removes.
                    with self._no_worker:
                        self._site.run_once(**_FAST)
                    thread.join(_MOMENT_S)

    def _repeat(self, act: Callable[[random.Random], None], dice: random.Random) -> None:
        try:
            while not self._over.is_set():
                act(dice)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for this one
            self._errors.append(error)

    def _collaborate(self, dice: random.Random) -> None:
        self._colleague.push()
        time.sleep(dice.uniform(0.05, 1.0))

    def _fail_remote(self, dice: random.Random) -> None:
        """Cause one kind of trouble, then none."""
        faults = self._faults
        slow = "cat >/dev/null; sleep 0.3"
        trouble: list[Callable[[], None]] = [
            faults.vanish,
            faults.lock,
            lambda: faults.refuse(".*"),
            lambda: faults.refuse("save titled[01]"),
            lambda: faults.hook("pre-receive", slow),
            lambda: faults.hook("post-receive", slow),
        ]
        dice.choice(trouble)()
        time.sleep(dice.uniform(0.2, 1.2))
        faults.recover()
        time.sleep(dice.uniform(0.2, 1.5))

    def _operate(self, dice: random.Random) -> None:
        """Commit, push, pull, switch or merge, or leave files edited and staged; then pause."""
        operator = self._operator
        often: list[Callable[[random.Random], object]] = [
            self._commit_and_push,
            lambda _: operator.stage(),
            lambda _: operator.edit(),
            lambda _: operator.commit(),
        ]
        dice.choice([*often, *often, self._merge, self._draft, self._pull])(dice)
        time.sleep(dice.uniform(0.05, 1.0))

    def _commit_and_push(self, _: random.Random) -> None:
        if self._operator.commit():
            self._operator.push()

    def _draft(self, dice: random.Random) -> None:
        """Be on another branch for a while, perhaps commit there, and come back."""
        if self._operator.leave():
            time.sleep(dice.uniform(0, 0.5))
            if dice.random() < 0.5:
                self._operator.commit_draft()
            self._insist(self._operator.come_back)

    def _merge(self, dice: random.Random) -> None:
        """Begin a merge, and end it some time later."""
        self._operator.begin_merge()
        time.sleep(dice.uniform(0, 0.6))
        keep = dice.random() < 0.5
        self._insist(lambda: self._operator.end_merge(keep=keep))

    def _pull(self, dice: random.Random) -> None:
        """Put local commits onto the remote's tip with the worker's command; now and then it is killed."""
        with self._no_worker:
            push = ["--push"] if dice.random() < 0.7 else []
            if dice.random() < 0.3:
                command = ["timeout", "--signal=KILL", f"{dice.uniform(0.2, 1.2)}"]
                command += [sys.executable, "-m", "briter_worker", "pull", "--rebase", *push]
                environment = self._site.environment()
                subprocess.run(command, env=environment, capture_output=True, check=False)
            else:
                self._site.command("pull", "--rebase", *push)

    def _insist(self, act: Callable[[], bool]) -> None:
        """Repeat the step: a killed worker's stale index lock goes when the next worker starts."""
        deadline = time.monotonic() + _PATIENCE_S
        while not act():
            if time.monotonic() > deadline:
                status = self._operator.git("status", "--short", "--branch")
                self._operator.surprises.append(f"{act} does not end: {status}")
                return
            time.sleep(0.05)

    # Kills

    def _kill_one(self, mode: dict[str, str], *, whole_group: bool) -> None:
        """Start workers until one of them is killed as planned."""
        while not self._errors:
            time.sleep(0.005)  # whoever waits for `no_worker` gets it now
            watch = ["--watch"] if self._is_watched else []
            with self._no_worker, self._log.open("ab") as log, self._worker(log, mode, *watch) as worker:
                if self._approach(worker) and self._stall(worker, log, mode):
                    self.found.figures["kills while work was in flight"] += self._is_in_flight()
                    self.found.figures["kills while a push was planned"] += self._is_planned()
                    if whole_group:
                        send(_all_of(worker), signal.SIGKILL)
                    else:
                        worker.kill()
                    worker.wait()
                    self.found.figures["group kills" if whole_group else "worker kills"] += 1
                    return
                self.found.figures["kept out by an orphan"] += 1

    @contextmanager
    def _worker(self, log: IO[bytes], mode: dict[str, str], *args: str) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(
            [sys.executable, "-m", "briter_worker", "run", *args],
            cwd=self._site.root,
            env=self._site.environment(**self._env, **mode),
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
        """Wait for a random moment. Return True if the worker still runs then."""
        # By the clock alone, most kills would hit the start, which takes longer than the rest.
        moment, spread = self._dice.choice(
            [(None, 0.6), (self._is_in_flight, 0.5), (self._is_planned, 0.03), (self._is_planned, 0.3)]
        )
        deadline = time.monotonic() + 2
        while moment and worker.poll() is None and time.monotonic() < deadline and not moment():
            time.sleep(0.002)
        return self._lasts(worker, self._dice.uniform(0, spread))

    def _lasts(self, worker: subprocess.Popen[bytes], seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(seconds)
        return worker.poll() is None

    def _stall(self, worker: subprocess.Popen[bytes], log: IO[bytes], mode: dict[str, str]) -> bool:
        """Now and then stop the worker for a while, and start a second one. Return True if it still runs."""
        if self._dice.random() < 0.15:
            stopped = _all_of(worker) if self._dice.random() < 0.5 else [psutil.Process(worker.pid)]
            send(stopped, signal.SIGSTOP)
            if self._dice.random() < 0.3:
                with self._worker(log, mode, "--once") as second:
                    # The lock keeps it out; or it was quicker than the first, and is killed at work.
                    self._lasts(second, 1.5)
            else:
                time.sleep(self._dice.uniform(0, 0.3))
            self.found.figures["stopped for a while"] += 1
            goes_on = self._dice.random() < 0.5
            send(stopped if goes_on else stopped[1:], signal.SIGCONT)
            if goes_on:
                return self._lasts(worker, self._dice.uniform(0, 0.2))
        return True

    def _is_in_flight(self) -> bool:
        return any(not name.startswith(".") for name in _names(self._site.queue / ".claimed"))

    def _is_planned(self) -> bool:
        return any((self._site.worktree / ".git" / "briter").glob("*/plans/*.json"))

    # Rest

    def _come_to_rest(self) -> None:
        site = self._site
        # A killed worker leaves its git for a moment, and its locks until there is something to do.
        self._save_one()
        eventually(lambda: site.run_once(**_FAST).names() != ["worker-skipped"], within=30)
        time.sleep(max(0.0, *(save.held_until - time.time() for save in self._ledger.saves[-50:])))
        self._drain()
        if any(job.get("status") == "failed" for job in site.jobs()):
            site.command("retry", "--all")
            self._drain()
        self._insist(self._operator.end_merge)
        self._insist(self._operator.come_back)
        done = site.command("pull", "--rebase", "--push")
        if done.returncode:
            self.found.wedged.append(f"pull --rebase --push exits with {done.returncode}: {done.stderr}")
        # A last post brings the site up to the remote. What is removed by its age only, is old by then.
        for path in self._debris():
            os.utime(path, (0, 0))
        self._save_one()
        self._drain()

    def _save_one(self) -> None:
        self._cms.save("new")
        save = self._ledger.saves[-1]
        if self._is_watched:
            # The worker compares all files when it starts: once this one is on the remote, all that are there
            # have jobs. A file that is gone has one a second later.
            with self._log.open("ab") as log, self._worker(log, {}, "--watch") as worker:
                eventually(lambda: self._site.remote_file(save.paths[0]) is not None, within=60)
                eventually(lambda: not self._undeleted(), within=60)
                worker.terminate()
                worker.wait()
        time.sleep(max(0.0, save.held_until - time.time()))

    def _undeleted(self) -> list[str]:
        """Return the posts that the remote still has although the CMS has deleted them."""
        posts = {path for save in self._ledger.saves for path in save.paths}
        gone = [path for path in posts if not (self._site.worktree / path).exists()]
        return [path for path in gone if self._site.remote_file(path) is not None]

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
        claimed = [name for name in _names(self._site.queue / ".claimed") if name != ".lock"]
        return claimed + [job["slug"] for job in self._site.jobs() if job.get("status") != "failed"]

    # The audit

    def _audit(self) -> None:
        site, found = self._site, self.found
        dead = [job for job in site.jobs() if job.get("status") == "failed"]
        # For whoever has to find out what happened, should a promise be broken.
        notes = [*map(str, self._ledger.saves), str(self._ledger.titles), str(dead)]
        (site.root / "ledger.txt").write_text("\n".join(notes))
        commits = list(read_history(site.remote, "main"))
        found.add(judge(self._ledger, commits, read_files(site.remote), dead))
        found.extra += self._operator.disturbed()
        if site.git("rev-parse", "main") != site.git("rev-parse", "main", cwd=site.remote):
            found.wedged.append("the site is not where the remote is")
        found.unsound += fsck(site.worktree) + fsck(site.remote)
        found.unsound += self._left_over()
        figures = found.figures
        figures["sites"] += 1
        figures["saves"] += len(self._ledger.saves)
        figures["dead letters of true conflicts"] += len(dead)
        events = events_in(self._log.read_text(errors="replace"))
        for event in ("published", "failed", "dead-lettered", "revived"):
            figures[f"times {event}"] += sum(entry.get("event") == event for entry in events)

    def _debris(self) -> list[Path]:
        git = self._site.worktree / ".git"
        state = [path for path in (git / "briter").rglob("*") if not path.is_dir()]
        return [*git.glob("fast_import_crash_*"), *git.glob("objects/pack/tmp_*"), *state]

    def _left_over(self) -> Iterator[str]:
        site = self._site
        if halves := list(site.queue.glob(".*.tmp")):  # of a `watch` that was killed: removed after an hour
            for half in halves:
                os.utime(half, (0, 0))
            site.run_once()
        left = [*self._debris(), *(site.worktree / ".git").rglob("*.lock")]
        left = [path for path in left if path.name not in _LASTING]
        left += (site.worktree / ".git").glob("worktrees/*")
        left += [*(site.remote / "refs").rglob("*.lock"), *site.storage.rglob("*.tmp")]
        for each in left:
            yield f"{each.relative_to(site.root)} is left over"
        mine = ("notes/", "drafts/", "side/")
        dead = {path for job in site.jobs() for path in job["paths"]}
        for line in site.git("status", "--porcelain", "--untracked-files=all").splitlines():
            path = line.split(maxsplit=1)[1]
            is_backup = path.endswith(("~", ".swp"))  # of an editor, which nobody publishes
            if not path.startswith(mine) and path not in dead and not is_backup:
                yield f"git status reports {line!r}"
        private = site.git("for-each-ref", "--format=%(refname)", "refs/briter").splitlines()
        yield from (f"{ref} is left over" for ref in private if "/batch/" in ref)


def _all_of(worker: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Stop the worker, and return it with all it has started, as a container has them.

    The processes that serve the remote are another machine's, though here git started them.
    """
    return tree_of(worker.pid, without="receive-pack")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names alone, and often
    except FileNotFoundError:
        return []
