"""Real hosts that are killed, stopped, cut off and robbed, and a Postgres that goes and comes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from soak.cluster_world import Cluster
from soak.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

_PROMISES = ("lost", "twice", "extra", "wedged", "unsound")
_FEW = 12
_IN_MEMORY = Path("/dev/shm")


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Many sites on three hosts; each save is published once, whatever befalls the hosts."""
    count = options.of(200, _FEW)
    saves, pause = (25, 1.5) if count > _FEW else (6, 1.5)
    root = Path(tempfile.mkdtemp(prefix="briter-soak-", dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
    cluster = Cluster(root, options.seed, count=count, saves=saves, pause=pause)
    try:
        found = cluster.live(tell)
    except BaseException:
        tell(f"seed {options.seed} broke the soak itself; it is kept in {root}")
        raise
    named = {name: getattr(found, name) for name in _PROMISES}
    failures = [f"{name}: {line}" for name, lines in named.items() for line in lines]
    if failures:
        tell(f"it is kept in {root}")
    else:
        shutil.rmtree(root)
    figures = {name: len(lines) for name, lines in named.items()} | {"sites": count} | cluster.about
    return Report("cluster", figures | dict(sorted(found.figures.items())), failures)
