"""One drain of one site of a cluster: the database's rows, the site's clone and the node's sinks."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg.rows import dict_row

from briter_worker.cluster.health import Health, host_of
from briter_worker.cluster.sites import Site, all_sites, open_site_clone, settings_of, wake
from briter_worker.drain import Counts, Drain
from briter_worker.errors import PublishError, UsageError, redact
from briter_worker.events import SiteUpdated, Warned
from briter_worker.git.clone import fetch_commits
from briter_worker.git.commits import Person
from briter_worker.git.payloads import SubmittedCopies
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.staging import Staging
from briter_worker.plugins import Plugins
from briter_worker.ports import ClaimResult, Pause
from briter_worker.queues.postgres.payloads import PostgresBases
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.queues.postgres.rows import decode_path
from briter_worker.sinks.recorder import FanOut, HistorySink, SiteCondition, retire
from briter_worker.sinks.store import PostgresStore
from briter_worker.wiring import open_backoff, open_sender, open_webhooks, progress_by, target_of, warn_by
from briter_worker.worker import pull_backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from briter_worker.cluster.leases import Leases
    from briter_worker.git.commits import RemoteCommit
    from briter_worker.git.run import Git
    from briter_worker.git.ssh import SshConnections
    from briter_worker.ports import EventSink
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings
    from briter_worker.sinks.log import LogSink
    from briter_worker.sinks.metrics import MetricsSink
    from briter_worker.sinks.recorder import Sink

_CRAWL_S = 5.0
_CRAWL_PER_JOB_S = 0.1
"""A drain crawls that takes longer than the first, and the second for each job."""
_MAX_SETTINGS = 10_000
_KEEP_DAYS = "historyKeepDays"
_OUTDATED = """
SELECT p.site, p.job_id, p.slug, f.path, o.outdated_by
FROM publications p JOIN files f ON f.publication = p.id
JOIN published o ON o.site = p.site AND o.path = f.path
LEFT JOIN base_versions b ON b.site = p.site AND b.path = f.path
WHERE o.outdated_by IS NOT NULL AND f.saved_at < o.saved_at AND f.blob IS DISTINCT FROM b.base
ORDER BY p.site, p.slug, f.path
"""


class NodeSinks:
    """The event sinks of one node; each drain gets its own, over the same stores. Safe in several threads."""

    def __init__(
        self, settings: Settings, database: Database, log: LogSink, metrics: MetricsSink | None
    ) -> None:
        self._settings = settings
        self._database = database
        self._log = log
        self._metrics = metrics
        self._store = PostgresStore(database.connection, database.transaction)
        self._clock = database.now
        self._sender = open_sender(settings, self._store, log, database.now)
        self._sender.wake()  # an earlier node may have left messages

    def open(self, settings: Settings, condition: str | None) -> FanOut:
        """Return the sinks of one drain of the settings' site, which is in this condition, for one thread."""
        site, key = settings.site, settings.history_key
        sinks: list[Sink] = [
            HistorySink(self._store, target_of(settings), site=key, clock=self._clock),
            open_webhooks(settings, self._sender, site, self._clock),
        ]
        if self._metrics is not None:
            sinks.append(self._metrics.for_drain())
        known = SiteCondition(self._store, key, clock=self._clock, is_read=True, failure=condition)
        return FanOut(sinks, partial(self._log, site=site), condition=known)

    def retire(self) -> None:
        """Delete old receipts of all sites. Raises StoreError and DatabaseError.

        A site whose settings cannot be read keeps its receipts; those of the other sites are deleted.
        """
        own_days: dict[str, int] = {}
        unreadable: list[str] = []
        for site in all_sites(self._database):
            if _KEEP_DAYS not in site.settings:
                continue
            try:
                own_days[site.identity] = settings_of(site, self._settings).history_keep_days
            except UsageError as error:
                unreadable.append(site.identity)
                text = f"old receipts of the site {site.name} are not deleted: {error.message}"
                self._log(Warned(error=text, fix=f"briter-worker site change {site.name} --set KEY=VALUE"))
        retire(self._store, self._settings.history_keep_days, self._clock(), own_days, kept=unreadable)

    def close(self) -> None:
        """Send what is due, within a bounded time."""
        self._sender.close()
        if self._metrics is not None:
            self._metrics.close()
        self._store.close()


