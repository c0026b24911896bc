"""What is read without typer is what typer would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer.main
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from briter_worker.cli import Invocation
from briter_worker.commands import plain, work
from briter_worker.commands.app import app

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS = [
    "hello",
    "content/a.md",
    "b.md",
    "",
    " ",
    "é\udcff",
    "2099-01-01",
    "enqueue",
    "-",
    "--",
    "-x",
    "--all",
]
OPTIONS = [
    *plain.MESSAGE,
    *plain.AT,
    *plain.AUTHOR,
    plain.SITE,
    plain.ROOT,
    plain.JSON,
    "--message=x",
    "-mx",
    "--mes",
    "--help",
    "-h",
]
PLAIN = [
    "enqueue",
    "hello",
    "content/a.md",
    "-m",
    "M",
    "b.md",
    "--at",
    "x",
    "--author",
    "y",
    "--site",
    "s",
    "--root",
    "r",
    "--json",
    "-m",
    "N",
]


def by_typer(argv: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> plain.Enqueue | None:
    """What typer would have the command do; None when it would not run it."""
    asked: list[plain.Enqueue] = []
    with monkeypatch.context() as patched:
        patched.setattr(work, "ask", asked.append)
        with pytest.raises(SystemExit):
            typer.main.get_command(app).main(list(argv), obj=Invocation(debug=False))
    return asked[0] if asked else None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from([*WORDS, *OPTIONS]), max_size=7))
@example(words=PLAIN[1:])
@example(words=["-m", "--all", "a", "b"])
def test_what_is_recognised_means_what_typer_says(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plain.read(["enqueue", *words])
    if asked is not None:
        assert asked == by_typer(["enqueue", *words], monkeypatch)


def test_every_option_that_typer_knows_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    command = typer.main.get_command(app).commands["enqueue"]  # type: ignore[attr-defined]
    options = {name for each in command.params for name in each.opts if name.startswith("-")} - {
        "--help",
        "-h",
    }
    assert options == {*plain.MESSAGE, *plain.AT, *plain.AUTHOR, plain.SITE, plain.ROOT, plain.JSON}
    assert plain.read(PLAIN) == by_typer(PLAIN, monkeypatch)
    assert plain.read(PLAIN) == plain.Enqueue(
        "hello", ["content/a.md", "b.md"], "N", "x", "y", as_json=True, site="s", root="r"
    )


@pytest.mark.parametrize(
    "line", ["", "run --help", "run --once --once", "enqueue", "enqueue a", "list", "--debug run"]
)
def test_anything_else_is_for_typer(line: str) -> None:
    assert plain.read(line.split()) is None


def test_run_is_recognised_with_and_without_once() -> None:
    assert plain.read(["run"]) == plain.Run(once=False)
    assert plain.read(["run", "--once"]) == plain.Run(once=True)
