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
    from collections.abc import Sequence

_RESULTS = Path(__file__).resolve().parent / "results"
_PERCENT = 99


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that has something to reach. `aim` is where we want to be, `target` where we must be."""

    name: str
    value: float
    unit: str
    target: float
    aim: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self._reaches(self.target)

    @property
    def verdict(self) -> str:
        """For a person."""
        if not self.met:
            return "MISSED"
        return "pass" if self.aim is None or self._reaches(self.aim) else "pass, short of the aim"

    def row(self) -> list[str]:
        """Its line of the table."""
        sign = "≥" if self.at_least else "≤"
        aim = "" if self.aim is None else f"{sign} {number(self.aim)}{self.unit}"
        return [
            self.name,
            f"{number(self.value)}{self.unit}",
            f"{sign} {number(self.target)}{self.unit}",
            aim,
            self.verdict,
        ]

    def _reaches(self, bound: float) -> bool:
        return self.value >= bound if self.at_least else self.value <= bound


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
        """What one in a hundred exceeds; with fewer values, about the largest."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, len(ordered) * _PERCENT // 100)]

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

    def plain(self) -> str:
        """For the terminal."""
        parts = [self.title, "", *_aligned(self._checks()), "", *_aligned(self._series()), ""]
        return "\n".join(parts)

    def markdown(self) -> str:
        """For the repository."""
        parts = [f"## {self.title}", "", self.what, "", *_marked(self._checks()), ""]
        return "\n".join([*parts, *_marked(self._series()), ""])

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {
            "title": self.title,
            "checks": [asdict(check) | {"met": check.met} for check in self.checks],
            "series": [asdict(each) | {"median": each.median} for each in self.series],
        }

    def _checks(self) -> list[list[str]]:
        return [
            ["ratios and limits", "measured", "target", "aim", ""],
            *(check.row() for check in self.checks),
        ]

    def _series(self) -> list[list[str]]:
        return [["measured", "median", "least", "most", "times"], *(each.row() for each in self.series)]


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


def write(name: str, sections: Sequence[Section], about: dict[str, str | int]) -> list[Path]:
    """Write the figures into `results/`; the files."""
    _RESULTS.mkdir(exist_ok=True)
    data = {"machine": about, "sections": [section.data() for section in sections]}
    line = (
        f"Measured on {about['date']}: {about['cores']} cores ({about['cpu']}), {about['system']}, "
        f"Python {about['python']}, git {about['git']}; load at the start {about['load']}. "
        "Repetitions are interleaved; ratios are taken within a repetition, then their median. "
        "Repeat it with `scripts/bench`."
    )
    text = "\n".join(["# Benchmarks", "", line, "", *(section.markdown() for section in sections)])
    files = [_RESULTS / f"{name}.json", _RESULTS / f"{name}.md"]
    files[0].write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    files[1].write_text(text.rstrip() + "\n", encoding="utf-8")
    return files


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


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(["   ", first, *rest]).rstrip())
    return lines


def _marked(rows: list[list[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *body]
