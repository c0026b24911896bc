"""Atheris: random bytes, guided by coverage, as job files.

Each share is a process of its own, as libFuzzer ends the process it runs in:
`python -m soak.fuzz FOLDER [libFuzzer's options]`. `FOLDER` is for the corpus, which begins with our
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soak.report import IN_MEMORY, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

_TESTS = Path(__file__).resolve().parents[1]
RUNS, FEW = 10_000_000, 20_000
"""How often in full, and in a short run."""
SHARE = 500_000
"""Runs of one process: a new one begins with the seeds again, and other dice."""
_DONE = re.compile(r"Done (\d+) runs")


def is_installed() -> bool:
    """Whether this Python has atheris: it comes as a wheel for some Pythons on Linux only."""
    return importlib.util.find_spec("atheris") is not None


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Fuzz in shares, as many at once as there are processes."""
    if not is_installed():
        return Report("fuzz", {}, ("atheris is not installed: scripts/setup, with Python 3.11 to 3.13",))
    wanted = options.of(RUNS, FEW)
    shares = [(min(SHARE, wanted - done), (options.seed + done) % 2**31) for done in range(0, wanted, SHARE)]
    runs = 0
    failures: list[str] = []
    with ThreadPoolExecutor(options.processes) as pool:
        for done, trouble in pool.map(lambda share: fuzz(*share), shares):
            runs += done
            tell(f"{runs:,} runs")
            failures += [trouble] if trouble else []
    return Report("fuzz", {"runs": runs}, failures)


def fuzz(runs: int, seed: int) -> tuple[int, str]:
    """Run one process's share; return the runs that were made, and what went wrong."""
    with tempfile.TemporaryDirectory(prefix="briter-fuzz-", dir=IN_MEMORY) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "soak.fuzz", folder, f"-runs={runs}", f"-seed={seed or 1}"],
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
            trouble = f"{' | '.join(cause) or said[-2000:]}; input {inputs!r}"[:6000]
        return int(counted[1]) if counted else 0, trouble


def main() -> None:
    """Fuzz until the runs are made; the process ends inside."""
    atheris: Any = importlib.import_module("atheris")  # it has no types, and is not everywhere
    with atheris.instrument_imports(include=["briter_worker"], enable_loader_override=False):
        checks: Any = importlib.import_module("soak.fuzz_checks")
    checks.dice_of = atheris.FuzzedDataProvider
    place, *options = sys.argv[1:]
    folder = Path(place)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(checks.SEEDS):
        (corpus / str(number)).write_bytes(seed)
    words = folder / "words"
    words.write_text("".join(f'"{word}"\n' for word in checks.WORDS), encoding="utf-8")
    options += ["-max_len=1200", "-timeout=20", "-rss_limit_mb=1024", f"-dict={words}"]
    options += [f"-artifact_prefix={folder}/found-", str(corpus)]
    atheris.Setup([sys.argv[0], *options], checks.job)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
