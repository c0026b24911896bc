"""The benchmarks write each section as soon as it is measured, beside the sections of earlier runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks import report

if TYPE_CHECKING:
    import pytest

MACHINE: dict[str, str | int] = {
    "date": "a day",
    "cores": 2,
    "cpu": "c",
    "system": "s",
    "python": "3",
    "git": "2",
    "load": "1",
}


def section(value: float) -> report.Section:
    check, series = report.Check("a check", value, " ms", 2), report.Series("a series", "ms", [value])
    return report.Section("One", "what", [check], [series], MACHINE)


def test_each_section_is_written_as_soon_as_it_is_measured_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    names = ["drain", "held"]
    report.write("all", "held", section(1), names)
    report.write("all", "drain", section(2), names)
    files = report.write("all", "held", section(3), names)
    assert sorted(tmp_path.iterdir()) == sorted(files)
    found = report.read_sections("all")
    assert [(name, each.checks[0].value) for name, each in found.items()] == [("drain", 2), ("held", 3)]
    text = files[1].read_text()
    assert "2 ms | ≤ 2 ms | met" in text
    assert "3 ms | ≤ 2 ms | MISSED" in text


def test_a_ratio_is_the_median_of_the_ratios_within_each_repetition() -> None:
    assert report.ratio([1, 20, 300], [1, 10, 100]) == 2