def _once(open_publisher: Callable[[], GitPublisher]) -> Callable[[], GitPublisher]:
    """Return what opens the publisher when it is first needed: a remote that hangs is not asked twice."""
    found: list[GitPublisher | PublishError] = []

    def publisher() -> GitPublisher:
        if not found:
            try:
                found.append(open_publisher())
            except PublishError as failure:
                found.append(failure)
        if isinstance(found[0], PublishError):
            raise found[0]
        return found[0]

    return publisher


class HostFullError(Exception):
    """As many sites of the remote's host are drained as may be at once."""


@dataclass(slots=True)
class Taken:
    """A site that the node holds, and what is claimed there."""

    site: Site
    token: int
    row: Mapping[str, Any]
    is_slow: bool
    """The last drain crawled: the next one waits in the lane of slow ones."""
    settings: Settings = field(init=False)
    plans: PostgresPlans = field(init=False)
    queue: PostgresQueue = field(init=False)
    found: ClaimResult | None = None
    """The claimed jobs; None where something is in flight, which comes first."""
    error: UsageError | None = None
    """The mistake in the site's settings."""


@dataclass(eq=False)
class SiteDrains:
    """Drains sites for one node, each call in a thread of its own."""

    settings: Settings
    database: Database
    plugins: Plugins
    sinks: NodeSinks
    health: Health
    leases: Leases
    ssh: SshConnections
    hosts: dict[str, str] = field(default_factory=dict)
    """The remote's host of each site that was drained here."""
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _running: set[Git] = field(default_factory=set)
    _aborted: bool = False
    _failed_pulls: dict[str, int] = field(default_factory=dict)
    _known_settings: dict[str, Settings] = field(default_factory=dict)
    """By what the sites say of their own: most say the same."""

    def __post_init__(self) -> None:
        """Load what the first drain would wait for: plugins, and the patterns of paths and of secrets."""
        self.settings.allowlist().exclusion("content")
        redact("")
        with suppress(PublishError):  # each drain reports it
            self.plugins.call("allowed_paths")

    def take(
        self,
        stopping: Callable[[], bool],
        *,
        is_steady: bool,
        besides: Collection[str],
        lanes: Collection[bool],
        full_hosts: Collection[str] = (),
        name: str | None = None,
    ) -> Taken | None:
        """Lease a site, see `Leases.take`, and claim what is due there. Raises DatabaseError.

        Raises HostFullError, with the site's host in `hosts`, where that is one of `full_hosts`.
        """
        clock = self.database.now
        with self.database.joined(), self.database.connection() as connection:
            row = self.leases.take(connection, is_steady=is_steady, besides=besides, lanes=lanes, name=name)
            if row is None:
                return None
            site, token = Site.from_row(row), int(row["token"])
            host = self.hosts[site.name] = host_of(site.remote)
            if host in full_hosts:
                raise HostFullError
            taken = Taken(site, token, row, is_slow=row["slow"])
            try:
                taken.settings = settings = self._settings_of(site)
            except UsageError as error:
                taken.error = error
                return taken
            known = None if row["is_unfinished"] else ()
            taken.plans = PostgresPlans(self.database, site.name, token=token, known=known)
            taken.queue = queue = PostgresQueue(
                self.database,
                site.name,
                token=token,
                longest_delay=open_backoff(settings).longest,
                dry_run=settings.worker_dry_run,
                clock=clock,
                has=row["has"],
            )
            if not row["is_unfinished"]:
                taken.found = ClaimResult() if stopping() else queue.claim(clock())
        return taken

    def drain(self, taken: Taken, stopping: Callable[[], bool]) -> Counts:
        """Complete what a dead node left of the site, then publish what is due, once.

        Raises LockLostError, UnavailableError, NodeFailureError, PublishError, UsageError.
        """
        if taken.error is not None:
            raise taken.error
        began, clock = time.monotonic(), self.database.now
        site, settings, found, pull_at = taken.site, taken.settings, taken.found, taken.row["pull_at"]
        interval = settings.git_pull_interval_ms / 1000
        pulls = interval > 0 if pull_at is None else pull_at <= clock()
        with ExitStack() as stack:
            emit = self.sinks.open(settings, taken.row["condition"])
            stack.callback(emit.close)
            plugins = self.plugins
            if settings.plugins != self.settings.plugins:
                plugins = Plugins(settings.plugins)
            # Opened when it is first needed: many drains find nothing to do.
            publisher = _once(
                partial(self._open_publisher, site, settings, plugins, taken.plans, emit, stack, pulls=pulls)
            )
            drain = Drain(
                queue=taken.queue,
                publisher=publisher,
                emit=emit,
                plugins=plugins,
                backoff=open_backoff(settings),
                max_attempts=settings.worker_max_attempts,
                dry_run=settings.worker_dry_run,
                co_authors=settings.git_co_authors,
                stopping=stopping,
                blames_node=partial(self.health.blames_node, site.name, self.hosts[site.name]),
                clock=clock,
            )
            counts = drain.recover() if found is None else Counts()
            if (found or not stopping()) and (done := drain.run(found)):
                counts.add(done)
            if pulls:
                self._pull(site, publisher, interval, pull_at, emit)
        if counts.completed or counts.undecided:
            crawl = min(_CRAWL_S, settings.git_timeout_ms / 2000) + _CRAWL_PER_JOB_S * counts.completed
            taken.is_slow = time.monotonic() - began > crawl
        return counts

    def _settings_of(self, site: Site) -> Settings:
        """Return the site's settings, which cost more than all else that a drain needs. Raises UsageError."""
        own = json.dumps([site.branch, site.adapter, site.allowed, site.settings], sort_keys=True)
        if own not in self._known_settings:
            if len(self._known_settings) >= _MAX_SETTINGS:
                self._known_settings.clear()
            self._known_settings[own] = settings_of(site, self.settings)
        return self._known_settings[own].of_site(site.name, site.identity)

    def _pull(
        self,
        site: Site,
        publisher: Callable[[], GitPublisher],
        interval: float,
        pull_at: float | None,
        emit: EventSink,
    ) -> None:
        """Open the publisher, which looks for edits of others, and note when to look next."""
        try:
            publisher()
        except PublishError as error:
            self._failed_pulls[site.name] = failures = self._failed_pulls.get(site.name, 0) + 1
            emit(Warned(error=f"the remote's edits could not be read: {error.message}", fix=error.fix))
            interval = pull_backoff(failures, interval)
        else:
            self._failed_pulls.pop(site.name, None)
        with self.database.connection() as connection:  # an order that came meanwhile stays
            connection.execute(
                "UPDATE sites SET pull_at = %s WHERE name = %s AND pull_at IS NOT DISTINCT FROM %s",
                (self.database.now() + interval if interval else None, site.name, pull_at),
            )

    def abort(self) -> None:
        """End what git runs for any site. From any thread."""
        with self._guard:
            self._aborted = True
            running = list(self._running)
        for git in running:
            git.abort()

    def _open_publisher(
        self,
        site: Site,
        settings: Settings,
        plugins: Plugins,
        plans: PostgresPlans,
        emit: EventSink,
        stack: ExitStack,
        *,
        pulls: bool,
    ) -> GitPublisher:
        """Return the publisher to the site's remote; the stack closes its clone. Raises PublishError.

        `pulls`: ask the remote for edits of others in any case.
        """
        repository = stack.enter_context(open_site_clone(site, settings, ssh=self.ssh))
        with self._guard:
            self._running.add(repository.git)
            aborted = self._aborted
        stack.callback(self._running.discard, repository.git)
        if aborted:
            repository.git.abort()
        progress = progress_by(emit)
        allowlist = settings.allowlist(more=plugins.allowed_paths)
        staging = Staging(repository, allowlist, settings.worker_max_file_bytes, progress)
        bases = PostgresBases(self.database, site.name, token=plans.token)
        identity = Person(settings.git_author_name, settings.git_author_email)
        known = site.pushed_tip

        def note_moved(commits: Sequence[RemoteCommit], tip: str) -> None:
            note_unknown(plans, bases, commits)
            if paths := {path for each in commits if not each.is_own for path in each.blobs}:
                emit(SiteUpdated.of(tip, sorted(paths)))

        # Another tip than the database's: another node has pushed, or a backup was restored.
        if pulls or (known is not None and repository.ref(repository.pushed_ref) != known):
            commits, tip = fetch_commits(repository, known, identity), repository.ref(repository.pushed_ref)
            if tip is not None and tip != known:
                note_moved(commits, tip)
                bases.remember({}, {}, tip)
        return GitPublisher(
            repository,
            copies=SubmittedCopies(staging, bases, bases),
            plans=plans,
            bases=bases,
            identity=identity,
            dry_run=settings.worker_dry_run,
            progress=progress,
            warn=warn_by(emit),
            still_ours=lambda: True,  # the plan, recorded just before, checks the token
            note_moved=note_moved,
        )


