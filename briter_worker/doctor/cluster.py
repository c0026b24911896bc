"""Checks of a cluster: the database, the nodes, and the remote of one site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.cluster import sites
from briter_worker.doctor import environment
from briter_worker.doctor.finding import from_failure, ok, warning
from briter_worker.doctor.repository import ask_push
from briter_worker.errors import FixableError, PublishError
from briter_worker.git.clone import open_clone
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.cluster.sites import Site
    from briter_worker.doctor.finding import Finding
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield the findings; without a site, those that concern all sites."""
    yield environment.check_writable("cache", settings.cache_root)
    try:
        database = open_database(settings)
        database.check()
        yield ok("database", f"it fits this program (version {database.version()})")
        if nodes := sites.count_nodes(database):
            yield ok("hosts", f"{nodes} nodes are running")
        else:
            yield warning("hosts", "no node is running", "start briter-worker run on a node")
        if settings.site:
            yield from _check_site(database, settings)
    except OSError as problem:
        yield from_failure("database", problem)


def _check_site(database: Database, settings: Settings) -> Iterator[Finding]:
    try:
        site = sites.get(database, settings.site)
        settings = sites.settings_of(site, settings)
    except FixableError as problem:
        yield from_failure("site", problem)
        return
    if site.paused is not None:
        yield warning("site", f"{site.name} is paused", f"briter-worker site resume {site.name}")
    else:
        yield ok("site", f"{site.name} publishes {', '.join(settings.folders)} to {site.branch}")
    yield _check_remote(site, settings)


def _check_remote(site: Site, settings: Settings) -> Finding:
    try:
        with open_clone(
            settings.cache_root / site.name,
            url=site.remote,
            branch=site.branch,
            credentials=site.credentials,
            timeout=settings.git_timeout_ms / 1000,
        ) as repository:
            tip = repository.fetch()
            ask_push(repository, tip, expected=tip)
    except PublishError as failure:
        return from_failure("remote", failure)
    return ok("remote", f"{site.branch} of {site.remote} can be pushed to from this node")
