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
`git count-objects -v`."""
_POSTS = 100
_REST = 90.0
_LOOK = 20
_TELL = 200


def measure(lab: Lab) -> Section:
    """See `_WHAT`."""
    saves = 200 if lab.scale.quick else 10_000
    packs: list[float] = []
    loose: list[float] = []
    with lab.site(_POSTS) as site, daemon(site) as process:
        say(f"growth, {saves:,} saves one after the other")
        first = _counted(site)["size-pack"] / 1024
        began = time.monotonic()
        for number in range(saves):
            site.edit(number % _POSTS)
            partial = site.save(number % _POSTS)
            partial.rename(partial.with_suffix(".json"))
            wait_for(process, "published")
            if number % _LOOK == 0:
                _count(site, packs, loose)
            if number % _TELL == _TELL - 1:
                _tell(number + 1, saves, time.monotonic() - began, packs[-1])
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
        _WHAT.format(saves=saves, posts=_POSTS),
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
            Series("the packs' growth, a save", "KiB", [1024 * (size - first) / saves]),
            Series("a save, the next one at once", "ms", [1000 * took / saves]),
        ],
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


def _tell(done: int, saves: int, seconds: float, packs: float) -> None:
    left = seconds / done * (saves - done) / 60
    say(f"growth, {done:,} of {saves:,} saves, {packs:.0f} packs; {left:.0f} more minutes")


def _every(counted: list[float]) -> list[tuple[float, float]]:
    return [(_LOOK * number, value) for number, value in enumerate(counted)]


def _count(site: Site, packs: list[float], loose: list[float]) -> None:
    counted = _counted(site)
    packs.append(counted["packs"])
    loose.append(counted["count"])


def _counted(site: Site) -> dict[str, float]:
    lines = site.git("count-objects", "-v").splitlines()
    return {key: float(value) for key, _, value in (line.partition(": ") for line in lines)}
