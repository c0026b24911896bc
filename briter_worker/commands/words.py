"""Receipts and progress as a person reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.errors import for_people
from briter_worker.job import format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from briter_worker.queues.steering import Shown
    from briter_worker.sinks.history.reading import Receipt

_SHORT = 10
_STYLES = {
    "published": "green",
    "nochange": "dim",
    "failed": "yellow",
    "dead-lettered": "red",
    "nopaths": "red",
}


def put_receipts(receipts: Sequence[Receipt], now: float) -> None:
    """A table on a terminal, columns in a pipe."""
    if views.is_terminal():
        views.put_rich(_table(receipts, now))
    else:
        views.put_columns(
            [
                "" if each.ended is None else format_time(each.ended),
                each.outcome or "",
                each.slug,
                each.job_id,
                str(each.attempt or ""),
                each.commit or "",
                each.error or "",
            ]
            for each in receipts
        )


def _table(receipts: Sequence[Receipt], now: float) -> RenderableType:
    from rich.table import Table  # noqa: PLC0415 - only a terminal pays for it
    from rich.text import Text  # noqa: PLC0415

    if not receipts:
        return Text("No receipts yet.", style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("When", "Outcome"):
        table.add_column(name, no_wrap=True)
    table.add_column("Post", overflow="fold")
    table.add_column("Commit", no_wrap=True)
    table.add_column("Took", justify="right", no_wrap=True)
    table.add_column("What happened", ratio=1, overflow="fold")
    for each in receipts:
        waited = each.save_to_remote
        table.add_row(
            "" if each.ended is None else views.ago(each.ended - now),
            Text(_outcome(each), style=_STYLES.get(each.outcome or "", "")),
            Text(for_people(each.slug)),
            (each.commit or "")[:_SHORT],
            "" if waited is None else views.span(waited),
            Text(for_people(each.error or each.href or "")),
        )
    return table


def _outcome(receipt: Receipt) -> str:
    return f"{receipt.outcome}{' (dry run)' if receipt.dry_run else ''}"


def progress_in_words(receipt: Receipt) -> str:
    """How far an attempt is, such as `push 40 %`."""
    if receipt.total and receipt.done < receipt.total:
        return f"{receipt.phase} {receipt.done * 100 // receipt.total} %"
    return str(receipt.phase or "in flight")


def row_in_words(row: Shown, now: float) -> str:
    """Where a job in the queue stands, and what became of its last attempt."""
    due = row.job.due_at(now, float("inf"))
    text = f"{row.state.value}, due {views.ago(due - now)}" if due > now else row.state.value
    return f"{text}: {for_people(row.job.last_error)}" if row.job.last_error else text


def receipt_in_words(receipt: Receipt) -> str:
    """What became of an attempt, with the proof."""
    text = _outcome(receipt)
    if receipt.commit:
        text += f" as {receipt.commit} on {receipt.branch} of {receipt.remote}"
    waited = receipt.save_to_remote
    if waited is not None:
        text += f", {views.span(waited)} after it was {'due' if receipt.due_at else 'saved'}"
    if receipt.href:
        text += f": {for_people(receipt.href)}"
    return f"{text}: {for_people(receipt.error)}" if receipt.error else text
