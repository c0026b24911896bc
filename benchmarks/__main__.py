"""`python -m benchmarks`: see `scripts/bench`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from benchmarks import (
    drain,
    growth,
    held,
    imports,
    latency,
    memory,
    nested,
    network,
    processes,
    queue,
    shown,
    sinks,
    start,
    web,
)
from benchmarks.cluster import section as cluster
from benchmarks.lab import PROJECT, Scale, laboratory, say
from benchmarks.report import Section, machine, write

_BENCHMARKS = {
    "drain": drain.measure,
    "latency": latency.measure,
    "network": network.measure,
    "start": start.measure,
    "held": held.measure,
    "queue": queue.measure,
    "memory": memory.measure,
    "processes": processes.measure,
    "sinks": sinks.measure,
    "web": web.measure,
    "import": imports.measure,
    "nested": nested.measure,
    "cluster": cluster.measure,
    "growth": growth.measure,
}


def main() -> int:
    """Measure what was asked for; 1 when a target is missed, or with `show --check` a file is behind."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", choices=[*_BENCHMARKS, "all", "show"])
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: all in a few minutes")
    parser.add_argument(
        "--check", action="store_true", help="of show: write nothing, 1 when a file is behind"
    )
    asked = parser.parse_args()
    if asked.what == "show":
        return _show(check=asked.check)
    names = list(_BENCHMARKS) if asked.what == "all" else [asked.what]
    about = machine()
    sections: list[Section] = []
    failed = False
    result = asked.what + ("-quick" if asked.quick else "")
    with laboratory(Scale(quick=asked.quick)) as lab:
        for number, name in enumerate(names, 1):
            began = time.monotonic()
            say(f"{name}, {number} of {len(names)}")
            try:
                sections.append(_BENCHMARKS[name](lab))
            except Exception as error:  # noqa: BLE001 - the others go on, and this one is shown as missing
                traceback.print_exc()
                failed = True
                sections.append(Section(name.capitalize(), "", notes=[f"{name}: not measured: {error}"]))
            say(f"{name} took {time.monotonic() - began:.0f} s")
            print(sections[-1].plain(), flush=True)
            # After each: who has to end it early keeps what was measured.
            for file in write(result, {name: sections[-1]}, about, names):
                say(f"written: benchmarks/results/{file.name}")
    if asked.what == "all":
        _show(check=False)
    met = all(check.met for section in sections for check in section.checks)
    return 0 if met and not failed else 1


def _show(*, check: bool) -> int:
    files = shown.behind() if check else shown.show()
    for file in files:
        print(f"    {'behind, run scripts/bench show' if check else 'written'}: {file.relative_to(PROJECT)}")
    return 1 if check and files else 0


if __name__ == "__main__":
    sys.exit(main())
