"""A kill and each error of a disk, at every system call of a publication that changes a file.

One publication (a post added, one changed, one deleted, a folder) is traced first, the worker and every
process of git's that it starts; in full, also one that finds the remote ahead. Then each call that changes a
file or makes a change durable is met in a fresh copy of the site by each fault: its process is killed before
the call (KILL), the whole session is killed after it (KILL-ALL), or it fails with ENOSPC, EIO, EROFS. The
worker then runs at most twice, undisturbed, and everything must be as if nothing had happened: each post on
the remote exactly once with its own content and nothing else, and what a person was doing untouched.

How a call is reached among several processes is told in `strace`. A case counts only if the log says that
the fault came over that very call; otherwise it is repeated, and at last reported as not reached. How many
folders git makes for its objects depends on their names, which the time changes: calls that are not in each
of three traces are left out. The history, a sink that writes in a thread of its own, is not swept.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from remotes import git_daemon
from sites import eventually

from soak.processes import end_session, send, session_of, tree_of
from soak.report import IN_MEMORY, Options, Report
from soak.strace import ERRORS, FAULTS, KILL_ALL, Tracer
from soak.sweep_site import copy_of, is_settled, leftovers, make_template, problems, tidy_later

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sites import Site

    from soak.strace import Call, Fault

_TRIES = 30
_HISTORY = "storage/history"
_RUNS = 2
DELICATE = {
    "the claim": ("worker", "renameat storage/queue/"),
    "the commits": ("fast-import", "link site/.git/objects/pack/"),
    "the plan": ("worker", "write site/.git/briter/"),
    "the plan's name": ("worker", "rename site/.git/briter/"),
    "the branch": ("update-ref", "rename site/.git/refs/heads/main.lock"),
    "the index": ("worker", "rename site/.git/briter/git-index"),
    "the completed job": ("worker", "unlinkat storage/queue/.claimed/"),
    "the completed plan": ("worker", "unlink site/.git/briter/0d6e4079e36703eb/plans/"),
}
"""The start of every sample: the process and the call."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one call, in one kind of publication."""

    call: Call
    fault: Fault
    moved: bool = False

    def __str__(self) -> str:
        return f"{self.fault.name} at {self.call} (number {self.call.number}){' behind' * self.moved}"


@dataclass(slots=True)
class Verdict:
    """The outcome of a case."""

    reached: bool = False
    problems: list[str] = field(default_factory=list)
    runs: int = 0
    seconds: float = 0.0
    """The seconds that the repairing runs took."""


class Lab:
    """Copies of the two sites, for one case after the other; several threads may use it.

    The remotes are served by processes of their own, as a host elsewhere would be: no fault reaches them.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._numbers = count(1)
        self.templates: dict[bool, Site] = {}

    def prepare(self, *, moved: bool) -> list[Call]:
        """Make the site and trace its publication: the calls that change a file, process by process."""
        self.templates[moved] = make_template(self._base / f"template-{moved}", moved=moved)
        traces = [self._trace(moved=moved) for _ in range(3)]
        everywhere = set.intersection(*({_identity(call) for call in trace} for trace in traces))
        return [call for call in traces[0] if _identity(call) in everywhere]

    def _trace(self, *, moved: bool) -> list[Call]:
        with self._copy(moved=moved) as (site, tracer, settle):
            process = tracer.start("run", "--once", env=site.environment())
            out, err = process.communicate(timeout=120)
            site.wait_for_lock()
            settle()
            wrong = [*problems(site, moved=moved), *leftovers(site)]
            assert process.returncode == 0 and not wrong, f"no fault, and yet: {wrong}\n{out}{err}"  # noqa: PT018
            return [call for call in tracer.calls() if call.changes and _HISTORY not in call.does]

    @contextmanager
    def _copy(self, *, moved: bool) -> Iterator[tuple[Site, Tracer, Callable[[], None]]]:
        """Yield a site, its tracer, and a wait until all connections to its remote have ended."""
        connections: list[subprocess.Popen[bytes]] = []

        def settle() -> None:
            for each in tuple(connections):
                each.wait(30)

        root = self._base / f"s{next(self._numbers)}"
        trace = root.with_name(f"{root.name}-trace")
        try:
            with git_daemon(self._base, "--enable=receive-pack", started=connections) as address:
                site = copy_of(self.templates[moved], root, address)
                yield site, Tracer(trace, site.root), settle
        finally:
            shutil.rmtree(root, ignore_errors=True)
            shutil.rmtree(trace, ignore_errors=True)

    def examine(self, case: Case) -> Verdict:
        """Have the fault happen, run the worker again, and look; again if the call was not reached."""
        verdict = Verdict()
        asked = case
        for _ in range(_TRIES):
            with self._copy(moved=case.moved) as (site, tracer, settle):
                try:
                    verdict = self._examine(asked, site, tracer, settle)
                    # Its number varies where git tells its progress, as often as time allows.
                    asked = replace(case, call=tracer.like(case.call))
                except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
                    verdict = Verdict(reached=True, problems=[f"{type(error).__name__}: {error}"])
            if verdict.reached:
                break
        return verdict

    def _examine(self, case: Case, site: Site, tracer: Tracer, settle: Callable[[], None]) -> Verdict:
        out, err = _strike(case, site, tracer)
        site.wait_for_lock()
        verdict = Verdict(reached=tracer.reached(case.call, case.fault))
        if not verdict.reached:
            return verdict
        if "Traceback" in err:
            verdict.problems.append(f"an error in the worker itself: {err[-600:]}")
        if case.fault in ERRORS and '"failure":"internal"' in out:
            verdict.problems.append("a failing disk was not told as one")
        began = time.monotonic()
        said = ""
        while verdict.runs < _RUNS:
            verdict.runs += 1
            again = site.run_once()
            said += again.stdout + again.stderr
            if is_settled(site):
                break
        verdict.seconds = time.monotonic() - began
        settle()
        wrong = list(problems(site, moved=case.moved))
        if not wrong and (left := leftovers(site)):
            site.save("next", ["content/posts/welcome.md"])
            site.run_once()
            tidy_later(site)
            wrong = [f"left over for good: {name}" for name in leftovers(site) if name in left]
        verdict.problems += wrong
        if verdict.problems:
            verdict.problems += _told("first", out + err) + _told("then", said)
        return verdict


def _told(when: str, said: str) -> list[str]:
    """Return the worker's error messages, for the reader of a failure."""
    lines = [
        line for line in said.splitlines() if '"error"' in line or not line.startswith("[briter-worker]")
    ]
    return [
        f"{when}: {line}"
        for line in dict.fromkeys(re.sub(r'"(time|jobId|slug)":"[^"]*",', "", each) for each in lines[-12:])
    ]


