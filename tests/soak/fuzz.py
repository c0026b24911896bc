"""Atheris: random bytes, guided by coverage, as job files, as texts of git, and as declared paths.

Each share of a target is a process of its own (`fuzz_target`), as libFuzzer ends the process it runs in.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from soak.report import IN_MEMORY, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

_TESTS = Path(__file__).resolve().parents[1]
RUNS = {"job": (10_000_000, 20_000), "text": (2_000_000, 10_000), "path": (2_000_000, 10_000)} | {
    "queue": (200_000, 1_000)
}
"""For each target, how often in full, and how often in a short run."""
SHARE = 500_000
"""Runs of one process: a new one begins with the seeds again, and other dice."""
_DONE = re.compile(r"Done (\d+) runs")


def is_installed() -> bool:
    """Whether this Python has atheris: it comes as a wheel for some Pythons on Linux only."""
    return importlib.util.find_spec("atheris") is not None


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Every target, in shares, as many at once as there are processes."""
    if not is_installed():
        return Report("fuzz", {}, ("atheris is not installed: scripts/setup, with Python 3.11 to 3.13",))
    shares: list[tuple[str, int, int]] = []
    for target, (full, quick) in RUNS.items():
        left = options.of(full, quick)
        while left > 0:
            shares.append((target, min(left, SHARE), (options.seed + len(shares)) % 2**31))
            left -= SHARE
    runs: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    failures: list[str] = []
    with ThreadPoolExecutor(options.processes) as pool:
        for target, done, took, trouble in pool.map(lambda share: fuzz(*share), shares):
            runs[target] += done
            seconds[target] += round(took)
            tell(f"{target}: {runs[target]:,} runs")
            if trouble:
                failures.append(trouble)
    figures: dict[str, float | int | str] = {}
    for target in RUNS:
        figures[f"{target}: runs"] = runs[target]
        figures[f"{target}: runs/s in one process"] = runs[target] / max(1, seconds[target])
    return Report("fuzz", figures, failures)


def fuzz(target: str, runs: int, seed: int) -> tuple[str, int, float, str]:
    """One process's share: the target, the runs it made, the seconds, and what went wrong, if anything."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="briter-fuzz-", dir=IN_MEMORY) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "soak.fuzz_target", target, folder, f"-runs={runs}", f"-seed={seed or 1}"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS)])},
        )
        said = done.stdout + done.stderr
        counted = _DONE.search(said)
        trouble = ""
        if done.returncode or counted is None:
            inputs = [file.read_bytes() for file in Path(folder).glob("found-*")]
            cause = [line for line in said.splitlines() if "Error" in line or "ERROR" in line][-3:]
            trouble = f"{target}: {' | '.join(cause) or said[-2000:]}; input {inputs!r}"[:6000]
        made = int(counted[1]) if counted else 0
        return target, made, time.monotonic() - began, trouble
