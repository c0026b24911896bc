"""`python -m soak`: see `scripts/soak`."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import time

from soak.report import Options, Report, keep, table

PARTS = {
    "kills": "kill the worker while everything around it moves",
    "lock": "let many processes race for one lock, killed and stopped, across PID namespaces",
    "sweep": "kill, or fail the disk, at every system call of a publication",
    "machine": "hold random histories of CMS, worker, operator, remote and clock against a model",
    "oracle": "compare what is published of random path lists with git itself",
    "fuzz": "feed random bytes as jobs",
    "git": "publish with each git in the folders of BRITER_SOAK_GITS, with refs in files and in tables",
    "cluster": "kill, stop, cut off and sicken a cluster's nodes, and restart and restore Postgres",
}


def main() -> int:
    """Run the parts that were asked for; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Prove the guarantees at full scale.")
    parser.add_argument("what", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--quick", action="store_true", help="a minute of each; keeps nothing")
    parser.add_argument("--seed", type=int, help="repeat a run [default: random]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="how many at once")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if asked.seed is None else asked.seed
    options = Options(full=not asked.quick, seed=seed, processes=asked.processes)
    print(f"seed {seed}", flush=True)
    reports = [_run(name, options) for name in (PARTS if asked.what == "all" else [asked.what])]
    print("", *table(reports), sep="\n")
    for report in reports:
        for failure in report.failures:
            print(f"FAILED {report.name}: {failure}")
    if options.full:
        keep(reports, seed)
    return 1 if any(report.failures for report in reports) else 0


def _run(name: str, options: Options) -> Report:
    print(f"==> {name}: {PARTS[name]}", flush=True)
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"    {time.monotonic() - began:6.0f} s  {line}", flush=True)

    report: Report = importlib.import_module(f"soak.{name}").run(options, tell)
    took = round(time.monotonic() - began)
    return Report(name, {**report.figures, "seconds": took}, report.failures)


if __name__ == "__main__":
    sys.exit(main())
