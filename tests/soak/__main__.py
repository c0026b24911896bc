"""`python -m soak`: see `scripts/soak`."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Protocol, cast

from soak import record
from soak.report import Options, Report

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = {
    "kills": "kills of the worker while everything around it moves",
    "lock": "many processes at one lock, killed and stopped, across PID namespaces",
    "sweep": "a kill and each error of a disk at every system call of a publication",
    "machine": "random histories of CMS, worker, person, remote and clock against a model",
    "oracle": "what is published of random path lists, against git itself",
    "fuzz": "random bytes as jobs",
    "cluster": "hosts of a cluster killed, stopped, cut off, and a Postgres that goes and comes",
}


class Part(Protocol):
    """A module of this package that proves something."""

    def run(self, options: Options, tell: Callable[[str], None]) -> Report:
        """Do it; `tell` a line now and then."""
        ...


def main() -> int:
    """Run what was asked for; 1 when anything that was promised did not hold."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description="Prove what is promised, at full scale."
    )
    parser.add_argument("what", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--quick", action="store_true", help="a minute of each; keeps nothing")
    parser.add_argument("--seed", type=int, help="repeat a run; without it, a fresh one")
    parser.add_argument("--scale", type=float, help="this fraction of a full run; keeps nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="how much at once")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    options = Options(full=not asked.quick, seed=seed, processes=asked.processes, scale=asked.scale)
    names = list(PARTS) if asked.what == "all" else [asked.what]
    print(f"seed {seed}", flush=True)
    reports = [_run(name, options) for name in names]
    print()
    for line in record.table(reports):
        print(line)
    for report in reports:
        for failure in report.failures:
            print(f"FAILED {report.name}: {failure}")
    if options.full and options.scale is None:
        for file in record.keep(reports, seed):
            print(f"    written: {file}")
    return 0 if all(report.ok for report in reports) else 1


def _run(name: str, options: Options) -> Report:
    print(f"==> {name}: {PARTS[name]}", flush=True)
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"    {time.monotonic() - began:6.0f} s  {line}", flush=True)

    part = cast("Part", importlib.import_module(f"soak.{name}"))
    report = part.run(options, tell)
    took = round(time.monotonic() - began)
    return Report(name, {**report.figures, "seconds": took}, report.failures)


if __name__ == "__main__":
    sys.exit(main())
