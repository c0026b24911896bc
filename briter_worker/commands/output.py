"""Every word that a command prints: columns into a pipe, tables on a terminal, messages on standard error."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

from briter_worker.events import Progress
from briter_worker.job import ago, encode_document, format_time, span
from briter_worker.redaction import one_line, quote_fix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from briter_worker.cluster.sites import Site, SiteSummary
    from briter_worker.cluster.sites_file import Differences
    from briter_worker.cluster.tokens import ApiToken
    from briter_worker.doctor import Finding
    from briter_worker.git.pull import PullResult
    from briter_worker.ports import ListedJob, Pause
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import Moment, Receipt
    from briter_worker.status import SiteStatus

_EMPTY = "-"
_Cell = str | int | float | None
_STYLES = {
    "pending": "cyan",
    "scheduled": "blue",
    "retrying": "yellow",
    "quiet": "cyan",
    "tried": "cyan",
    "claimed": "green",
    "failed": "red",
    "published": "green",
    "nochange": "dim",
    "dead-lettered": "red",
    "nopaths": "red",
}
"""By state of a job, and by outcome of an attempt."""
_MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
_PHASES = {
    "stage": "reading files",
    "commit": "writing commits",
    "push": "pushing",
    "settle": "storing receipts",
}
"""By phase of a drain."""
_WIDE_COLUMNS = 100
"""Width of a terminal with room for job ids. Every command takes the slug, too."""
_SHORT_COMMIT = 10
_MAX_LOCAL_COMMITS = 5


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """Print the text. A reader that has closed the pipe (`| head`) is not an error."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        error.filename = "standard output"
        raise


def report(message: str, fix: str = "") -> None:
    """Print the message and its fix as one line to standard error."""
    if sys.stderr is None:
        return
    text = quote_fix(message)
    text = f"{text.rstrip('.')}. Fix: {fix}" if fix else text
    try:
        sys.stderr.write(f"briter-worker: {one_line(text)}\n")
        sys.stderr.flush()
    except OSError:
        pass


def discard_unwritten() -> None:
    """Drop what could not be printed: Python exits with 120 if it cannot flush at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


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


def write_columns(rows: Iterable[Sequence[str]]) -> None:
    """Print one line per row, with tabs between the cells. A cell contains no tab and no line feed."""
    write("".join("\t".join(one_line(cell) or _EMPTY for cell in row) + "\n" for row in rows))


def write_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one line each."""
    if not is_terminal():
        write_columns(facts)
        return
    width = max(len(name) for name, _ in facts)
    write("\n".join(f"{name:{width}}  {quote_fix(one_line(value)) or _EMPTY}" for name, value in facts))


def _write_table(headings: Sequence[str], rows: Sequence[Sequence[_Cell]], now: float, empty: str) -> None:
    """Print rows as columns into a pipe, as a table on a terminal.

    A float is a point in time. The cells from the last heading on are a message and its fix, shown as one.
    """
    if not is_terminal():
        write_columns([_plain(cell) for cell in row] for row in rows)
        return
    if not rows:
        write(empty)
        return
    from rich.console import Console  # noqa: PLC0415 - a worker prints no table
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    console = Console(file=io.StringIO(), force_terminal=True)
    is_narrow = console.width < _WIDE_COLUMNS
    shown = [index for index, heading in enumerate(headings[:-1]) if heading != "Job" or not is_narrow]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in (headings[index] for index in shown):
        table.add_column(heading, no_wrap=heading not in {"Post", "Job", "Site"}, overflow="fold")
    table.add_column(headings[-1], ratio=1, overflow="fold")
    for row in rows:
        cells = []
        for index in shown:
            cell = row[index]
            text = ago(cell - now) if isinstance(cell, float) else one_line(_plain(cell))
            is_state = headings[index] in {"State", "Outcome"}
            cells.append(Text(text, style=_STYLES.get(text.partition(" ")[0], "") if is_state else ""))
        message, *fixes = [one_line(str(cell)) for cell in row[len(headings) - 1 :] if cell] or [""]
        table.add_row(*cells, Text("\nFix: ".join([quote_fix(message), *fixes])))
    console.print(table)
    write(console.file.getvalue())  # type: ignore[attr-defined]


def _plain(cell: _Cell) -> str:
    return format_time(cell) if isinstance(cell, float) else "" if cell is None else str(cell)


# --- times


