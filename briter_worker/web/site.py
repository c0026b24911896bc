"""One site of the dashboard: everything that its pages, its API and its live stream read and change."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from briter_worker import actions, client, wiring
from briter_worker.doctor import Finding, examine
from briter_worker.doctor import State as FindingState
from briter_worker.errors import DeclinedError, one_line
from briter_worker.job import State
from briter_worker.sinks.history import Tally
from briter_worker.sinks.store import StoreError
from briter_worker.status import measure_site, read_local_commits, read_status
from briter_worker.web.live import MAX_KEPT, Feed, News
from briter_worker.web.responses import ProblemError
from briter_worker.web.security import ACTOR
from briter_worker.web.snapshot import CachedValue, Snapshot, in_background

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from briter_worker.events import Event
    from briter_worker.git.repository import Repository
    from briter_worker.job import Document, Job
    from briter_worker.ports import ListedJob
    from briter_worker.settings import Settings
    from briter_worker.sinks.history import Receipt
    from briter_worker.sinks.metrics import Sample
    from briter_worker.wiring import SiteQueue

PAGES = (
    ("/", "Now"),
    ("/waiting", "Waiting"),
    ("/scheduled", "Scheduled"),
    ("/failed", "Failed"),
    ("/published", "Published"),
    ("/site", "Site"),
)
_MAX_IN_FLIGHT = 500
_LOCAL_COMMITS_S = 60.0
_REQUEST = "requestDigest"
"""Key of a job that came with an Idempotency-Key: tells whether a later request is the same."""
_PIECE = 1 << 16
_REMOTE_MS = 20_000
"""A page waits no longer for a remote that does not answer."""
T = TypeVar("T")


class Site:
    """A site of the dashboard. Safe in several threads, except for `feed`."""

    def __init__(
        self,
        settings: Settings,
        *,
        name: str,
        log: Callable[[Event], None],
        complain: Callable[[str], None],
        base: str = "",
    ) -> None:
        """Read nothing yet. `base` is what the site's addresses begin with."""
        self.settings = settings
        self.name = name
        self.base = base
        self.history = wiring.open_history(settings)
        self.checks: Future[Sequence[Finding]] | None = None
        """The last run of the checks, or the running one."""
        self.checked_at = 0.0
        self.feed = Feed(self._news)
        self._log = log
        self._complain = complain
        self._queue = wiring.open_queue(settings)
        self._queue_guard = threading.Lock()
        self._one_key = threading.Lock()
        self._last: Snapshot | None = None
        self._snapshot = CachedValue(self._read_snapshot, "the queue", lifetime=0.1)
        self._commits = CachedValue(
            lambda: read_local_commits(settings), "the repository", lifetime=_LOCAL_COMMITS_S
        )

    # Reading

    def snapshot(self) -> Snapshot:
        """Return the queue and the status as they were at most a few seconds ago. Raises ProblemError."""
        return self._snapshot.get()

    def _read_snapshot(self) -> Snapshot:
        now = wiring.read_now(self.settings)
        commits = self._commits.get()
        with self._queue_guard:
            queue, rows = self._queue, self._queue.jobs(now)
            status = read_status(
                self.settings, now, queue=queue, jobs=rows, local_commits=commits, history=self.history
            )
        self._last = Snapshot.of(rows, status, self._last)
        return self._last

    def progress(self) -> dict[str, dict[str, Any]]:
        """Return how far each job in flight is, by its id; none of a dead worker. Raises ProblemError."""
        if not self.snapshot().status.has_worker:
            return {}
        attempts: dict[str, Receipt] = {}
        with suppress(StoreError):
            attempts = {each.job_id: each for each in self.history.under_way()}
        rows = self.snapshot().jobs[State.CLAIMED][:_MAX_IN_FLIGHT]
        return {row.job.id: _progress_json(row.job, attempts.get(row.job.id)) for row in rows}

    def stopped(self, rows: Sequence[ListedJob]) -> tuple[int, Job] | None:
        """Return how many of the jobs the site condition holds up, and which is tried next."""
        failure = self.snapshot().status.failure
        found = [row.job for row in rows if failure is not None and row.job.failure == failure]
        return (len(found), min(found, key=lambda job: job.next_attempt_at or 0.0)) if found else None

    def live_status(self) -> dict[str, Any]:
        """Return what of the status readers of the live stream are sent. Raises ProblemError."""
        snapshot = self.snapshot()
        status = snapshot.status.to_json()
        worker = status["worker"]
        return {
            "revision": snapshot.revision,
            "worker": None if worker is None else {"pid": worker["pid"], "alive": worker["alive"]},
            **{key: status[key] for key in ("headline", "jobs", "paused", "condition", "failure", "fix")},
            "inFlight": list(self.progress().values()),
        }

    def status_json(self) -> dict[str, Any]:
        """Return the status for programs. Raises ProblemError."""
        return {**self.live_status(), **self.snapshot().status.to_json(), "readers": len(self.feed)}

    def measure(self) -> tuple[Iterable[Sample], Iterable[Tally]]:
        """Return the gauges, and the counters as far as the history can be read. Raises ProblemError."""
        samples, counters = measure_site(self.snapshot().status), list[Tally]()
        with suppress(StoreError):
            counters = self.history.tallies()
        return samples, counters

    def _news(self, after: int) -> News:
        """Read for the live stream."""
        try:
            newest, oldest = self.history.latest()
            since = max(after if after <= newest else 0, newest - MAX_KEPT, oldest - 1)
            return News(self.live_status(), newest, since, self.history.moments(since, MAX_KEPT))
        except (StoreError, ProblemError) as error:
            return News({"problem": str(error)}, after, after)
        except Exception as error:  # noqa: BLE001 - the live stream of all readers would end
            self._complain(f"live stream: {type(error).__name__}: {error}")
            return News({}, after, after)

    def page_context(self) -> dict[str, Any]:
        """Return what every page shows, also while the queue cannot be read."""
        try:
            snapshot = self.snapshot()
        except Exception:  # noqa: BLE001 - the page of an error must not raise another one
            snapshot = None
        return {
            "site": self,
            "snapshot": snapshot,
            "status": snapshot and snapshot.status,
            "dry_run": bool(snapshot and snapshot.status.dry_run),
            "obstacle": snapshot and snapshot.status.obstacle(),
            "site_name": one_line(self.name) or "site",
            "base": self.base,
            "now": wiring.known_now(self.settings),
            "above": "/" if self.base else "",
            "pages": PAGES,
            "counted": "/failed",
            "search": f"{self.base}/search",
            "failed_count": len(snapshot.jobs[State.FAILED]) if snapshot else 0,
            "max_attempts": self.settings.worker_max_attempts,
        }

    # Changing

    def steer(self, action: str, change: Callable[[SiteQueue, float], T]) -> T:
        """Change the queue, record it, and renew the snapshot. Raises DeclinedError."""
        with self._queue_guard:
            done = actions.steer(self.settings, action, ACTOR.get(), self._log, change, self._queue)
        self._snapshot.renew()
        return done

    def failures(self, rows: Iterable[ListedJob]) -> dict[str, int]:
        """Return how often each of these jobs failed, as far as the history can be read."""
        with suppress(StoreError):
            return self.history.failures([row.job.id for row in rows])
        return {}

    def undo(self, wanted: str, to: str | None = None, message: str | None = None) -> str:
        """Publish an earlier version of the post again; return the job's id. Raises FixableError."""
        receipts = self.history.attempts(wanted)
        slug = receipts[0].slug if receipts else wanted
        job_id = actions.undo_post(
            self.settings, slug, ACTOR.get(), self._log, to=to or None, message=message
        )
        self._snapshot.renew()
        return job_id

    def order_pull(self) -> None:
        """Have the worker pull. No git runs here. Raises ProblemError, PublishError and OSError."""
        if self.settings.worker_dry_run:
            text = "a dry run changes no file of the site"
            raise ProblemError(409, text, "set BRITER_WORKER_DRY_RUN=false, or run briter-worker pull")
        wiring.pull_order(wiring.open_git(self.settings)).touch(mode=0o600)

    def enqueue(
        self, body: Document, key: str | None, contents: Mapping[str, bytes | None] | None = None
    ) -> tuple[str, bool]:
        """Store the job of a request; return its id, and whether the Idempotency-Key was used before.

        The key determines the job's id, so that the queue or the history has the job of an earlier request.
        Raises ProblemError.
        """
        contents = contents or {}
        given = {name: value for name, value in body.items() if value is not None}
        author, at = given.pop("author", None), given.pop("scheduledFor", None)
        for argument in {"at", "made_by"} & given.keys():  # of `compose`, and no keys of a job
            fix = "use scheduledFor" if argument == "at" else "leave it out"
            raise ProblemError(422, f"{argument} is not a key of a job", fix)
        person = (author["name"], author["email"]) if author else None
        try:
            document = client.compose(given.pop("slug"), given.pop("paths"), at=at, author=person, **given)
            # Two dashboards at once store the same job, under the same id.
            with self._one_key if key is not None else nullcontext():
                if key is not None:
                    request = _request_digest(body, contents)
                    job_id = _digest(f"{self._era()}{key}".encode("utf-8", "surrogatepass"))[:32]
                    document |= {"id": job_id, _REQUEST: request}
                    if self._has(document):
                        return job_id, True
                self._store(document, contents)
        except ValueError as error:
            raise ProblemError(422, str(error)) from None
        except DeclinedError as error:
            raise ProblemError(422, error.message, error.fix) from None
        self._snapshot.renew()
        return document["id"], False

    def _has(self, document: Document) -> bool:
        """Return True if the queue or the history has the job. Raises ProblemError if it has another one."""
        with self._queue_guard:
            waiting = self._queue.find(document["id"], wiring.known_now(self.settings))
        former = self._former_slug(document["id"])
        if waiting:
            is_same = waiting[0].read().get(_REQUEST) == document[_REQUEST]
        else:
            is_same = former in {None, document["slug"]}
        if not is_same:
            text = "this Idempotency-Key was used for another request"
            raise ProblemError(422, text, "use a new key for a new request")
        return bool(waiting or former is not None)

    def _former_slug(self, job_id: str) -> str | None:
        """Return the slug of a job that has been attempted, or has left the queue."""
        receipts = self.history.attempts(job_id)
        return receipts[0].slug if receipts else None

    def _era(self) -> str:
        """Return what tells this site from a removed one of its name, whose receipts remain."""
        return ""

    def _store(self, document: Document, contents: Mapping[str, bytes | None]) -> None:
        """Store a job durably. Raises ValueError and DeclinedError for a refused job, and OSError."""
        del contents  # the files are in the work tree
        client.submit(document, queue=self.settings.queue_root)

    def examine(self) -> Future[Sequence[Finding]]:
        """Return the findings of a run of the checks: of the running one, if there is one."""
        with self._queue_guard:
            if self.checks is None or self.checks.done():
                self.checked_at = time.time()
                self.checks = in_background(self._examine)
            return self.checks

    def repository(self) -> AbstractContextManager[Repository]:
        """Open the repository for a page; in a cluster that asks the remote."""
        shorter = {"git_timeout_ms": min(self.settings.git_timeout_ms, _REMOTE_MS)}
        return actions.open_published(self.settings.model_copy(update=shorter))

    def _examine(self) -> Sequence[Finding]:
        try:
            return tuple(examine(self.settings, time.time()))
        except Exception as error:  # noqa: BLE001 - the page waits for an answer
            self._complain(f"doctor: {type(error).__name__}: {error}")
            return [Finding("doctor", FindingState.ERROR, f"the checks failed: {error}", "see the log")]


def _request_digest(body: Document, contents: Mapping[str, bytes | None]) -> str:
    """Return the digest of `[body, [[path, content in hex or null], ...]]` in JSON, made piece by piece."""
    digest = hashlib.sha256(f"[{json.dumps(body, sort_keys=True)}, [".encode())
    for number, (path, content) in enumerate(contents.items()):
        digest.update(f"{', ' if number else ''}[{json.dumps(path)}, ".encode())
        if content is None:
            digest.update(b"null]")
            continue
        digest.update(b'"')
        for start in range(0, len(content), _PIECE):
            digest.update(content[start : start + _PIECE].hex().encode())
        digest.update(b'"]')
    digest.update(b"]]")
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _progress_json(job: Job, attempt: Receipt | None) -> dict[str, Any]:
    return {
        "jobId": job.id,
        "slug": job.slug,
        "attempt": job.attempts,
        "phase": attempt and attempt.phase,
        "done": attempt.done if attempt else 0,
        "total": attempt.total if attempt else 0,
    }
