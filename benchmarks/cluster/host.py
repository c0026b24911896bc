"""Our host of a cluster as a process that stands ready first: with its imports done, and nothing begun.

Its argument is a JSON object: `slots`, `once`, and `publishes`; without that, a drain does all but git: it
reads what came with the jobs, notes what it is about to do, looks whether the site is still its own.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from briter_worker.cluster import drains, host
from briter_worker.ports import Outcome, Plan
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.deliveries import PostgresDeliveries
from briter_worker.settings import load_settings
from briter_worker.sinks.log import LogSink
from briter_worker.wiring import prepare_git

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack

    from briter_worker.cluster.sites import Site
    from briter_worker.ports import EventSink, Request
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_COMMIT = "0" * 40


class _Nowhere:
    """A publisher whose remote is at once like that."""

    def __init__(self, database: Database, site: str, token: int) -> None:
        self._database = database
        self._site = site
        self._token = token
        self._deliveries = PostgresDeliveries(database, site)

    def publish(
        self, requests: Sequence[Request], *, record: Callable[[Plan], None], **_: object
    ) -> Iterator[Sequence[Outcome]]:
        keys = [request.key for request in requests]
        staged: dict[str, str | None] = {}
        for delivery in self._deliveries.of(keys).values():
            for file in delivery.files:
                staged[file.path] = file.blob
                if file.blob is not None:
                    b"".join(self._deliveries.content(file.blob))
        commits = dict.fromkeys(keys, _COMMIT)
        record(Plan(_COMMIT, _COMMIT, "refs/briter/bench", commits, staged, dry_run=False))
        tokens.hold(self._database, self._site, self._token)
        yield [Outcome(key, commit=_COMMIT) for key in keys]

    def tidy(self, now: float) -> None:
        """Nothing was left."""


class _Drains(drains.Drains):
    def publisher(  # type: ignore[override]  # all that is asked of a cache is its tip
        self,
        site: Site,
        settings: Settings,  # noqa: ARG002 - the real one's signature
        token: int,
        emit: EventSink,  # noqa: ARG002
        stack: ExitStack,  # noqa: ARG002
    ) -> tuple[SimpleNamespace, _Nowhere]:
        return SimpleNamespace(tip=None), _Nowhere(self._database, site.name, token)


def main() -> int:
    """Publish until told to stop, or with `once` until nothing is due; the exit status."""
    options = json.loads(sys.argv[1])
    prepare_git()
    from briter_worker.git import cache, commits, delivering  # noqa: F401, PLC0415 - not after the start

    if not options["publishes"]:
        setattr(host, "Drains", _Drains)  # noqa: B010 - the rest of the host is as it is
    settings = load_settings()
    print("ready", flush=True)
    sys.stdin.readline()
    with open(os.devnull, "wb", buffering=0) as log:  # noqa: PTH123 - unbuffered, as standard output is
        return host.run(settings, workers=options["slots"], once=options["once"], log=LogSink(log))


if __name__ == "__main__":
    sys.exit(main())
