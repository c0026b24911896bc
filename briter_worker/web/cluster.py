"""All sites of a cluster: each is opened when a user asks for it; their page and their API."""

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from briter_worker import wiring
from briter_worker.cluster import sites as registry
from briter_worker.cluster import tokens
from briter_worker.cluster.health import NodeRecord, complaints, running_nodes
from briter_worker.cluster.sites import SiteSummary
from briter_worker.cluster.submit import send
from briter_worker.cluster.tokens import ApiToken
from briter_worker.errors import DeclinedError, describe
from briter_worker.job import Document
from briter_worker.queues.postgres.database import Database
from briter_worker.settings import SITE_NAME, Settings
from briter_worker.sinks.history import Tally, tallies
from briter_worker.sinks.log import LogSink
from briter_worker.sinks.store import PostgresStore
from briter_worker.web import api
from briter_worker.web.bounds import UploadRoute, decode_base64
from briter_worker.web.live import Feed, News
from briter_worker.web.pages import paged
from briter_worker.web.responses import Json, ProblemError, page
from briter_worker.web.site import Site
from briter_worker.web.snapshot import CachedValue

if TYPE_CHECKING:
    from briter_worker.sinks.metrics import Sample

PER_PAGE = 100
_MAX_OPEN = 64
_MEASURED = 20
"""Sites with series of their own in the metrics if none were asked for: those in trouble, and the busiest."""
_PATIENCE_S = 3.0
"""A visitor waits for a lost database no longer; a node does."""
_ANSWER_S = 6.0
"""The longest statement of a page or a call."""
_CONNECTIONS = 10
"""One for each thread that answers requests, and for those that read in the background."""
_SHOW: dict[str, tuple[str, Callable[[SiteSummary], bool]]] = {
    "all": ("all sites", lambda _site: True),
    "trouble": ("sites in trouble", lambda site: site.has_trouble),
    "waiting": ("sites with waiting posts", lambda site: site.is_busy),
    "paused": ("paused sites", lambda site: site.paused is not None),
}
"""The label of each choice, and whether a site is shown."""
_Gauge = tuple[str, str, str, str]
"""Name, site (empty: all other sites), and a further label with its value, or two empty texts."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All sites, by name, and the running nodes."""

    sites: Sequence[SiteSummary]
    nodes: Sequence[NodeRecord]

    def chosen(self, q: str, show: str) -> list[SiteSummary]:
        """Return the sites with all words of `q` in their name or remote, in this condition."""
        words, (_, is_shown) = q.casefold().split(), _SHOW.get(show, _SHOW["all"])
        found = [
            (site, f"{site.name}\n{site.site.remote}".casefold()) for site in self.sites if is_shown(site)
        ]
        return [site for site, text in found if all(word in text for word in words)]


