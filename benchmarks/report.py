"""Figures, and how they are told: a table for the terminal, Markdown and JSON for the repository."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULTS = Path(__file__).resolve().parent / "results"
_PERCENT = 99


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that has something to reach. The README shows those that are `headline`."""

    name: str
    value: float
    unit: str
    target: float
    at_least: bool = False
    headline: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> list[str]:
        """Its line of the table."""
        sign = "≥" if self.at_least else "≤"
        return [
            self.name,
            f"{number(self.value)}{self.unit}",
            f"{sign} {number(self.target)}{self.unit}",
            "met" if self.met else "MISSED",
        ]


@dataclass(frozen=True, slots=True)
class Plot:
    """Figures to be drawn: curves of points, on logarithmic axes where those are named."""

    file: str
    title: str
    x: str
    y: str
    curves: dict[str, list[tuple[float, float]]]
    logarithmic: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """What was measured again and again."""

    name: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The middle."""
        return statistics.median(self.values)

    @property
    def p99(self) -> float:
        """What one in a hundred exceeds, and no more; with fewer values, the largest."""
        ordered = sorted(self.values)
        return ordered[-(-len(ordered) * _PERCENT // 100) - 1]

    def row(self) -> list[str]:
        """Its line of the table."""
        figures = (self.median, min(self.values), max(self.values))
        return [self.name, *(f"{number(each)} {self.unit}" for each in figures), str(len(self.values))]


@dataclass(slots=True)
class Section:
    """One benchmark's figures."""

    title: str
    what: str
    checks: list[Check] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be measured here, and why."""
    plots: list[Plot] = field(default_factory=list)

    def plain(self) -> str:
        """For the terminal."""
        tables = [lines for rows in self._tables() for lines in (*aligned(rows), "")]
        return "\n".join([self.title, "", *tables, *(f"    {note}" for note in self.notes), ""])

    def markdown(self) -> str:
        """For the repository."""
        tables = [lines for rows in self._tables() for lines in (*marked(rows), "")]
        return "\n".join(
            [f"## {self.title}", "", self.what, "", *tables, *(f"- {note}" for note in self.notes), ""]
        )

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "title": self.title,
            "what": self.what,
            "notes": self.notes,
            "checks": [asdict(check) | {"met": check.met} for check in self.checks],
            "series": [asdict(each) | {"median": each.median} for each in self.series],
            "plots": [asdict(plot) for plot in self.plots],
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Section:
        """The one that `data` was of."""
        return cls(
            data["title"],
            data["what"],
            [Check(**{key: each[key] for key in each if key != "met"}) for each in data["checks"]],
            [Series(each["name"], each["unit"], each["values"]) for each in data["series"]],
            list(data["notes"]),
            [Plot(**each) for each in data["plots"]],
        )

    def _tables(self) -> list[list[list[str]]]:
        """Ratios first."""
        checks = [CHECKED, *(check.row() for check in self.checks)]
        head = ["measured", "median", "least", "most", "times"]
        series = [head, *(each.row() for each in self.series)]
        return [rows for rows in (checks, series) if len(rows) > 1]


CHECKED = ["ratios and limits", "measured", "target", ""]


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """How many times the other: the middle over repetitions, each within itself, as machines drift."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def machine() -> dict[str, str | int]:
    """What it was measured on."""
    git = subprocess.run(["git", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count() or 0,
        "cpu": _cpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "git": git.removeprefix("git version ").strip(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def described(about: Mapping[str, str | int]) -> str:
    """The machine in one sentence."""
    return (
        f"Measured on {about['date']}: {about['cores']} cores ({about['cpu']}), {about['system']}, "
        f"Python {about['python']}, git {about['git']}; load at the start {about['load']}."
    )


def write(
    result: str, measured: Mapping[str, Section], about: dict[str, str | int], names: Sequence[str]
) -> list[Path]:
    """Write these figures into `results/`, beside those of `names` that are there already; the files."""
    RESULTS.mkdir(exist_ok=True)
    files = [RESULTS / f"{result}.json", RESULTS / f"{result}.md"]
    known = _earlier(files[0])
    known |= {name: {"name": name, "machine": about} | each.data() for name, each in measured.items()}
    sections = [known[name] for name in names if name in known]
    line = (
        f"{described(about)} Repetitions are interleaved; ratios are taken within a repetition, then their "
        "median. Repeat it with `scripts/bench`."
    )
    parts = ["# Benchmarks", "", line, ""]
    for data in sections:
        parts.append(Section.of(data).markdown())
        if data["machine"] != about:
            parts += [f"Of another run. {described(data['machine'])}", ""]
    text = "\n".join(parts)
    # Whole or not at all: it may be ended at any time.
    for file, content in zip(
        files,
        (
            json.dumps({"machine": about, "sections": sections}, indent=1, ensure_ascii=False) + "\n",
            text.rstrip() + "\n",
        ),
        strict=True,
    ):
        partial = file.with_suffix(".partial")
        partial.write_text(content, encoding="utf-8")
        partial.replace(file)
    return files


def _earlier(file: Path) -> dict[str, dict[str, Any]]:
    """The sections of an earlier run, by name; one without a name is from when all were written at once."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {section["name"]: section for section in data["sections"] if "name" in section}


def number(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"  # noqa: PLR2004


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def aligned(rows: list[list[str]]) -> list[str]:
    """A table for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(["   ", first, *rest]).rstrip())
    return lines


def marked(rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *body]
