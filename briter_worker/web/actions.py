"""What a page and the API may do, each once: the queue is changed, the log says so, the snapshot follows."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from briter_worker import client
from briter_worker.allowlist import PathRefusedError
from briter_worker.errors import for_people
from briter_worker.events import Cancelled, Paused, Resumed
from briter_worker.job import parse_time
from briter_worker.queues.steering import SteeringError, UnknownJobError
from briter_worker.web.idempotency import OtherBodyError, Requests
from briter_worker.web.problems import ProblemError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.job import Job
    from briter_worker.ports import EventSink, Pause
    from briter_worker.queues.disk import DiskQueue
    from briter_worker.queues.steering import Cancellation
    from briter_worker.settings import Settings
    from briter_worker.web.looking import Steered
    from briter_worker.web.readers import Readers
    from briter_worker.web.snapshot import Keeper


class Entry(Protocol):
    """How jobs get into the queue."""

    def submit(
        self,
        key: str | None,
        body: dict[str, Any],
        compose: Callable[[], dict[str, Any]],
        files: Mapping[str, bytes | None] | None,
    ) -> tuple[str, bool]:
        """The id of the job, and whether the key's was there before. Raises ValueError and OtherBodyError."""
        ...

    def changed(self) -> None:
        """Have what was changed looked at by who publishes."""
        ...


class FolderEntry:
    """Writes them into the folder; the worker watches it."""

    def __init__(self, settings: Settings, queue: DiskQueue, readers: Readers) -> None:
        self._queue = queue
        self._queue_root = settings.queue_root
        self._readers = readers
        self._requests = Requests(settings.storage_root, settings.queue_root, self._is_known)
        self._one_request = threading.Lock()

    def submit(
        self,
        key: str | None,
        body: dict[str, Any],
        compose: Callable[[], dict[str, Any]],
        files: Mapping[str, bytes | None] | None,  # noqa: ARG002 - a folder's jobs are published from the folder
    ) -> tuple[str, bool]:
        """See `Entry`."""
        if key is None:
            return client.submit(compose(), queue=self._queue_root).id, False
        # The lock between processes is asked for again and again; ours is waited for.
        with self._one_request:
            return self._requests.submit(key, body, compose)

    def changed(self) -> None:
        """Nobody has to be told."""

    def _is_known(self, job_id: str) -> bool:
        return bool(self._queue.find(job_id, time.time())) or bool(
            self._readers.read(lambda history: history.attempts(job_id))
        )


class Actions:
    """Steers one site. Safe in several threads."""

    def __init__(
        self,
        queue: Steered,
        keeper: Keeper,
        entry: Entry,
        allowlist: Allowlist,
        *,
        log: EventSink,
        record: EventSink,
    ) -> None:
        self._queue = queue
        self._keeper = keeper
        self._entry = entry
        self._allowlist = allowlist
        self._log = log
        self._record = record

    def retry(self, wanted: str) -> Sequence[Job]:
        """Have what failed tried again."""
        with self._changing():
            return self._queue.retry(wanted, time.time())

    def retry_all(self) -> Sequence[Job]:
        """Have every dead letter that it can help tried again."""
        with self._changing():
            return self._queue.retry_all(time.time())

    def publish_now(self, wanted: str) -> Sequence[Job]:
        """Have what is on hold published."""
        with self._changing():
            return self._queue.publish_now(wanted, time.time())

    def cancel(self, wanted: str) -> Cancellation:
        """Take it out of the queue. What is gone is in the history, and in the log."""
        with self._changing():
            done = self._queue.cancel(wanted, time.time())
        for job in done.gone:
            self._record(Cancelled(job_id=job.id, slug=job.slug))
        return done

    def pause(self, until: float | None, reason: str) -> Pause:
        """Have nothing published."""
        with self._changing():
            pause = self._queue.pause(time.time(), until=until, reason=reason)
        self._log(Paused(reason=pause.reason, until=pause.until))
        return pause

    def resume(self) -> bool:
        """Have publishing go on."""
        with self._changing():
            resumed = self._queue.resume()
        if resumed:
            self._log(Resumed())
        return resumed

    def enqueue(
        self, body: dict[str, Any], key: str | None, files: Mapping[str, bytes | None] | None = None
    ) -> tuple[str, bool]:
        """The id of the body's job, and whether the key's job was there before. Raises ProblemError."""
        given = {name: value for name, value in body.items() if value is not None}
        author = given.pop("author", None)
        at = given.pop("scheduledFor", None)

        def compose() -> dict[str, Any]:
            person = (author["name"], author["email"]) if author else None
            return client.compose(
                given.pop("slug"),
                given.pop("paths"),
                message=given.pop("message", None),
                at=at,
                author=person,
                **given,
            )

        try:
            with self._changing():
                return self._entry.submit(key, body, compose, files)
        except ValueError as error:
            raise ProblemError(422, str(error)) from None
        except OtherBodyError:
            text = "this Idempotency-Key was used for another request. Fix: use a new key for a new request"
            raise ProblemError(422, text) from None

    def refused(self, paths: Sequence[str]) -> list[str]:
        """Which of these will not be published, with the reasons."""
        warnings = [] if paths else ["nothing will be published: the job declares no paths"]
        for path in paths:
            try:
                self._allowlist.resolve(path)
            except PathRefusedError as refused:
                warnings.append(for_people(f"{path} will not be published: {refused.reason}"))
        return warnings

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        except UnknownJobError as error:
            raise ProblemError(404, str(error)) from None
        except SteeringError as error:
            raise ProblemError(409, str(error)) from None
        self._entry.changed()
        self._keeper.renew()


def until_of(seconds: int | None, until: str | None) -> float | None:
    """When a pause ends. Raises ProblemError."""
    now = time.time()
    ends = [] if seconds is None else [now + seconds]
    if until is not None:
        try:
            ends.append(parse_time(until))
        except ValueError as error:
            raise ProblemError(422, str(error)) from None
        if ends[-1] <= now:
            raise ProblemError(409, f"{until} is over already")
    return min(ends, default=None)
