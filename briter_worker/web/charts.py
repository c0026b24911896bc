"""Charts of the last day and month as inline SVG, without JavaScript, each also readable as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.web.labels import day_of, local, span, utc_offset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.sinks.history import Bucket, History

WIDTH, HEIGHT, LEFT = 720, 220, 52
_BOTTOM, _TOP = 26, 10
_ROOM = float(HEIGHT - _BOTTOM - _TOP)
_HOUR_S, _DAY_S = 3600.0, 86400.0
_GOOD = ("published", "nochange")
_BAD = ("dead-lettered", "nopaths", "quarantined")
_TICKS_S = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 7 * 86400)


@dataclass(frozen=True, slots=True)
class Column:
    """Figures of one hour or day."""

    label: str
    full: str
    published: int = 0
    failed: int = 0
    median: float | None = None
    slowest: float | None = None
    """95th percentile of the time from save to remote, in seconds."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The last 24 hours by hour, and the last 30 days by day."""

    day: Sequence[Column]
    month: Sequence[Column]


def read_figures(history: History, now: float) -> Figures:
    """Summarize the history."""

    def hour(began: float) -> tuple[str, str]:
        text = f"{local(began):%H:%M}"
        return text, f"{day_of(began)}, {text}"

    def day(began: float) -> tuple[str, str]:
        noon = began + _DAY_S / 2  # with a daylight-saving change, a day does not begin at midnight
        return day_of(noon, short=True), day_of(noon)

    return Figures(_columns(history, now, _HOUR_S, 24, hour), _columns(history, now, _DAY_S, 30, day))


def _columns(
    history: History, now: float, width: float, number: int, labels: Callable[[float], tuple[str, str]]
) -> Sequence[Column]:
    ahead = utc_offset(now)
    first = (math.floor((now + ahead) / width) - number + 1) * width - ahead
    buckets: dict[int, Bucket] = {
        round((bucket.began - first) / width): bucket for bucket in history.throughput(first, width)
    }
    return [_column(buckets.get(index), *labels(first + index * width)) for index in range(number)]


def _column(bucket: Bucket | None, label: str, full: str) -> Column:
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
class Tick:
    """A grid line, or a label below the chart."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """All that the template draws."""

    bars: Sequence[Bar]
    rows: Sequence[Tick]
    labels: Sequence[Tick]


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
    parts = 4 if top % 4 == 0 else 5 if top % 5 == 0 else top if top < 4 else 2  # noqa: PLR2004
    ticks = [top * part // parts for part in range(1, parts + 1)]
    return Chart(bars, [Tick(_y(tick / top), str(tick)) for tick in ticks], _labels(columns))


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
    return Chart(bars, [Tick(_y(share(tick)), span(tick)) for tick in chosen], _labels(columns))


def _bar(index: int, number: int, low: float, high: float, kind: str, title: str) -> Bar:
    """Return the bar of one column, from `low` to `high` as shares of the chart's height."""
    step = (WIDTH - LEFT) / number
    x = round(LEFT + index * step + step * 0.14, 1)
    return Bar(x, _y(high), round(step * 0.72, 1), round((high - low) * _ROOM, 1), kind, title)


def _y(share: float) -> float:
    return round(HEIGHT - _BOTTOM - share * _ROOM, 1)


def _labels(columns: Sequence[Column]) -> list[Tick]:
    step = (WIDTH - LEFT) / len(columns)
    every = math.ceil(len(columns) / 6)
    return [
        Tick(round(LEFT + (index + 0.5) * step, 1), column.label)
        for index, column in enumerate(columns)
        if index % every == 0
    ]


def _round_up(number: int) -> int:
    power = int(10 ** (len(str(number)) - 1))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= number)
