"""Every word that a command prints: columns into a pipe, tables on a terminal, messages on standard error."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from briter_worker.commands import is_terminal, write
from briter_worker.errors import one_line, quote_fix
from briter_worker.events import ConditionChanged, Progress, Steered
from briter_worker.job import LATEST, ago, count, encode_document, format_time, parse_time, span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from briter_worker.cluster.sites_file import Differences
    from briter_worker.doctor import Finding
    from briter_worker.ports import ListedJob, Pause
    from briter_worker.sinks.history import Receipt
    from briter_worker.status import SiteStatus

_EMPTY = "-"
_STYLES = {
    **dict.fromkeys(("failed", "dead-lettered", "nopaths"), "red"),
    **dict.fromkeys(("published", "claimed"), "green"),
    **dict.fromkeys(("pending", "quiet", "tried"), "cyan"),
    "retrying": "yellow",
    "scheduled": "blue",
}
"""By state of a job, and by outcome of an attempt."""
_WIDE_COLUMNS = 100
"""Width of a terminal with room for job ids. Every command takes the slug, too."""
_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
_PHASES = {
    "stage": "reading files",
    "commit": "writing commits",
    "push": "pushing",
    "settle": "storing receipts",
}
"""By phase of a drain."""
_SHORT_COMMIT = 10


_as_json = partial(json.dumps, ensure_ascii=False)


def write_json(value: object) -> None:
    """Print the value as JSON, with escapes for what a terminal could obey."""
    write(encode_document(value).decode())  # type: ignore[arg-type]  # any JSON value


def answer(value: object, text: str | Callable[[], None], *, as_json: bool) -> None:
    """Print the value as JSON for programs; for people, the text or what the function prints."""
    if as_json:
        write_json(value)
    elif isinstance(text, str):
        write(text)
    else:
        text()


def write_rows(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), *, empty: str = "", has_fix: bool = False
) -> None:
    """Print rows: with tabs between the cells into a pipe, as a table on a terminal.

    With `has_fix`, the last cell of a row is the fix for what the cell before says.
    """
    lines = [["" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
    if not is_terminal():
        write("".join("\t".join(cell or _EMPTY for cell in line) + "\n" for line in lines))
        return
    if not lines:
        write(empty)
        return
    from rich.console import Console  # noqa: PLC0415 - a worker prints no table
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console, names = Console(), headings or ["" for _ in lines[0]]
    shown = [i for i, name in enumerate(names) if name != "Job" or console.width >= _WIDE_COLUMNS]
    table = Table(box=None, show_header=bool(headings), header_style="bold", pad_edge=False)
    for name in (names[i] for i in shown):
        table.add_column(name, no_wrap=name not in {"Post", "Job", "Site", names[-1]}, overflow="fold")
    styles = _STYLES if headings else {}
    for line in lines:
        fix = line.pop() if has_fix else ""
        said = quote_fix(line.pop()) or _EMPTY
        line.append(f"{said}\nFix: {fix}" if fix else said)
        table.add_row(*(Text(line[i], styles.get(line[i].partition(" ")[0], "")) for i in shown))
    console.print(table)


def _when(seconds: float | None, now: float) -> str:
    """Return a time: its distance for people, ISO-8601 for programs."""
    if seconds is None:
        return ""
    return ago(seconds - now) if is_terminal() else format_time(seconds)


# --- times


def _local(seconds: float, form: str = "%-d %b, %H:%M:%S") -> str:
    """Return a time as a clock on the wall of this machine shows it."""
    return f"{datetime.fromtimestamp(min(seconds, LATEST), UTC).astimezone():{form}}"


def pause_text(pause: Pause) -> str:
    """Return the pause as a sentence."""
    return f"paused {_pause_end(pause)}"


def _pause_end(pause: Pause) -> str:
    end = "briter-worker resume"
    if pause.until is not None:
        end = _local(pause.until) if is_terminal() else format_time(pause.until)
    return f"until {end}" + (f": {one_line(pause.reason)}" if pause.reason else "")


# --- jobs and receipts


def write_jobs(rows: Sequence[ListedJob], now: float) -> None:
    """Print a table of jobs."""
    cells = []
    for row in rows:
        job, state = row.job, row.state.value
        due = job.due_at(now, math.inf) if state in {"scheduled", "retrying", "quiet"} else None
        cells.append((state, job.slug, job.id, _when(due, now), job.attempts, job.last_error, job.fix))
    headings = ("State", "Post", "Job", "When", "Tries", "What happened")
    write_rows(cells, headings, empty="No jobs.", has_fix=True)


def write_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one line each."""
    write_rows((name, _as_text(value)) for name, value in facts.items())


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return _as_json(value)


