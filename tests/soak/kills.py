"""Kills at random moments while everything around the worker moves: nothing lost, twice, extra, or wedged."""

from __future__ import annotations

import random
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from soak.ledger import Found
from soak.report import Report
from soak.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

_PER_SITE = 30
"""A site's history and its figures stay small enough to be read by a person when something is wrong."""
_PROMISES = ("lost", "twice", "extra", "wedged", "unsound")
_IN_MEMORY = Path("/dev/shm")


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Kill workers, two thirds of them alone, the others with their process group."""
    sites = list(_plan(options))
    total, done = Found(), 0

    def one(number: int, seed: int, kills: list[bool]) -> Found:
        where = _IN_MEMORY if _IN_MEMORY.is_dir() else None
        root = Path(tempfile.mkdtemp(prefix="briter-soak-", dir=where))
        try:
            found = World(root, seed, kills).live()
        except BaseException:
            tell(f"site {number} of seed {seed} broke the soak itself; it is kept in {root}")
            raise
        broken = [f"{name}: {line}" for name in _PROMISES for line in getattr(found, name)]
        for line in broken:
            tell(f"site {number} of seed {seed}: {line}")
        if broken:
            tell(f"it is kept in {root}")
        else:
            shutil.rmtree(root)
        return found

    with ThreadPoolExecutor(options.processes) as pool:
        for found in pool.map(lambda each: one(*each), sites):
            total.add(found)
            done += 1
            tell(
                f"{done} of {len(sites)} sites: {len(total.lost)} lost, {len(total.twice)} twice, "
                f"{len(total.extra)} extra, {len(total.wedged)} wedged"
            )
    named = {name: getattr(total, name) for name in _PROMISES}
    figures = {name: len(lines) for name, lines in named.items()} | dict(sorted(total.figures.items()))
    failures = [f"{name}: {line}" for name, lines in named.items() for line in lines]
    return Report("kills", figures, failures)


def _plan(options: Options) -> list[tuple[int, int, list[bool]]]:
    workers, groups = options.of(1_000, 12), options.of(500, 6)
    dice = random.Random(options.seed)
    kills = [False] * workers + [True] * groups
    dice.shuffle(kills)
    # In a quick run, too, no processor waits for the last site.
    count = max(options.processes, len(kills) // _PER_SITE)
    return [(number, dice.randrange(2**32), kills[number::count]) for number in range(count)]
