"""Plots as inline SVG, drawn here: no script, and readable as a table, too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from briter_worker.web.words import clock, day_of, offset, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.sinks.history.reading import Bucket, History

HOUR, DAY = 3600.0, 86400.0
WIDTH, HEIGHT = 720, 220
LEFT, _BOTTOM, _TOP = 52, 26, 10
_GOOD = ("published", "nochange")
_BAD = ("dead-lettered", "nopaths", "quarantined")
_STEPS = (1, 2, 5)
_SECONDS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 7 * 86400)


@dataclass(frozen=True, slots=True)
class Column:
    """One span of time."""

    label: str
    full: str
    published: int = 0
    failed: int = 0
    median: float | None = None
    slowest: float | None = None
    """The wait that 95 of 100 authors stay below."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A day by hours, and a month by days."""

    day: Sequence[Column] = ()
    month: Sequence[Column] = ()


def figures_of(history: History, now: float) -> Figures:
    """Count what the history holds."""
    return Figures(
        _columns(history, now, HOUR, 24, lambda began: (clock(began), f"{day_of(began)}, {clock(began)}")),
        # By its noon: where the clocks have changed since, a day does not begin at midnight.
        _columns(
            history,
            now,
            DAY,
            30,
            lambda began: (day_of(began + DAY / 2, short=True), day_of(began + DAY / 2)),
        ),
    )


def _columns(
    history: History, now: float, width: float, number: int, names: Callable[[float], tuple[str, str]]
) -> Sequence[Column]:
    # Hours and days begin when the server's own do, as everywhere on the pages.
    ahead = offset(now)
    first = (math.floor((now + ahead) / width) - number + 1) * width - ahead
    known: dict[int, Bucket] = {
        round((bucket.began - first) / width): bucket for bucket in history.throughput(first, width)
    }
    columns = []
    for index in range(number):
        label, full = names(first + index * width)
        bucket = known.get(index)
        if bucket is None:
            columns.append(Column(label, full))
            continue
        columns.append(
            Column(
                label,
                full,
                sum(bucket.outcomes.get(word, 0) for word in _GOOD),
                sum(bucket.outcomes.get(word, 0) for word in _BAD),
                _quantile(bucket.waits, 0.5),
                _quantile(bucket.waits, 0.95),
            )
        )
    return columns


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
    """A line of the grid, or a word below the plot."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """All that the template draws."""

    bars: Sequence[Bar]
    rows: Sequence[Tick]
    words: Sequence[Tick]


def throughput(columns: Sequence[Column]) -> Plot | None:
    """How many posts went live, and how many need a hand; None when there were none."""
    most = max((column.published + column.failed for column in columns), default=0)
    if not most:
        return None
    top = _round_up(most)
    bars = []
    for index, column in enumerate(columns):
        x, width = _place(index, len(columns))
        title = f"{column.full}: {column.published} published, {column.failed} failed"
        base = float(HEIGHT - _BOTTOM)
        for kind, count in (("good", column.published), ("bad", column.failed)):
            if count:
                height = count / top * _room()
                base -= height
                bars.append(Bar(round(x, 1), round(base, 1), round(width, 1), round(height, 1), kind, title))
    rows = [Tick(_y(count / top), str(count)) for count in _even(top)]
    return Plot(bars, rows, _words(columns))


def waits(columns: Sequence[Column]) -> Plot | None:
    """How long authors waited, by a scale that shows seconds and hours; None when nobody did."""
    longest = max((column.slowest or 0.0 for column in columns), default=0.0)
    if not any(column.slowest is not None for column in columns):
        return None
    top = next((each for each in _SECONDS if each >= longest), longest)

    def share(seconds: float) -> float:
        return math.log1p(seconds) / math.log1p(top)

    bars = []
    for index, column in enumerate(columns):
        if column.median is None or column.slowest is None:
            continue
        x, width = _place(index, len(columns))
        title = f"{column.full}: half within {span(column.median)}, 95 of 100 within {span(column.slowest)}"
        for kind, seconds in (("slow", column.slowest), ("good", column.median)):
            height = max(2.0, share(seconds) * _room())
            y = HEIGHT - _BOTTOM - height
            bars.append(Bar(round(x, 1), round(y, 1), round(width, 1), round(height, 1), kind, title))
    shown = [each for each in _SECONDS if each <= top]
    chosen = [each for number, each in enumerate(reversed(shown)) if number % math.ceil(len(shown) / 5) == 0]
    return Plot(bars, [Tick(_y(share(each)), span(each)) for each in chosen], _words(columns))


def _room() -> float:
    return float(HEIGHT - _BOTTOM - _TOP)


def _y(share: float) -> float:
    return round(HEIGHT - _BOTTOM - share * _room(), 1)


def _place(index: int, number: int) -> tuple[float, float]:
    step = (WIDTH - LEFT) / number
    return LEFT + index * step + step * 0.14, step * 0.72


def _words(columns: Sequence[Column]) -> list[Tick]:
    every = math.ceil(len(columns) / 6)
    ticks = []
    for index, column in enumerate(columns):
        if index % every == 0:
            x, width = _place(index, len(columns))
            ticks.append(Tick(round(x + width / 2, 1), column.label))
    return ticks


def _round_up(count: int) -> int:
    power = int(10 ** (len(str(count)) - 1))
    return next(step * power for step in (*_STEPS, 10) if step * power >= count)


def _even(top: int) -> list[int]:
    parts = 4 if top % 4 == 0 else 5 if top % 5 == 0 else top if top < 4 else 2  # noqa: PLR2004
    return [top * part // parts for part in range(1, parts + 1)]