def job_text(row: ListedJob, now: float) -> str:
    """Return the state of a job, when it is due, and its last error."""
    due, text = row.job.due_at(now, math.inf), row.state.value
    if due > now:
        text += f", due {_local(due) if is_terminal() else format_time(due)}"
    return f"{text}: {quote_fix(one_line(row.job.last_error))}" if row.job.last_error else text


def write_receipts(receipts: Sequence[Receipt], now: float) -> None:
    """Print a table of receipts."""
    cells = []
    for each in receipts:
        outcome = f"{each.outcome}{' (dry run)' if each.dry_run else ''}"
        commit = each.commit and (each.commit[:_SHORT_COMMIT] if is_terminal() else each.commit)
        row = (_when(each.ended, now), outcome, each.slug, each.job_id, each.attempt, commit)
        cells.append((*row, each.error or _changes_text(each), each.fix))
    headings = ("When", "Outcome", "Post", "Job", "Try", "Commit", "What happened")
    write_rows(cells, headings, empty="No receipts yet.", has_fix=True)


def _changes_text(receipt: Receipt) -> str:
    """Return how many files and lines a publication changed, what it left out, and its signature."""
    number = receipt.files_changed
    text = f"{number} file{'s' if number > 1 else ''}" if number else ""
    if counted := [each for each in receipt.changes if each.added is not None]:
        text += f", +{sum(each.added or 0 for each in counted)} -{sum(each.removed or 0 for each in counted)}"
    if number := len(receipt.rejected_paths):
        text += f", without {number} declared path{'s' if number > 1 else ''}"
    return text + (f", signed with {receipt.signed_with}" if receipt.signed_with else "")


def progress_text(receipt: Receipt) -> str:
    """Return how far an attempt is, such as `push 40 %`."""
    if receipt.total and receipt.done < receipt.total:
        return f"{receipt.phase} {receipt.done * 100 // receipt.total} %"
    return str(receipt.phase or "in flight")


def receipt_text(receipt: Receipt) -> str:
    """Return the outcome of an attempt, with the commit or the error."""
    text = f"{receipt.outcome}{' (dry run)' if receipt.dry_run else ''}"
    if receipt.commit:
        text += f" as {receipt.commit} on {receipt.branch} of {receipt.remote}"
    waited = receipt.save_to_remote
    if waited is not None:
        text += f", {span(waited)} after it was {'due' if receipt.due_at else 'saved'}"
    if receipt.href:
        text += f": {one_line(receipt.href)}"
    return f"{text}: {quote_fix(one_line(receipt.error))}" if receipt.error else text


def event_text(entry: dict[str, Any]) -> str:
    """Return an entry of the log as a line for a user; with a second line if the entry has a fix."""
    if entry["event"] == Progress.name:
        number = f", {entry['done']} of {entry['total']}" if entry["total"] > 1 else ""
        return f"         {_PHASES[entry['phase']]}{number} …"
    now = parse_time(entry["time"])
    texts = [_headline(entry)]
    texts += [str(entry[key]) for key in ("site", "slug", "commit") if key in entry]
    texts += [quote_fix(str(entry[key])) for key in ("message", "condition", "error") if key in entry]
    for key, value in entry.items():
        if key not in _SHOWN_APART:
            texts.append(_detail(key, value, now))
    line = one_line(f"{_local(now, '%H:%M:%S')} {' '.join(texts)}")
    if not entry.get("fix"):
        return line
    return f"{line}\n         Fix: {one_line(entry['fix'])}"


def _headline(entry: dict[str, Any]) -> str:
    """Return what happened: the name of the event, or the action of a user."""
    event = str(entry["event"])
    if event == Steered.name:
        return str(entry["action"])
    if entry.get("dryRun"):
        event = f"{event} (dry run)"
    if entry["event"] == ConditionChanged.name and "condition" not in entry:
        return f"{event} publishing works again"
    return event


