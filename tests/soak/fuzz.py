"""Atheris: random bytes, guided by coverage, as job files, as texts of git, and as declared paths.

Each share of a target is a process of its own, as libFuzzer ends the process it runs in:
`python -m soak.fuzz TARGET FOLDER [libFuzzer's options]`. `FOLDER` is for the corpus, which begins with our
seeds, and for the input that broke a promise (`found-*`).
"""

from __future__ import annotations

import importlib
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
from typing import TYPE_CHECKING, Any

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
            [sys.executable, "-m", "soak.fuzz", target, folder, f"-runs={runs}", f"-seed={seed or 1}"],
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


def main() -> None:
    """Fuzz until the runs are made; the process ends inside."""
    atheris: Any = importlib.import_module("atheris")  # it has no types, and is not everywhere
    with atheris.instrument_imports(include=["briter_worker"], enable_loader_override=False):
        checks: Any = importlib.import_module("soak.fuzz_checks")
    checks.dice_of = atheris.FuzzedDataProvider
    name, place, *options = sys.argv[1:]
    folder = Path(place)
    longest, seeds = checks.TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    words = folder / "words"
    words.write_text("".join(f'"{word}"\n' for word in checks.WORDS), encoding="utf-8")
    options += [f"-max_len={longest}", "-timeout=20", "-rss_limit_mb=1024", f"-dict={words}"]
    options += [f"-artifact_prefix={folder}/found-", str(corpus)]
    atheris.Setup([sys.argv[0], *options], checks.check_of(name, folder))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