def _identity(call: Call) -> tuple[str, str, int]:
    return (call.process, call.does, call.turn)


def _strike(case: Case, site: Site, tracer: Tracer) -> tuple[str, str]:
    process = tracer.start("run", "--once", env=site.environment(), call=case.call, fault=case.fault)
    if case.fault is KILL_ALL:
        name, sign = case.call.process, KILL_ALL.sign
        eventually(lambda: process.poll() is not None or sign in tracer.said(name), within=60)
        send(tree_of(process.pid), signal.SIGKILL)  # git runs in a session of its own
        end_session(process.pid)
    out, err = process.communicate(timeout=120)
    eventually(lambda: not session_of(process.pid), within=30)
    return out, err


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Every call and every fault; else a sample, with an odd seed of the publication that is behind."""
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(
        prefix="briter-sweep-", dir=IN_MEMORY, ignore_cleanup_errors=True
    ) as folder:
        lab = Lab(Path(folder))
        cases: list[Case] = []
        calls = 0
        for moved in (False, True):
            if not options.full and moved != bool(options.seed % 2):
                continue
            found = lab.prepare(moved=moved)
            calls += len(found)
            where = " where the remote is ahead" * moved
            tell(f"{len(found)} calls{where}: {dict(Counter(call.process for call in found))}")
            cases += [Case(call, fault, moved) for call in found for fault in FAULTS]
        size = options.of(len(cases), 14)
        if size < len(cases):
            cases = sample(cases, size, chance)
        else:
            chance.shuffle(cases)  # so that what takes long is spread
        failures: list[str] = []
        runs: Counter[int] = Counter()
        slowest = 0.0
        with ThreadPoolExecutor(options.processes) as pool:
            for done, (case, verdict) in enumerate(zip(cases, pool.map(lab.examine, cases), strict=True), 1):
                if not verdict.reached:
                    failures.append(f"not reached: {case}")
                elif verdict.problems:
                    failures.append(f"{case}: " + "\n        ".join(verdict.problems))
                    tell(f"FAILED {case}: {verdict.problems[0]}")
                else:
                    slowest = max(slowest, verdict.seconds)
                    runs[verdict.runs] += 1
                if done % 200 == 0:
                    tell(f"{done} of {len(cases)}, {runs.total()} recovered")
    missed = sum(failure.startswith("not reached") for failure in failures)
    figures = {
        "calls": calls,
        "faults each": len(FAULTS),
        "cases": len(cases),
        "recovered": runs.total(),
        "recovered by the first run": runs[1],
        "not recovered": len(failures) - missed,
        "not reached": missed,
        "slowest recovery, seconds": round(slowest, 2),
    }
    return Report("sweep", figures, failures)


def sample(cases: Sequence[Case], size: int, chance: random.Random) -> list[Case]:
    """Some of the cases: one fault at each delicate call, the rest by chance."""
    chosen: list[Case] = []
    for process, begins in DELICATE.values():
        there = [
            case
            for case in cases
            if case.call.process.startswith(process) and case.call.does.startswith(begins)
        ]
        assert there, f"no {process} does {begins} any more: name the call that took its place"
        chosen.append(chance.choice(there))
    rest = [case for case in cases if case not in chosen]
    chosen += chance.sample(rest, min(len(rest), max(0, size - len(chosen))))
    return chosen