def pause_text(pause: Pause) -> str:
    """Return the pause as a sentence."""
    end = "briter-worker resume" if pause.until is None else format_time(pause.until)
    return f"paused until {end}" + (f": {one_line(pause.reason)}" if pause.reason else "")


# --- jobs and receipts


def write_jobs(rows: Sequence[ListedJob], now: float) -> None:
    """Print a table of jobs."""
    cells: list[list[_Cell]] = []
    for row in rows:
        job, state = row.job, row.state.value
        due = job.due_at(now, math.inf) if state in {"scheduled", "retrying", "quiet"} else None
        cells.append([state, job.slug, job.id, due, job.attempts, job.last_error, job.fix])
    _write_table(["State", "Post", "Job", "When", "Tries", "What happened"], cells, now, "No jobs.")


def write_job(row: ListedJob) -> None:
    """Print one job with all its keys, one line each."""
    facts = [("state", row.state.value)]
    for key, value in {**row.read(), "file": row.where}.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        facts.append((one_line(key), "" if value is None else text))
    write_facts(facts)


def job_text(row: ListedJob, now: float) -> str:
    """Return the state of a job, when it is due, and its last error."""
    due = row.job.due_at(now, math.inf)
    text = f"{row.state.value}, due {format_time(due)}" if due > now else row.state.value
    return f"{text}: {quote_fix(one_line(row.job.last_error))}" if row.job.last_error else text


def write_receipts(receipts: Sequence[Receipt], now: float) -> None:
    """Print a table of receipts."""
    cells: list[list[_Cell]] = []
    for each in receipts:
        outcome = f"{each.outcome}{' (dry run)' if each.dry_run else ''}"
        commit = each.commit and (each.commit[:_SHORT_COMMIT] if is_terminal() else each.commit)
        row = [each.ended, outcome, each.slug, each.job_id, each.attempt or None, commit]
        row += [each.error or changes_text(each), each.fix]
        cells.append(row)
    headings = ["When", "Outcome", "Post", "Job", "Try", "Commit", "What happened"]
    _write_table(headings, cells, now, "No receipts yet.")


def changes_text(receipt: Receipt) -> str:
    """Return how many files and lines a publication changed, and what its commit is signed with."""
    number = receipt.files_changed
    text = f"{number} file{'s' if number > 1 else ''}" if number else ""
    if counted := [each for each in receipt.changes if each.added is not None]:
        text += f", +{sum(each.added or 0 for each in counted)} -{sum(each.removed or 0 for each in counted)}"
    return text + (f", signed with {receipt.signed_with}" if receipt.signed_with else "")


def write_changes(receipt: Receipt) -> None:
    """Print the files of a publication, with their lines added and removed."""
    write_columns(["changed", f"+{each.added} -{each.removed}", each.path] for each in receipt.changes)


def write_actions(moments: Sequence[Moment], slug: str | None, *, as_json: bool) -> None:
    """Print who steered which jobs, or those of one post, in the last days."""
    found = [each.data for each in moments if slug in (None, each.data.get("slug"))]
    keys = ("time", "by", "action", "slug", "jobId")
    rows = [[str(each.get(key, "")) for key in keys] for each in found]
    answer(found, lambda: write_columns(rows), as_json=as_json)


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
    """Return an entry of the log as a line for a person."""
    if entry["event"] == Progress.name:
        number = f", {entry['done']} of {entry['total']}" if entry["total"] > 1 else ""
        return f"         {_PHASES[entry['phase']]}{number} …"
    left = {key: value for key, value in entry.items() if key not in {"level", "jobId", "attempt", "once"}}
    if left["event"] == "condition":
        left.setdefault("condition", "publishing works again")
    moment, event, fix = left.pop("time")[11:19], left.pop("event"), left.pop("fix", "")
    mark = " (dry run)" if left.pop("dryRun", False) else ""
    texts = [f"{event}{mark}", *(str(left.pop(key)) for key in ("site", "slug", "commit") if key in left)]
    texts += [quote_fix(str(left.pop(key))) for key in ("message", "condition", "error") if key in left]
    texts += [f"in {value} ms" if key == "durationMs" else f"{key} {value}" for key, value in left.items()]
    return one_line(f"{moment} {' '.join(texts)}") + (f"\n         Fix: {one_line(fix)}" if fix else "")


# --- status, doctor, pull


