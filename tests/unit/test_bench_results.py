"""What a benchmark has measured is written at once, beside what was measured before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import report

if TYPE_CHECKING:
    import pytest

THEN, NOW = (
    {"date": date, "cores": 2, "cpu": "c", "system": "s", "python": "3", "git": "2", "load": "1"}
    for date in ("then", "now")
)


def section(value: float) -> report.Section:
    return report.Section(
        "One",
        "what",
        [report.Check("a check", value, " ms", 2)],
        [report.Series("a series", "ms", [value])],
        ["a note"],
        [report.Plot("file", "title", "x", "y", {"curve": [(1.0, value)]})],
    )


def test_each_section_is_there_as_soon_as_it_is_measured_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    names = ["drain", "held"]
    report.write("all", {"held": section(1)}, THEN, names)
    report.write("all", {"drain": section(2)}, THEN, names)
    files = report.write("all", {"held": section(3)}, NOW, names)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    data = json.loads(files[0].read_text())
    assert [(each["name"], each["checks"][0]["value"]) for each in data["sections"]] == [
        ("drain", 2),
        ("held", 3),
    ]
    assert data["machine"] == NOW
    text = files[1].read_text()
    assert text.index("2 ms") < text.index("Of another run. Measured on then") < text.index("3 ms")
    assert text.count("Of another run") == 1


def test_the_99th_percentile_is_what_one_in_a_hundred_exceeds() -> None:
    def p99(count: int) -> float:
        return report.Series("a series", "ms", [float(number) for number in range(1, count + 1)]).p99

    assert [p99(count) for count in (1, 10, 100, 101, 200, 1000)] == [1, 10, 99, 100, 198, 990]
