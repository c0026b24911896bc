"""What many publications leave in a repository."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.lab import daemon, say, wait_for
from benchmarks.report import Check, Plot, Section, Series

if TYPE_CHECKING:
    from benchmarks.lab import Lab, Site

_WHAT = """\
{saves:,} posts saved one after the other in a site of {posts} posts, each when the one before is \
published, so that the service never rests; then nothing for a while. Packs and loose objects by \
`git count-objects -v`. {wanted:,} are wanted; after {minutes:.0f} minutes it ends where it is."""
_POSTS = 100
_REST = 90.0
_LOOK = 20
_TELL = 500
_LONGEST = 480.0
"""Seconds for the saves, so that all benchmarks end within the hour also on a slow machine."""


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    wanted = 200 if lab.scale.quick else 10_000
    packs: list[float] = []
    loose: list[float] = []
    with lab.site(_POSTS) as site, daemon(site) as process:
        say(f"growth, {wanted:,} saves, or as many as {_LONGEST / 60:.0f} minutes allow")
        first = _counted(site)["size-pack"] / 1024
        began = time.monotonic()
        saves = 0
        while saves < wanted and time.monotonic() - began < _LONGEST:
            number = saves
            site.edit(number % _POSTS)
            partial = site.save(number % _POSTS)
            partial.rename(partial.with_suffix(".json"))
            wait_for(process, "published")
            saves += 1
            if number % _TELL == _TELL - 1:
                say(f"growth, {saves:,} saves after {time.monotonic() - began:.0f} s, {packs[-1]:.0f} packs")
            if number % _LOOK == 0:
                _count(site, packs, loose)
        took = time.monotonic() - began
        say("growth, at rest")
        deadline = time.monotonic() + _REST
        rested: list[float] = []
        while time.monotonic() < deadline and not (rested and rested[-1] <= 30):  # noqa: PLR2004 - upkeep's own
            time.sleep(1)
            _count(site, rested, loose)
        size = _counted(site)["size-pack"] / 1024
    return Section(
        f"Growth: {saves:,} publications",
        _WHAT.format(saves=saves, posts=_POSTS, wanted=wanted, minutes=_LONGEST / 60),
        [
            Check("packs at most", max(packs), "", 1_000),
            Check("packs after a rest", rested[-1], "", 30),
            Check("loose objects at most", max(loose), "", 5_000),
        ],
        [
            Series("packs", "", packs),
            Series("loose objects", "", loose),
            Series("packs after a rest", "", rested[-1:]),
            Series("size of all packs", "MiB", [size]),
            Series("a save, the next one at once", "ms", [1000 * took / saves]),
        ],
        _extrapolated(saves, wanted, took, size, (size - first) / saves),
        plots=[
            Plot(
                "bench-growth",
                "What the site's repository keeps while it never rests",
                "publications",
                "number",
                {
                    "packs": _every(packs),
                    "loose objects": _every(loose[: len(packs)]),
                },
            )
        ],
    )


def _extrapolated(saves: int, wanted: int, took: float, size: float, growth: float) -> list[str]:
    """What was not measured is said to be so."""
    if saves == wanted:
        return []
    minutes, mebibytes = took / saves * wanted / 60, size + growth * (wanted - saves)
    note = (
        f"growth: {saves:,} of {wanted:,} saves were done in {took / 60:.1f} minutes. At that pace all take "
        f"{minutes:.0f} minutes, and with {1024 * growth:.1f} KiB a save the packs have {mebibytes:.0f} MiB "
        "then; this is reckoned, not measured. Packs and loose objects at most are those of what was done: "
        "they rise and fall with each rolling up, as the plot shows."
    )
    return [note]


def _every(counted: list[float]) -> list[tuple[float, float]]:
    return [(_LOOK * number, value) for number, value in enumerate(counted)]


def _count(site: Site, packs: list[float], loose: list[float]) -> None:
    counted = _counted(site)
    packs.append(counted["packs"])
    loose.append(counted["count"])


def _counted(site: Site) -> dict[str, float]:
    lines = site.git("count-objects", "-v").splitlines()
    return {key: float(value) for key, _, value in (line.partition(": ") for line in lines)}
