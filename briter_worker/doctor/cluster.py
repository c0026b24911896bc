"""What a publication needs in a cluster: the database, hosts that live, and a way to the site's remote."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from briter_worker.cluster import sites
from briter_worker.doctor import surroundings
from briter_worker.doctor.finding import error, ok, refused, warning
from briter_worker.errors import PublishError, UsageError
from briter_worker.git.cache import open_cache
from briter_worker.wiring import open_database, open_remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.cluster.sites import Site
    from briter_worker.doctor.finding import Finding
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings


def examine(settings: Settings) -> Iterator[Finding]:
    """The findings; without a site, those that concern all of them."""
    yield from surroundings.configuration(settings, os.environ)
    yield surroundings.writable("cache", settings.cache_root)
    yield surroundings.clock(settings)
    yield surroundings.plugins(settings)
    try:
        database = open_database(settings)
        database.check()
        yield ok("database", f"it fits this program (version {database.version()})")
        yield _hosts(database)
        if settings.site:
            yield from _site(database, settings)
    except OSError as problem:
        reason, _, fix = str(problem).partition(" Fix: ")
        yield error("database", reason, fix or "see the message")


def _hosts(database: Database) -> Finding:
    hosts = sites.hosts(database)
    if not hosts:
        return warning("hosts", "no host is there to publish", "start briter-worker run on one")
    return ok("hosts", f"{hosts} hosts are there to publish")


def _site(database: Database, settings: Settings) -> Iterator[Finding]:
    try:
        site = sites.get(database, settings.site)
        settings = sites.settings_of(site, settings)
    except (sites.SiteError, UsageError) as problem:
        reason, _, fix = str(problem).partition(" Fix: ")
        yield error("site", reason, fix or f"briter-worker site change {settings.site}")
        return
    if site.paused is not None:
        yield warning("site", f"{site.name} is paused", f"briter-worker site resume {site.name}")
    else:
        yield ok("site", f"{site.name} publishes {', '.join(settings.folders)} to {site.branch}")
    yield _remote(site, settings)


def _remote(site: Site, settings: Settings) -> Finding:
    """Ask for a push without making it: the network, credentials and permission in one, as a drain would."""
    try:
        with open_cache(
            settings.cache_root / site.name,
            url=site.remote,
            branch=site.branch,
            credentials=site.credentials,
            tip=None,
            timeout=settings.git_timeout_ms / 1000,
        ) as cache:
            cache.be_ready()
            remote = open_remote(cache.site)
            theirs = remote.tip()
            if theirs is not None and theirs != cache.tip:
                cache.move_to(remote.fetch())
            remote.push(cache.site.branch_ref, new=cache.tip or "", expect=theirs, dry_run=True)
    except PublishError as failure:
        return refused("remote", failure)
    return ok("remote", f"{site.branch} of {site.remote} can be pushed to from this host")
