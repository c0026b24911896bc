"""Options and results of the soak's parts; the results of full runs are kept on one page."""

from __future__ import annotations

import multiprocessing
import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
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


def keep(reports: Sequence[Report], seed: int) -> None:
    """Write each part's section of the page; those of the other parts stay."""
    heading, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    found = {section.partition("\n")[0]: section for section in sections}
    found |= {report.name: "\n".join(_section(report, seed)) for report in reports}
    PAGE.write_text("\n## ".join([heading, *(found[name] for name in sorted(found))]), encoding="utf-8")


def _section(report: Report, seed: int) -> Iterator[str]:
    git = _output("git", "version").removeprefix("git version ")
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.release()}"
    yield f"{report.name}\n"
    yield (
        f"{datetime.now(UTC).date()}, commit {_version()}, {machine}, Python {platform.python_version()}, "
        f"git {git}, seed {seed}."
    )
    yield "\n| figure | |"
    yield "|---|---|"
    yield from (f"| {name} | {_number(value)} |" for name, value in report.figures.items())
    yield from (f"\nFailed: {failure}" for failure in report.failures)
    yield ""


def _version() -> str:
    """Return the tested commit, marked if anything but the page was changed since."""
    in_place = ("git", "-C", str(ROOT))
    commit = _output(*in_place, "rev-parse", "--short", "HEAD") or "unknown"
    others = ("--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return f"{commit}-dirty" if _output(*in_place, "status", "--porcelain", *others) else commit


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
