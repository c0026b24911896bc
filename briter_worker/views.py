"""What the commands print: JSON for programs, plain columns for a pipe, tables for a person's terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from briter_worker.errors import for_people
from briter_worker.strictjson import encode, visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console, RenderableType

    from briter_worker.doctor import Finding
    from briter_worker.job import State
    from briter_worker.ports import Pause
    from briter_worker.queues.steering import Shown

NOTHING = "-"
_COLOURS = {
    "pending": "cyan",
    "scheduled": "blue",
    "retrying": "yellow",
    "claimed": "green",
    "failed": "red",
    "ok": "green",
    "warning": "yellow",
    "error": "red",
}
_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_WIDE = 100
"""So wide a terminal has room for a job's id beside the reason; every command takes the slug, too."""


def is_terminal() -> bool:
    """Whether a person reads the standard output as it comes."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def put(text: str) -> None:
    """Print the text; a reader that has had enough (`| head`) is no failure."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _let_go(sys.stdout)
    except OSError as error:
        error.filename = "standard output"
        raise


def let_go() -> None:
    """What could not be printed is given up, so that Python's end does not try it once more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _let_go(stream)


def _let_go(stream: TextIO) -> None:
    # Python flushes its buffers when it ends, and exits 120 when it cannot.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def tell(text: str) -> None:
    """One line for a person, on standard error."""
    if sys.stderr is not None:
        try:
            sys.stderr.write(f"briter-worker: {for_people(text)}\n")
            sys.stderr.flush()
        except OSError:
            pass


def put_json(value: object) -> None:
    """Print the value as JSON; what a terminal might obey is written as an escape of the same value."""
    put(visible(encode(value).decode().rstrip("\n")))


def put_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print one line for each row, its cells apart by tabs: a cell never holds one, nor a line end."""
    put("".join("\t".join(for_people(cell) or NOTHING for cell in row) + "\n" for row in rows))


def put_rich(*parts: RenderableType) -> None:
    """Print for a terminal, as wide as it is; in colour unless NO_COLOR asks for none."""
    console = _terminal()
    console.print(*parts, sep="\n")
    put(console.file.getvalue())  # type: ignore[attr-defined]


def _terminal() -> Console:
    from rich.console import Console  # noqa: PLC0415 - only a terminal pays for it

    return Console(file=io.StringIO(), force_terminal=True)


def document_of(row: Shown) -> dict[str, Any]:
    """A job as JSON: its file's keys, its writer's own included, what its writer left out, and `state`."""
    from briter_worker.job import format_time  # noqa: PLC0415 - pydantic is slow to load

    job = row.job
    left_out = {
        "type": job.type,
        "createdAt": format_time(job.created_at),
        "status": job.status.value,
        "nextAttemptAt": None,
        "lastError": None,
        "failure": None,
    }
    said = {key: value for key, value in row.document.items() if value is not None or key not in left_out}
    return {**left_out, **said, "state": row.state.value}


def put_jobs(rows: Sequence[Shown], now: float, *, as_json: bool) -> None:
    """Print the jobs."""
    if as_json:
        put_json([document_of(row) for row in rows])
    elif is_terminal():
        put_rich(_table(rows, now))
    else:
        put_columns(
            [
                row.state.value,
                row.job.slug,
                row.job.id,
                _moment(_due(row, now)),
                str(row.job.attempts),
                row.job.last_error or "",
            ]
            for row in rows
        )


def _table(rows: Sequence[Shown], now: float) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    if not rows:
        return Text("No jobs.", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("State", no_wrap=True)
    table.add_column("Post", overflow="fold")
    table.add_column("When", no_wrap=True)
    table.add_column("Tries", justify="right")
    wide = _terminal().width >= _WIDE
    if wide:
        table.add_column("Job", style="dim", overflow="fold")
    table.add_column("What happened", ratio=1, overflow="fold")
    for row in rows:
        due = _due(row, now)
        table.add_row(
            coloured(row.state),
            Text(for_people(row.job.slug)),
            ago(due - now) if due else "",
            str(row.job.attempts or ""),
            *([Text(for_people(row.job.id))] if wide else []),
            Text(for_people(row.job.last_error or "")),
        )
    return table


def coloured(state: State | str) -> RenderableType:
    """A state in its colour."""
    from rich.text import Text  # noqa: PLC0415 - as above

    return Text(str(state), style=_COLOURS[str(state)])


def put_job(row: Shown) -> None:
    """Print one job with all its keys, one line each."""
    facts = [("state", row.state.value)]
    for key, value in {**row.document, "file": row.place}.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        facts.append((for_people(key), "" if value is None else text))
    put_facts(facts)


def pause_in_words(pause: Pause, now: float) -> str:
    """A pause, for people."""
    end = "until briter-worker resume" if pause.until is None else f"for {span(pause.until - now)}"
    return f"paused {end}" + (f": {for_people(pause.reason)}" if pause.reason else "")


def put_finding(finding: Finding) -> None:
    """Print one finding of the doctor's."""
    if not is_terminal():
        put_columns([(finding.state.value, finding.check, finding.message, finding.fix or "")])
        return
    from rich.text import Text  # noqa: PLC0415 - as above

    style = _COLOURS[finding.state.value]
    text = Text.assemble((f"{_MARKS[finding.state.value]} ", style), (f"{finding.check}: ", "bold"))
    text.append(finding.message)
    if finding.fix:
        text.append(f"\n  fix: {finding.fix}", style=style)
    put_rich(text)


def put_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one line each."""
    if is_terminal():
        from rich.table import Table  # noqa: PLC0415 - as above
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in facts:
            table.add_row(name, Text(for_people(value) or NOTHING))
        put_rich(table)
    else:
        put_columns(facts)


def _due(row: Shown, now: float) -> float | None:
    """When it is tried next; None when that is now, or never."""
    if row.state.value in {"scheduled", "retrying"}:
        return row.job.due_at(now, float("inf"))
    return None


def _moment(seconds: float | None) -> str:
    from briter_worker.job import format_time  # noqa: PLC0415 - pydantic is slow to load

    return "" if seconds is None else format_time(seconds)


def ago(seconds: float) -> str:
    """A span of time as a person says it: `in 3 h` ahead, `3 h ago` behind."""
    text = span(abs(seconds))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def span(seconds: float) -> str:
    """A length of time in its largest unit."""
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds / _HOUR:.0f} h"
    return f"{seconds / _DAY:.0f} days"
