"""The page on faults names tests: each of them exists, and no line is without one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "faults.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def rows() -> list[tuple[str, str]]:
    """What happens, and the cell of tests that show what comes of it."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[0] not in {"what happens", "by"}:
            assert len(cells) == 3, line
            found.append((cells[0].lstrip("| "), cells[2]))
    return found


@cache
def names_in(file: Path) -> frozenset[str]:
    """The names of the tests of a file."""
    tree = ast.parse(file.read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_the_page_has_every_row_of_the_table() -> None:
    assert len(rows()) >= 45


@pytest.mark.parametrize(("what", "shown"), rows(), ids=[what for what, _ in rows()])
def test_every_fault_is_shown_by_tests_that_exist(what: str, shown: str) -> None:
    named = _NAMED.findall(shown)
    assert named, f"nothing shows what comes of: {what}"
    assert not _NAMED.sub("", shown).strip(), "only tests are named here"
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert test, f"{file}: name the test"
        assert test in names_in(ROOT / file), f"{file} has no {test}"