class Cluster:
    """The sites of a cluster. Safe in several threads, except for `feed`."""

    def __init__(self, settings: Settings, *, log: LogSink, complain: Callable[[str], None]) -> None:
        self.settings = settings
        self.database: Database = wiring.open_database(settings)
        self.database.limit(connections=_CONNECTIONS, patience=_PATIENCE_S, answer_within=_ANSWER_S)
        self.feed = Feed(self._news)
        self._log = log
        self._complain = complain
        self._open: OrderedDict[str, Site] = OrderedDict()
        self._guard = threading.Lock()
        self._overview = CachedValue(self._read_overview, "the database")

    def open_site(self, name: str | None) -> Site:
        """Return a site by its name. Raises ProblemError."""
        if name is None or not re.fullmatch(SITE_NAME, name):
            raise ProblemError(404, f"there is no site {name!r}")
        try:
            settings = registry.settings_of(registry.get(self.database, name), self.settings)
        except DeclinedError as error:
            raise ProblemError(404, error.message, error.fix) from None
        with self._guard:
            site = self._open.pop(name, None)
            if site is None or site.settings != settings:
                site = ClusterSite(
                    settings, self.database, log=partial(self._log, site=name), complain=self._complain
                )
            self._open[name] = site
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
        return site

    def find_api_token(self, token: str) -> ApiToken | None:
        """Return what a token of the API opens; None if there is none. Raises ProblemError."""
        try:
            return tokens.find(self.database, token)
        except OSError as error:
            raise ProblemError(503, *describe(error)) from None

    def overview(self) -> Overview:
        """Return all sites as they were a moment ago. Raises ProblemError."""
        return self._overview.get()

    def _read_overview(self) -> Overview:
        found = registry.summaries(self.database, self.database.read_clock())
        return Overview(found, running_nodes(self.database))

    def status_json(self) -> dict[str, Any]:
        """Return the status of all sites together. Raises ProblemError."""
        overview = self.overview()
        return {
            "sites": len(overview.sites),
            "hosts": len(overview.nodes),
            "nodes": [{"message": text, "fix": fix} for text, fix in complaints(overview.nodes)],
            "jobs": {state: sum(site.jobs[state] for site in overview.sites) for state in registry.STATES},
            "inTrouble": sum(site.has_trouble for site in overview.sites),
            "paused": sum(site.paused is not None for site in overview.sites),
        }

    def measure(self) -> "tuple[list[Sample], list[Tally]]":
        """Return the gauges and counters, with the site as a label of few or of the wanted sites.

        Everything else is summed up, without the label. Raises ProblemError and StoreError.
        """
        found = self.overview().sites
        named = self._sites_with_label(found)
        gauges = _gauges(found, named, self.database.now())
        samples: list[Sample] = []
        for (name, site_name, label, text), value in gauges.items():
            labels = {"site": site_name}
            if label:
                labels[label] = text
            samples.append((name, labels, value))
        samples += [
            ("node_sick", {"node": node.name}, int(node.facts["problem"] is not None))
            for node in self.overview().nodes
        ]
        counted = tallies(PostgresStore(self.database.connection, self.database.transaction))
        names = {site.site.identity: site.name for site in found}
        # The counters of a removed site stay in the sum of the others.
        counted = [each._replace(site=names.get(each.site, "")) for each in counted]
        has_wish = bool(self.settings.metrics_sites)
        return samples, _sum_up(counted, named if has_wish else ())

    def _sites_with_label(self, found: Sequence[SiteSummary]) -> set[str]:
        """Return the sites that the settings name; if the settings name none, those in the worst state."""
        wanted = self.settings.metrics_sites
        if "*" in wanted:
            return {site.name for site in found}
        if wanted:
            return {site.name for site in found if site.name in wanted}
        worst = sorted(found, key=lambda site: (site.has_trouble, site.waiting), reverse=True)
        return {site.name for site in worst[:_MEASURED]}

    def _news(self, _after: int) -> News:
        try:
            return News(self.status_json())
        except ProblemError as error:
            return News({"problem": error.detail})

    def page_context(self) -> dict[str, Any]:
        """Return what every page shows, also while the database cannot be read."""
        failed = 0
        with suppress(ProblemError):
            failed = self.status_json()["jobs"]["failed"]
        return {
            "dry_run": False,
            "obstacle": None,
            "site_name": "All sites",
            "now": self.database.now(),
            "base": "",
            "above": "",
            "pages": (("/", "Sites"),),
            "counted": "/",
            "search": "",
            "failed_count": failed,
        }


def _gauges(found: Sequence[SiteSummary], named: Collection[str], now: float) -> "Counter[_Gauge]":
    """Return the gauges of the named sites, and those of all other sites together under an empty name."""
    gauges = Counter[_Gauge]()
    for site in found:
        name = site.name if site.name in named else ""
        for state, number in site.jobs.items():
            gauges["jobs", name, "state", state] += number
        gauges["dead_letters", name, "", ""] += site.jobs["failed"]
        gauges["paused", name, "", ""] += site.paused is not None
        waits = 0 if site.oldest is None else max(0, round(now - site.oldest))
        longest = "oldest_waiting_seconds", name, "", ""
        gauges[longest] = max(gauges[longest], waits)
        if site.failure is not None:
            gauges["condition", name, "failure", site.failure] += 1
    return gauges


def _sum_up(counted: Sequence[Tally], named: Collection[str]) -> list[Tally]:
    """Return the counters of the named sites, and those of all others together. Counters never go back."""
    sums: dict[tuple[str, str, str], Tally] = {}
    for each in counted:
        site = each.site if each.site in named else ""
        known = sums.get((site, each.kind, each.outcome), Tally(site, each.kind, each.outcome, 0, 0, 0.0))
        sums[known[:3]] = known._replace(
            number=known.number + each.number,
            waits=known.waits + each.waits,
            waited=known.waited + each.waited,
        )
    return sorted(sums.values())


