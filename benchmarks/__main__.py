"""`python -m benchmarks`: see `scripts/bench`."""

from __future__ import annotations

import argparse
import sys

from benchmarks import (
    drain,
    growth,
    held,
    imports,
    latency,
    memory,
    nested,
    processes,
    queue,
    sinks,
    start,
)
from benchmarks.lab import Scale, laboratory
from benchmarks.report import Section, machine, write

_BENCHMARKS = {
    "drain": drain.measure,
    "latency": latency.measure,
    "start": start.measure,
    "held": held.measure,
    "queue": queue.measure,
    "memory": memory.measure,
    "processes": processes.measure,
    "sinks": sinks.measure,
    "import": imports.measure,
    "nested": nested.measure,
    "growth": growth.measure,
}


def main() -> int:
    """Measure what was asked for; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", choices=[*_BENCHMARKS, "all"])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: about a minute each")
    asked = parser.parse_args()
    names = list(_BENCHMARKS) if asked.what == "all" else [asked.what]
    about = machine()
    sections: list[Section] = []
    with laboratory(Scale(quick=asked.quick)) as lab:
        for name in names:
            sections.append(_BENCHMARKS[name](lab))
            print(sections[-1].plain(), flush=True)
    for file in write(asked.what + ("-quick" if asked.quick else ""), sections, about):
        print(f"    written: benchmarks/results/{file.name}")
    return 0 if all(check.met for section in sections for check in section.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
