"""Draws curves as SVG: small, without a library, light or dark as the reader's own screen is."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from benchmarks.report import Plot

_WIDTH, _HEIGHT = 720, 400
_LEFT, _TOP, _BOTTOM = 64, 56, 52
_RIGHT = 500  # the names of the curves stand beyond
_COLOURS = ("#0969da", "#1a7f37", "#9a6700", "#cf222e", "#8250df", "#bf3989", "#57606a", "#953800")
_DARK = ("#58a6ff", "#3fb950", "#d29922", "#ff7b72", "#bc8cff", "#f778ba", "#8b949e", "#ffa657")
_GAP = 15
_FEW = 6
"""Up to so many sizes were measured, each stands at its axis."""
_MANY = 60
"""More points than this are drawn as a line alone."""

Point = tuple[float, float]


def draw(plot: Plot) -> str:
    """The plot as an SVG."""
    points = [point for curve in plot.curves.values() for point in curve]
    across, x_ticks = _axis([x for x, _ in points], _LEFT, _RIGHT, logarithmic="x" in plot.logarithmic)
    up, y_ticks = _axis(
        [y for _, y in points],
        _HEIGHT - _BOTTOM,
        _TOP,
        logarithmic="y" in plot.logarithmic,
        upright=True,
    )
    parts = [_text(_LEFT - 48, 20, plot.title, "title")]
    for tick in y_ticks:
        parts += [
            f'<path class="grid" d="M{_LEFT} {up(tick):.1f}H{_RIGHT}"/>',
            _text(_LEFT - 8, up(tick) + 4, _short(tick), "end"),
        ]
    parts += [_text(across(tick), _HEIGHT - _BOTTOM + 18, _short(tick), "middle") for tick in x_ticks]
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{_HEIGHT - _BOTTOM}H{_RIGHT}"/>')
    parts.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 14, plot.x, "middle"))
    parts.append(_text(_LEFT - 48, _TOP - 14, plot.y, ""))
    ends = {}
    for number, (name, curve) in enumerate(plot.curves.items()):
        places = [(across(x), up(y)) for x, y in sorted(curve)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line c{number}" points="{line}"/>')
        if len(places) <= _MANY:
            parts += [f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places]
        ends[name] = (number, places[-1][1])
    for name, (number, y) in _apart(ends):
        parts.append(_text(_RIGHT + 10, y + 4, name, f"name c{number}"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(plot.title)}">\n<style>\n{_style()}\n</style>\n'
        f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>\n{body}\n</svg>\n'
    )


def _style() -> str:
    def scheme(colours: Iterable[str], ground: str, text: str, grid: str) -> str:
        rules = [f".ground{{fill:{ground}}}text{{fill:{text}}}.grid,.axis{{stroke:{grid}}}"]
        for number, colour in enumerate(colours):
            rules.append(f".line.c{number}{{stroke:{colour}}}.dot.c{number},text.c{number}{{fill:{colour}}}")
        return "".join(rules)

    common = (
        "text{font:12px system-ui,sans-serif}.title{font-size:14px;font-weight:600}.end{text-anchor:end}"
        ".middle{text-anchor:middle}.line{fill:none;stroke-width:2}.grid{stroke-width:.5}.axis{fill:none}"
    )
    light = scheme(_COLOURS, "#ffffff", "#24292f", "#8c959f")
    dark = scheme(_DARK, "#0d1117", "#e6edf3", "#6e7681")
    return f"{common}\n{light}\n@media(prefers-color-scheme:dark){{{dark}}}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _axis(
    values: list[float], start: float, end: float, *, logarithmic: bool, upright: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands, and the values that are written beside the axis."""
    most = max(values)
    measured = sorted(set(values))
    if logarithmic and 1 < len(measured) <= _FEW and not upright:
        span = math.log10(most / measured[0])
        return lambda value: start + (end - start) * math.log10(value / measured[0]) / span, measured
    if logarithmic:
        first = math.floor(math.log10(min(values)))
        every = [factor * 10.0**power for power in range(first, first + 12) for factor in (1, 2, 5)]
        low = max(tick for tick in every if tick <= min(values) * 1.001)
        high = min(tick for tick in every if tick >= most * 0.999 and tick > low)
        span = math.log10(high / low)
        ticks = [tick for tick in every if low <= tick <= high]
        return lambda value: start + (end - start) * math.log10(value / low) / span, ticks
    step = 10.0 ** math.floor(math.log10(most or 1))
    step = next(each for each in (step / 5, step / 2, step, step * 2) if most / each <= 6)  # noqa: PLR2004
    high = step * max(1, math.ceil(most / step))
    return lambda value: start + (end - start) * value / high, [
        step * count for count in range(round(high / step) + 1)
    ]


def _apart(ends: dict[str, tuple[int, float]]) -> list[tuple[str, tuple[int, float]]]:
    """The names at their curves' ends, none over another."""
    placed: list[tuple[str, tuple[int, float]]] = []
    lowest = 0.0
    for name, (number, y) in sorted(ends.items(), key=lambda item: item[1][1]):
        lowest = max(y, lowest + _GAP)
        placed.append((name, (number, lowest)))
    return placed


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:g}"