_SHOWN_APART = frozenset(
    (
        *("time", "level", "event", "jobId", "attempt", "once", "dryRun", "fix", "action"),
        *("site", "slug", "commit", "message", "condition", "error"),
    )
)
"""Keys of an entry that `event_text` shows in a place of their own, or not at all."""
_DETAILS = {
    "durationMs": "in {} ms",
    "rejectedPaths": "without {}",
    "paths": "{}",
    "signedWith": "signed with {}",
    "supersededBy": "by job {}",
    "failure": "({})",
    "pid": "as PID {}",
    "holderPid": "(PID {})",
    "signal": "by {}",
    "reason": "({})",
    "file": "kept as {}",
}
"""Formats of values, by key. Other entries are shown as `key value`."""


def _detail(key: str, value: object, now: float) -> str:
    match key, value:
        case "retryAt", str():
            at = parse_time(value)
            return f"next try {ago(at - now)} ({_local(at)})"
        case "until", str():
            return f"until {_local(parse_time(value))}"
        case "drained", int():
            return f"after {count(value, 'completed job')}"
        case "total", int():
            return f"({count(value, 'file')})"
        case _, list():
            value = ", ".join(value)
    return _DETAILS.get(key, f"{key} {{}}").format(value)


# --- status, doctor, pull


def write_status(status: SiteStatus) -> None:
    """Print the status of a site."""
    rows: list[tuple[str, object]] = [("state", status.headline().text)]
    for state, number in status.jobs.items():
        since = status.oldest[state]
        rows.append((state, number if since is None else f"{number}, the oldest saved {ago(-since)}"))
    rows.append(("next due", _due_text(status)))
    rows.append(("worker", _worker_text(status)))
    if status.paused:
        rows.append(("paused", _pause_end(status.paused)))
    if status.condition:
        rows.append(("condition", status.condition))
    if status.fix:
        rows.append(("fix", status.fix))
    rows += _local_commits(status)
    rows.append(("quarantine", status.quarantined))
    rows += [(f"not a job: {name}", reason) for name, reason in status.stuck.items()]
    rows.append(("mode", "dry run: nothing reaches the remote" if status.dry_run else "live"))
    place = f"{status.worktree} to " if status.worktree else ""
    rows.append(("publishes", f"{place}{status.branch} on {status.remote}"))
    rows.append(("queue", status.queue))
    write_rows(rows)


def _due_text(status: SiteStatus) -> str:
    if status.next_due is None:
        return ""
    if status.paused is None:
        return ago(status.next_due - status.now)
    if status.paused.until is None:
        return "when publishing is resumed"
    return ago(max(status.next_due, status.paused.until) - status.now)


def _worker_text(status: SiteStatus) -> str:
    if status.hosts is not None:
        return "no node of the cluster runs" if status.hosts == 0 else f"{count(status.hosts, 'node')} run"
    if status.worker is None:
        return "none"
    return f"PID {status.worker.pid}" if status.worker.alive else "none; the last one died"


def _local_commits(status: SiteStatus) -> list[tuple[str, str]]:
    from briter_worker.status import PULL_COMMAND  # noqa: PLC0415 - its imports are needed for few commands

    if not (commits := status.local_commits):
        return []
    (sha, subject), number = commits[0], len(commits)
    text = f"{number}, the newest {sha[:_SHORT_COMMIT]} {subject} (not on {status.remote})"
    return [("local commits", text), ("fix", PULL_COMMAND)]


def write_finding(finding: Finding) -> None:
    """Print one finding of the doctor."""
    state = finding.state.value
    if not is_terminal():
        write_rows([(state, finding.check, finding.message, finding.fix)])
        return
    fix = f"\n  Fix: {finding.fix}" if finding.fix else ""
    write(f"{_MARKS[state]} {finding.check}: {quote_fix(finding.message)}{fix}")


# --- the sites of a cluster


def write_differences(changes: Differences, *, applied: bool) -> None:
    """Print one line per site that changes, and their numbers."""
    lines = [f"+ {site.name}: {site.branch} on {site.remote}" for site in changes.added]
    for name, keys in changes.changed.items():
        texts = (f"{key} {_as_json(old)} -> {_as_json(new)}" for key, (old, new) in keys.items())
        lines.append(f"~ {name}: {'; '.join(texts)}")
    lines += [f"- {name}" for name in changes.removed]
    numbers = f"{len(changes.added)} added, {len(changes.changed)} changed, {len(changes.removed)} removed"
    lines.append(f"{numbers}, {changes.unchanged} unchanged" + ("" if applied else "; nothing was done yet"))
    if changes.undeclared:
        lines.append(f"not in the file, and kept: {count(changes.undeclared, 'site')}; --prune removes them")
    write("\n".join(map(one_line, lines)))