def write_status(status: SiteStatus) -> None:
    """Print the status of a site."""
    facts = [("state", status.headline().text)]
    for state, count in status.jobs.items():
        since = status.oldest[state]
        facts.append((state, str(count) if since is None else f"{count}, the oldest saved {ago(-since)}"))
    due = status.next_due_in
    where = f"{status.worktree} to " if status.worktree else ""
    write_facts(
        [
            *facts,
            ("next due", "" if due is None else ago(due)),
            ("worker", _worker_text(status)),
            *([("paused", pause_text(status.paused))] if status.paused else []),
            ("condition", status.condition or "no problem is known"),
            *([("fix", status.fix)] if status.fix else []),
            *_local_commits(status),
            ("quarantine", str(status.quarantined)),
            *((f"not a job: {name}", reason) for name, reason in status.stuck.items()),
            ("mode", "dry run: nothing reaches the remote" if status.dry_run else "live"),
            ("publishes", f"{where}{status.branch} on {status.remote}"),
            ("queue", status.queue),
        ]
    )


def _worker_text(status: SiteStatus) -> str:
    if status.hosts is not None:
        return f"{status.hosts} nodes of the cluster" if status.hosts else "no node of the cluster runs"
    if status.worker is None:
        return "none"
    return f"PID {status.worker.pid}" if status.worker.alive else "none; the last one died"


def _local_commits(status: SiteStatus) -> list[tuple[str, str]]:
    from briter_worker.status import PULL_COMMAND  # noqa: PLC0415 - its imports are needed for few commands

    if not (commits := status.local_commits):
        return []
    shown = [f"{sha[:_SHORT_COMMIT]} {subject}" for sha, subject in commits[:_MAX_LOCAL_COMMITS]]
    more = len(commits) - len(shown)
    listed = "; ".join(shown) + (f"; and {more} more" if more else "")
    return [("local commits", f"{listed} (not on {status.remote})"), ("fix", PULL_COMMAND)]


def write_finding(finding: Finding) -> None:
    """Print one finding of the doctor."""
    state = finding.state.value
    if not is_terminal():
        write_columns([(state, finding.check, finding.message, finding.fix or "")])
        return
    fix = f"\n  Fix: {finding.fix}" if finding.fix else ""
    write(f"{_MARKS[state]} {finding.check}: {quote_fix(finding.message)}{fix}")


def write_pull(result: PullResult, settings: Settings) -> None:
    """Print the result of `pull`."""
    done = "rebased and pushed" if result.is_pushed else "rebased"
    for each in result.rebased:
        write(f"{done}: {each.commit[:_SHORT_COMMIT]} {one_line(each.subject)}")
    if result.late_reason:
        report(f"the local branch follows later: {one_line(result.late_reason)}")
    else:
        write(f"{settings.git_branch} has what {settings.git_remote} has ({result.tip[:_SHORT_COMMIT]})")


# --- the sites of a cluster


def write_site(site: Site) -> None:
    """Print the registration of a site."""
    credentials = site.credentials or {}
    write_facts(
        [
            ("site", site.name),
            ("publishes to", f"{site.branch} on {site.remote}"),
            ("adapter", site.adapter),
            ("also allowed", ", ".join(site.allowed)),
            ("credential", ", ".join(f"{key} {value}" for key, value in credentials.items())),
            *((key, str(value)) for key, value in site.settings.items()),
            ("changed by", site.changed_by),
            *([("paused", pause_text(site.paused))] if site.paused else []),
        ]
    )


def write_sites(rows: Sequence[SiteSummary]) -> None:
    """Print a table of the sites and their jobs."""
    cells: list[list[_Cell]] = [
        [row.name, row.waiting, row.jobs["claimed"], row.jobs["failed"], row.site.remote] for row in rows
    ]
    empty = "No sites yet. Add one: briter-worker site add NAME --remote URL"
    _write_table(["Site", "Waiting", "In flight", "Failed", "Remote"], cells, 0.0, empty)


def write_tokens(tokens: Sequence[ApiToken]) -> None:
    """Print a table of the API tokens."""
    cells: list[list[_Cell]] = [
        [
            each.name,
            ", ".join(each.rights),
            ", ".join(each.sites),
            each.created_by,
            format_time(each.created_at),
        ]
        for each in tokens
    ]
    empty = "No tokens yet. Create one: briter-worker token create NAME --site SITE"
    _write_table(["Token", "Rights", "Sites", "Created by", "Created"], cells, 0.0, empty)


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
        lines.append(f"{changes.undeclared} sites are not in the file, and stay; --prune removes them")
    write("\n".join(map(one_line, lines)))


def _as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