class ClusterSite(Site):
    """A site whose jobs are in the database, with their files."""

    def __init__(self, settings: Settings, database: Database, **options: Any) -> None:  # noqa: ANN401 - of Site
        super().__init__(settings, name=settings.site, base=f"/sites/{settings.site}", **options)
        self._database = database

    def _era(self) -> str:
        site = registry.get(self._database, self.name)
        return f"{site.created_at} " if site.identity == self.name else f"{site.identity} "

    def _former_slug(self, job_id: str) -> str | None:
        # The history gets what newer saves superseded with the site's next drain.
        query = "SELECT slug FROM superseded WHERE site = %s AND job_id = %s"
        with self._database.connection() as connection:
            row = connection.execute(query, (self.name, job_id)).fetchone()
        return row[0] if row else super()._former_slug(job_id)

    def _store(self, document: Document, contents: Mapping[str, bytes | None]) -> None:
        send(self.settings, document, files=contents)

    def order_pull(self) -> None:
        """Have a node look for edits of others on the remote. Raises OSError."""
        registry.order_pull(self._database, self.name)


router = APIRouter(responses=api.PROBLEMS)
"""Below `/`."""
site_router = APIRouter(responses=api.PROBLEMS, route_class=UploadRoute)
"""Below `/api/sites/{site}`: what sites of a cluster have beside the routes of `api`."""


def _cluster(request: Request) -> Cluster:
    found: Cluster = request.app.state.shell
    return found


Sites = Annotated[Cluster, Depends(_cluster)]


@router.get("/", include_in_schema=False)
def all_sites(
    request: Request,
    cluster: Sites,
    q: Annotated[str, Query(max_length=200)] = "",
    show: Annotated[str, Query(max_length=20)] = "all",
    start: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Response:
    """Show every site: condition, waiting and failed posts."""
    more: dict[str, Any] = {"q": q, "show": show, "choices": _SHOW, "totals": cluster.status_json()}
    more |= paged(cluster.overview().chosen(q, show), start, PER_PAGE)
    return page(request, cluster.page_context(), "sites.html", **more)


@router.get("/sites/{site}", include_in_schema=False)
def first_page(site: api.CurrentSite) -> Response:
    """Redirect to the first page of a site."""
    return RedirectResponse(f"{site.base}/", status_code=308)


@router.get("/api/sites")
def sites(
    cluster: Sites,
    q: Annotated[str, Query(max_length=200, description="Words of the name or the remote.")] = "",
    show: Literal["all", "trouble", "waiting", "paused"] = "all",
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=5000)] = 100,
) -> Response:
    """Return the sites, by name."""
    now = cluster.database.now()
    found = cluster.overview().chosen(q, show)
    return api.listed([site.to_json(now) for site in found[offset : offset + limit]], offset, len(found))


@router.get("/api/status")
def status(cluster: Sites) -> Response:
    """Return the jobs of all sites by state, and the number of nodes."""
    return Json(cluster.status_json())


@router.get("/events", response_class=Response, responses=api.EVENT_STREAM)
async def events(request: Request, cluster: Sites) -> Response:
    """Stream a `snapshot`, then `status` whenever the number of jobs in any state changes."""
    return api.stream(request, cluster.feed)


@site_router.post("/jobs", status_code=201)
def enqueue(
    site: api.CurrentSite, job: Annotated[api.NewUpload, Body()], idempotency_key: api.IdempotencyKey = None
) -> Response:
    """Enqueue a post with its files. Requests with the same Idempotency-Key are one job."""
    if job.paths and set(job.paths) != set(job.contents):
        raise ProblemError(422, "paths differs from the paths in contents", "leave paths out")
    contents = {path: _decoded(path, text) for path, text in job.contents.items()}
    body = {**job.model_dump(by_alias=True, exclude={"contents"}), "paths": list(contents)}
    job_id, replayed = site.enqueue(body, idempotency_key, contents)
    return Json({"id": job_id, "slug": job.slug, "replayed": replayed}, 201)


def _decoded(path: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else decode_base64(text)
    except ValueError:
        raise ProblemError(422, f"contents: {path} is not base64") from None
