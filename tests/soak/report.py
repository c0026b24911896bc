"""Options and results of the soak's parts; results of full runs are kept as JSON and as one page."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "explanation" / "soak.md"
IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, slots=True)
class Options:
    """How much to run, and with which seed."""

    full: bool
    seed: int
    processes: int = 2
    """How many things may run at once; a part that needs only one ignores it."""

    def of(self, full: int, quick: int) -> int:
        """Return the full count, or the quick one."""
        return full if self.full else quick


@dataclass(frozen=True, slots=True)
class Report:
    """One part's figures, and one line for each broken promise."""

    name: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    failures: Sequence[str] = ()


def share_out(
    function: Callable[[int, int], tuple[Counter[str], str]],
    what: str,
    wanted: int,
    share: int,
    options: Options,
    tell: Callable[[str], None],
) -> tuple[dict[str, float], list[str]]:
    """Call `function(number, seed)` for each share in a process of its own; return sums and failures."""
    began = time.monotonic()
    figures: Counter[str] = Counter()
    failures: list[str] = []
    work = [(min(share, wanted - done), options.seed + done) for done in range(0, wanted, share)]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for result in [pool.apply_async(function, each) for each in work]:
            found, trouble = result.get()
            figures += found
            tell(f"{figures[what]:,} {what}")
            failures += [trouble] if trouble else []
    return {**figures, f"{what}/s": figures[what] / (time.monotonic() - began)}, failures


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Yield every figure on a line of its own, aligned."""
    rows: list[tuple[str, str, str]] = []
    for report in reports:
        rows += [(report.name, name, _number(value)) for name, value in report.figures.items()]
        rows.append((report.name, "", "FAILED" if report.failures else "held"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for part, name, value in rows:
        yield f"{part:{widths[0]}}  {name:{widths[1]}}  {value}"


def keep(reports: Sequence[Report], seed: int) -> list[Path]:
    """Write each part's result beside those of the other parts, and the page of all; return the files."""
    RESULTS.mkdir(exist_ok=True)
    about = _surroundings() | {"seed": seed}
    written = []
    for report in reports:
        file = RESULTS / f"{report.name}.json"
        found = {"name": report.name, "figures": dict(report.figures), "failures": list(report.failures)}
        file.write_text(json.dumps(found | about, indent=2) + "\n", encoding="utf-8")
        written.append(file)
    PAGE.write_text("\n".join(_page()) + "\n", encoding="utf-8")
    return [*written, PAGE]


def _surroundings() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "git": _output("git", "version").removeprefix("git version "),
        "commit": _version(),
    }


def _version() -> str:
    """Return the tested commit, marked if anything but other parts' results was changed since."""
    in_place = ("git", "-C", str(ROOT))
    own = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    commit = _output(*in_place, "rev-parse", "--short", "HEAD") or "unknown"
    changed = _output(*in_place, "status", "--porcelain", "--untracked-files=no", "--", ".", *own)
    return f"{commit}-dirty" if changed else commit


def _page() -> Iterator[str]:
    yield "# The last full soak"
    yield ""
    yield "Written by `scripts/soak`. What each part proves: [guarantees](guarantees.md)."
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        yield f"\n## {found['name']}\n"
        yield (
            f"{found['date']}, commit {found['commit']}, {found['machine']}, Python {found['python']}, "
            f"git {found['git']}, seed {found['seed']}."
        )
        yield "\n| figure | |"
        yield "|---|---|"
        for name, value in found["figures"].items():
            yield f"| {name} | {_number(value)} |"
        for failure in found["failures"]:
            yield f"\nFailed: {failure}"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