def note_unknown(plans: PostgresPlans, bases: PostgresBases, commits: Sequence[RemoteCommit]) -> None:
    """Note commits of ours on the remote that the database does not know, because a backup was restored."""
    if own := [each for each in commits if each.is_own]:
        known = {commit for plan in plans.plans() for commit in plan.commits.values()}
        known |= bases.conflict_commits()
        unknown = [each for each in own if each.sha not in known]
        if found := {path: (each.sha, blob) for each in unknown for path, blob in each.blobs.items()}:
            bases.outdate(found, own[-1].sha)


@dataclass(slots=True)
class Restored:
    """What was found after a backup of the database was restored."""

    compared: int = 0
    outdated: list[dict[str, str]] = field(default_factory=list)
    """The waiting saves that the remote has a later version of."""
    unchecked: dict[str, str] = field(default_factory=dict)
    """The reason for each site that could not be compared, and stays paused."""


def compare_restored(database: Database, node: Settings) -> Restored:
    """Pause all sites, compare their waiting jobs with their remotes, and resume. Raises DatabaseError."""
    result, pause = Restored(), Pause(database.now(), None, "the database was restored from a backup")
    with database.transaction() as connection:
        # A node that still runs has a later token than the backup.
        connection.execute("UPDATE sites SET token = token + 1000000")
        paused = connection.execute(
            "UPDATE sites SET paused = %s WHERE paused IS NULL RETURNING name", (json.dumps(pause._asdict()),)
        ).fetchall()
        query = (
            "SELECT * FROM sites WHERE pushed_tip IS NOT NULL AND NOT removed"
            " AND EXISTS (SELECT FROM publications WHERE site = name) ORDER BY name"
        )
        waiting = connection.cursor(row_factory=dict_row).execute(query).fetchall()
    for row in waiting:
        site, name, token = Site.from_row(row), row["name"], row["token"]
        try:
            settings = settings_of(site, node)
            plans = PostgresPlans(database, name, token=token)
            bases = PostgresBases(database, name, token=token)
            with open_site_clone(site, settings) as repository:
                identity = Person(settings.git_author_name, settings.git_author_email)
                commits = fetch_commits(repository, site.pushed_tip, identity)
                note_unknown(plans, bases, commits)
        except (PublishError, UsageError) as error:
            result.unchecked[name] = error.message
    result.compared = len(waiting) - len(result.unchecked)
    with database.transaction() as connection:
        found = connection.execute(_OUTDATED).fetchall()
        resumed = [name for (name,) in paused if name not in result.unchecked]
        connection.execute("UPDATE sites SET paused = NULL WHERE name = ANY(%s)", (resumed,))
    wake(database)
    keys = ("site", "id", "slug", "path", "commit")
    result.outdated = [dict(zip(keys, (*row[:3], decode_path(row[3]), row[4]), strict=True)) for row in found]
    return result
