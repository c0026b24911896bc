"""Figures as a table for the terminal, as JSON and Markdown in `results/`, and in the documentation."""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
_PAGES = ("README.md", "docs/explanation/speed.md", "docs/explanation/cluster-speed.md")
_PART = re.compile(r"(<!-- bench:([\w,-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
_CHECKED = ["figure", "measured", "target", ""]
_MEASURED = ["series", "median", "least", "most", "times"]
_THREE_DIGITS = 100


@dataclass(frozen=True, slots=True)
class Check:
    """A figure with a target."""

    name: str
    value: float
    unit: str
    target: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Return True if the target is reached."""
        return self.value >= self.target if self.at_least else self.value <= self.target

    def row(self) -> list[str]:
        """Return the line of the table."""
        sign = "≥" if self.at_least else "≤"
        target = f"{sign} {number(self.target)}{self.unit}"
        return [self.name, f"{number(self.value)}{self.unit}", target, "met" if self.met else "MISSED"]


@dataclass(frozen=True, slots=True)
class Series:
    """Repeated measurements of one thing."""

    name: str
    unit: str
    values: Sequence[float]

    def row(self) -> list[str]:
        """Return the line of the table."""
        figures = (statistics.median(self.values), min(self.values), max(self.values))
        return [self.name, *(f"{number(each)} {self.unit}" for each in figures), str(len(self.values))]


@dataclass(slots=True)
class Section:
    """One benchmark's figures."""

    title: str
    what: str
    checks: list[Check] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    machine: Mapping[str, str | int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Section:
        """Return the section that was written as `data`."""
        checks = [Check(**each) for each in data["checks"]]
        series = [Series(**each) for each in data["series"]]
        return cls(data["title"], data["what"], checks, series, data["machine"])

    def markdown(self) -> str:
        """Return the text for the terminal and the repository."""
        checks = _format_table([_CHECKED, *(check.row() for check in self.checks)])
        series = _format_table([_MEASURED, *(each.row() for each in self.series)])
        about = [f"## {self.title}", "", self.what, "", describe(self.machine)]
        return "\n".join([*about, "", *checks, "", *series, ""])


def ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of one / other, each within its repetition, because machines drift."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def read_machine() -> dict[str, str | int]:
    """Return what the figures are measured on."""
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


def describe(about: Mapping[str, str | int]) -> str:
    """Return the machine in one sentence."""
    return (
        f"Measured on {about['date']}: {about['cores']} cores ({about['cpu']}), {about['system']}, "
        f"Python {about['python']}, git {about['git']}; load average at the start {about['load']}."
    )


def write(result: str, name: str, section: Section, names: Sequence[str]) -> list[Path]:
    """Put the section into `results/`, beside the other sections of `names`; return the files."""
    RESULTS.mkdir(exist_ok=True)
    files = [RESULTS / f"{result}.json", RESULTS / f"{result}.md"]
    known = {**read_sections(result), name: section}
    sections = {name: known[name] for name in names if name in known}
    data = {name: asdict(each) for name, each in sections.items()}
    head = (
        "# Benchmarks\n\nRepetitions are interleaved. A ratio is taken within each repetition; the figure is "
        "the median of these ratios. `scripts/bench all` measures again.\n"
    )
    texts = (
        json.dumps(data, indent=1, ensure_ascii=False) + "\n",
        "\n".join([head, *(each.markdown() for each in sections.values())]).rstrip() + "\n",
    )
    for file, text in zip(files, texts, strict=True):
        partial = file.with_suffix(".partial")  # the run may be ended at any time
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    return files


def read_sections(result: str) -> dict[str, Section]:
    """Return the sections measured so far."""
    file = RESULTS / f"{result}.json"
    if not file.exists():
        return {}
    data = json.loads(file.read_text(encoding="utf-8"))
    return {name: Section.from_json(each) for name, each in data.items()}


def fill_pages(*, write_files: bool) -> list[Path]:
    """Return the pages that show other figures than `results/all.json`; with `write_files`, correct them."""
    sections = read_sections("all")

    def fill(part: re.Match[str]) -> str:
        names = part[2].split(",")
        wanted = ["drain", "latency"] if names == ["headline"] else names
        if any(name not in sections for name in wanted):
            lines = ["Not measured yet: run `scripts/bench all`."]
        elif names == ["headline"]:
            lines = _headline(sections)
        else:
            lines = _targets([sections[name] for name in names])
        return "\n".join([part[1], *lines, "", part[3]])

    stale = []
    for page in _PAGES:
        text = (PROJECT / page).read_text(encoding="utf-8")
        if (filled := _PART.sub(fill, text)) != text:
            stale.append(PROJECT / page)
            if write_files:
                (PROJECT / page).write_text(filled, encoding="utf-8")
    return stale


def _headline(sections: Mapping[str, Section]) -> list[str]:
    """Return the sentence for the README: a batch and one post, and what they were measured on."""
    drain, latency = sections["drain"], sections["latency"]
    what = drain.title.partition(": ")[2].capitalize()
    post = next(check for check in latency.checks if check.name.startswith("new post, 10,000 posts: time"))
    return [
        (
            f"{what} are on the remote **{number(drain.checks[0].value)}× faster** than by GitPython's add, "
            f"commit and push per job; one new post takes {number(post.value)}× the time of git's own three "
            "commands (lower is better)."
        ),
        *_link_headline(sections),
        "",
        describe(drain.machine),
    ]


def _link_headline(sections: Mapping[str, Section]) -> list[str]:
    """Return the favourable and the unfavourable figure of a remote at the other end of a link."""
    if "link" not in sections:
        return []
    kept, fresh = (
        next(check for check in sections["link"].checks if check.name.startswith(name))
        for name in ("ssh, round trip 50 ms, ours:", "ssh, round trip 50 ms, ours, fresh")
    )
    return [
        (
            f"To a remote 50 ms away, by ssh, a save takes **{number(kept.value)}× the time** of these "
            f"commands, and {number(fresh.value)}× where no connection is kept yet."
        )
    ]


def _targets(sections: Sequence[Section]) -> list[str]:
    """Return one table of all targets, and what they were measured on."""
    rows = [_CHECKED]
    for section in sections:
        rows += [[f"**{section.title}**", "", "", ""], *(check.row() for check in section.checks)]
    machines = {describe(section.machine): None for section in sections}
    return [*_format_table(rows), "", *machines]


def number(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:,.0f}" if abs(value) >= _THREE_DIGITS or value == int(value) else f"{value:.3g}"


def _cpu() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return found[1] if found else platform.machine()


def _format_table(rows: list[list[str]]) -> list[str]:
    """Format a table in Markdown."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|---" + "|--:" * (len(rows[0]) - 1) + "|", *body]
