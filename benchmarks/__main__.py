"""`python -m benchmarks`: measure, and write the figures into `results/` and the documentation."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from benchmarks import drain, held, latency, link, one_core, start, watch, web
from benchmarks.cluster import section as cluster
from benchmarks.lab import PROJECT, laboratory, say
from benchmarks.report import fill_pages, read_machine, write

_BENCHMARKS = {
    "drain": drain.measure,
    "latency": latency.measure,
    "link": link.measure,
    "one-core": one_core.measure,
    "held": held.measure,
    "start": start.measure,
    "watch": watch.measure,
    "web": web.measure,
    "cluster": cluster.measure,
}


def main() -> int:
    """Return 1 if a target is missed, or with `show --check` if a page shows other figures."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("what", nargs="+", choices=[*_BENCHMARKS, "all", "show"])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller: all in a few minutes")
    parser.add_argument("--check", action="store_true", help="of show: write nothing, 1 if a page differs")
    arguments = parser.parse_args()
    if arguments.what == ["show"]:
        return _show(check=arguments.check)
    names = [name for name in _BENCHMARKS if name in arguments.what or "all" in arguments.what]
    return _measure(names, quick=arguments.quick)


def _measure(names: list[str], *, quick: bool) -> int:
    machine = read_machine()
    status = 0
    with laboratory(quick=quick) as lab:
        for name in names:
            began = time.monotonic()
            say(name)
            try:
                section = _BENCHMARKS[name](lab)
            except Exception:  # noqa: BLE001 - the other benchmarks go on
                traceback.print_exc()
                status = 1
                continue
            say(f"{name} took {time.monotonic() - began:.0f} s")
            section.machine = machine
            print(section.markdown(), flush=True)
            write("quick" if quick else "all", name, section, list(_BENCHMARKS))
            if not all(check.met for check in section.checks):
                status = 1
    if not quick:
        _show(check=False)
    return status


def _show(*, check: bool) -> int:
    stale = fill_pages(write_files=not check)
    for file in stale:
        state = "other figures, run scripts/bench show" if check else "written"
        print(f"    {file.relative_to(PROJECT)}: {state}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
