"""Charts of the last 30 days as inline SVG, without JavaScript, also readable as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.web.labels import day_of, span, utc_offset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.sinks.history import Bucket, History

WIDTH, HEIGHT, LEFT = 720, 220, 52
_BOTTOM, _TOP = 26, 10
_ROOM = float(HEIGHT - _BOTTOM - _TOP)
_DAY_S, _DAYS = 86400.0, 30
_GOOD = ("published", "nochange")
_BAD = ("dead-lettered", "nopaths", "quarantined")
_TICKS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 7 * 86400)


@dataclass(frozen=True, slots=True)
class Column:
    """Figures of one day."""

    label: str
    full: str
    published: int = 0
    failed: int = 0
    median: float | None = None
    slowest: float | None = None
    """95th percentile of the time from save to remote, in seconds."""


def read_figures(history: History, now: float) -> Sequence[Column]:
    """Summarize the history of the last 30 days, by day."""
    ahead = utc_offset(now)
    first = (math.floor((now + ahead) / _DAY_S) - _DAYS + 1) * _DAY_S - ahead
    buckets = {round((bucket.began - first) / _DAY_S): bucket for bucket in history.throughput(first, _DAY_S)}
    # With a daylight-saving change, a day does not begin at midnight; its noon is always in it.
    return [_column(buckets.get(day), first + (day + 0.5) * _DAY_S) for day in range(_DAYS)]


def _column(bucket: Bucket | None, noon: float) -> Column:
    label, full = day_of(noon, short=True), day_of(noon)
    if bucket is None:
        return Column(label, full)
    good, bad = (sum(bucket.outcomes.get(each, 0) for each in group) for group in (_GOOD, _BAD))
    return Column(label, full, good, bad, _quantile(bucket.waits, 0.5), _quantile(bucket.waits, 0.95))


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the template draws: bars, and the places of grid lines and labels with their texts."""

    bars: Sequence[Bar]
    rows: Sequence[tuple[float, str]]
    labels: Sequence[tuple[float, str]]


def throughput_chart(columns: Sequence[Column]) -> Chart | None:
    """Draw how many posts were published and failed; None if there were none."""
    most = max((column.published + column.failed for column in columns), default=0)
    if not most:
        return None
    top = _round_up(most)
    bars = []
    for index, column in enumerate(columns):
        title = f"{column.full}: {column.published} published, {column.failed} failed"
        below = 0
        for kind, number in (("good", column.published), ("bad", column.failed)):
            if number:
                bars.append(_bar(index, len(columns), below / top, (below + number) / top, kind, title))
                below += number
    ticks = [top] if top % 2 else [top // 2, top]
    return Chart(bars, [(_y(tick / top), str(tick)) for tick in ticks], _labels(columns))


def waits_chart(columns: Sequence[Column]) -> Chart | None:
    """Draw how long authors waited, on a logarithmic scale; None if nobody waited."""
    longest = max((column.slowest or 0.0 for column in columns), default=0.0)
    if all(column.slowest is None for column in columns):
        return None
    top = next((tick for tick in _TICKS_S if tick >= longest), longest)

    def share(seconds: float) -> float:
        return math.log1p(seconds) / math.log1p(top)

    bars = []
    for index, column in enumerate(columns):
        if column.median is None or column.slowest is None:
            continue
        title = f"{column.full}: median {span(column.median)}, 95th percentile {span(column.slowest)}"
        for kind, seconds in (("slow", column.slowest), ("good", column.median)):
            bars.append(_bar(index, len(columns), 0.0, max(2.0 / _ROOM, share(seconds)), kind, title))
    shown = [tick for tick in _TICKS_S if tick <= top]
    chosen = shown[:: -math.ceil(len(shown) / 5)]
    return Chart(bars, [(_y(share(tick)), span(tick)) for tick in chosen], _labels(columns))


def _bar(index: int, number: int, low: float, high: float, kind: str, title: str) -> Bar:
    """Return the bar of one column, from `low` to `high` as shares of the chart's height."""
    step = (WIDTH - LEFT) / number
    x = round(LEFT + index * step + step * 0.14, 1)
    return Bar(x, _y(high), round(step * 0.72, 1), round((high - low) * _ROOM, 1), kind, title)


def _y(share: float) -> float:
    return round(HEIGHT - _BOTTOM - share * _ROOM, 1)


def _labels(columns: Sequence[Column]) -> list[tuple[float, str]]:
    step = (WIDTH - LEFT) / len(columns)
    every = math.ceil(len(columns) / 6)
    return [
        (round(LEFT + (index + 0.5) * step, 1), column.label)
        for index, column in enumerate(columns)
        if index % every == 0
    ]


def _round_up(number: int) -> int:
    power = int(10 ** (len(str(number)) - 1))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= number)
