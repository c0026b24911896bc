"""What the last whole run measured, where readers see it: docs/explanation/speed.md, the README, docs/images.

Every figure there is written by this, from `results/all.json`; a test compares.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from benchmarks.lab import PROJECT
from benchmarks.plots import draw
from benchmarks.report import CHECKED, RESULTS, Check, Plot, Section, described, marked, number

if TYPE_CHECKING:
    from pathlib import Path

_PAGES = ("docs/explanation/speed.md", "docs/explanation/cluster-speed.md", "README.md")
_IMAGES = PROJECT / "docs" / "images"
_PART = re.compile(r"(<!-- bench:(\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def behind() -> list[Path]:
    """The files that do not show what the last run measured."""
    return [file for file, text in _wanted().items() if not file.exists() or file.read_text("utf-8") != text]


def show() -> list[Path]:
    """Have them show it; those that were changed."""
    changed, wanted = behind(), _wanted()
    for file in changed:
        file.parent.mkdir(exist_ok=True)
        file.write_text(wanted[file], encoding="utf-8")
    return changed


def _wanted() -> dict[Path, str]:
    name = next(name for name in ("all", "all-quick") if (RESULTS / f"{name}.json").exists())
    data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    cluster = _cluster()
    parts = {
        "machine": [_machine(name, data)],
        "targets": _targets(data, headline=False),
        "headline": _targets(data, headline=True),
        "drain": _made(data, "ran: ", "of one drain"),
        "start": _made(data, "import ", "to import, with Python's own start"),
        "notes": [f"- {note}" for section in data["sections"] for note in _notes(section, data)],
        "cluster": cluster.markdown().splitlines()[2:]
        if cluster
        else ["Not measured: `scripts/bench cluster`."],
    }

    def fill(part: re.Match[str]) -> str:
        lines = "\n".join(parts[part[2]])
        return f"{part[1]}\n{lines}\n\n{part[3]}"

    wanted = {
        PROJECT / page: _PART.sub(fill, (PROJECT / page).read_text(encoding="utf-8")) for page in _PAGES
    }
    plots = [Plot(**plot) for section in data["sections"] for plot in section["plots"]]
    for plot in [*plots, *(cluster.plots if cluster else [])]:
        wanted[_IMAGES / f"{plot.file}.svg"] = draw(plot)
    return wanted


def _cluster() -> Section | None:
    """The cluster's figures: of a whole run, else of one of its own, else of the short one over all."""
    for name in ("all", "cluster", "all-quick"):
        file = RESULTS / f"{name}.json"
        for each in json.loads(file.read_text("utf-8"))["sections"] if file.exists() else ():
            if each.get("name") == "cluster":
                found = Section.of(each)
                found.notes.insert(0, _machine(name, each))
                return found
    return None


def _machine(name: str, data: dict[str, Any]) -> str:
    text = described(data["machine"])
    if not name.endswith("-quick"):
        return text
    return text + " This was `--quick`, with sizes smaller than those that the targets are meant for."


def _notes(section: dict[str, Any], data: dict[str, Any]) -> list[str]:
    """What is to be said of one benchmark, and whether its figures are of another run than the last."""
    then = section.get("machine", data["machine"])
    other = [] if then == data["machine"] else [f"{section['title']}: of another run. {described(then)}"]
    return [*section["notes"], *other]


def _made(data: dict[str, Any], beginning: str, head: str) -> list[str]:
    """What something is made of: the series whose names begin so."""
    found = [each for section in data["sections"] for each in section["series"]]
    wanted = [each for each in found if each["name"].startswith(beginning)]
    rows = [
        [each["name"].removeprefix(beginning), f"{number(each['median'])} {each['unit']}"] for each in wanted
    ]
    return marked([[head, "median"], *rows])


def _targets(data: dict[str, Any], *, headline: bool) -> list[str]:
    """One table of all; a line for the benchmark, then its ratios and limits."""
    rows = [CHECKED]
    for section in data["sections"]:
        checks = [Check(**{key: each[key] for key in each if key != "met"}) for each in section["checks"]]
        wanted = [check.row() for check in checks if check.headline or not headline]
        if wanted:
            rows += [[f"**{section['title']}**", "", "", ""], *wanted]
    return marked(rows)
