"""The figures of the last full run: a table for the terminal, JSON and Markdown for the repository."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from soak.report import Report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE = ROOT / "docs" / "explanation" / "soak.md"


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Every figure on a line of its own, aligned."""
    rows = [
        (report.name, name, _number(value)) for report in reports for name, value in report.figures.items()
    ]
    rows += [(report.name, "", "held" if report.ok else "FAILED") for report in reports]
    rows.sort(key=lambda row: [report.name for report in reports].index(row[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for part, name, value in rows:
        yield f"{part:{widths[0]}}  {name:{widths[1]}}  {value}"


def keep(reports: Sequence[Report], seed: int) -> list[Path]:
    """Write each part's result beside those of the other parts, and the page of all; the files."""
    RESULTS.mkdir(exist_ok=True)
    about = surroundings() | {"seed": seed}
    written = []
    for report in reports:
        file = RESULTS / f"{report.name}.json"
        found = {"name": report.name, "figures": dict(report.figures), "failures": list(report.failures)}
        file.write_text(json.dumps(found | about, indent=2) + "\n", encoding="utf-8")
        written.append(file)
    PAGE.write_text("\n".join(_page()) + "\n", encoding="utf-8")
    return [*written, PAGE]


def surroundings() -> dict[str, Any]:
    """When, where, and what was proven."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "git": _says("git", "version").removeprefix("git version "),
        "commit": _version(),
    }


def _version() -> str:
    """The commit that was proven, and whether anything but the results of other parts was changed since."""
    in_place = ("git", "-C", str(ROOT))
    own = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    commit = _says(*in_place, "rev-parse", "--short", "HEAD") or "unknown"
    changed = _says(*in_place, "status", "--porcelain", "--untracked-files=no", "--", ".", *own)
    return f"{commit}-dirty" if changed else commit


def _page() -> Iterator[str]:
    yield "# The last full soak"
    yield ""
    yield "Written by `scripts/soak`; what each part proves is told in [guarantees](guarantees.md)."
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        yield ""
        yield f"## {found['name']}"
        yield ""
        yield (
            f"{found['date']}, commit {found['commit']}, {found['machine']}, Python {found['python']}, "
            f"git {found['git']}, seed {found['seed']}."
        )
        yield ""
        yield "| figure | |"
        yield "|---|---|"
        for name, value in found["figures"].items():
            yield f"| {name} | {_number(value)} |"
        for failure in found["failures"]:
            yield ""
            yield f"Failed: {failure}"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def _says(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()
