"""A drain on a real queue, with a publisher that follows a script."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

import pytest
from queue_engines import NOW, Disk

from briter_worker.drain import Drain
from briter_worker.events import Progress
from briter_worker.plugins import Plugins
from briter_worker.ports import Backoff, Change, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.events import Event
    from briter_worker.job import State
    from briter_worker.ports import Publisher, Request

COMMIT = "c" * 40
MAX_ATTEMPTS = 3


class KilledError(BaseException):
    """The process is gone at this point."""


@dataclass
class FakePublisher:
    """Publishes every request with one push, unless a step raises; keeps its plans across deaths."""

    steps: deque[BaseException | None] = field(default_factory=deque)
    """What each push raises after its plan was recorded."""
    remote: deque[bool | Exception] = field(default_factory=deque)
    """What the remote answers about each plan: whether the push landed."""
    plans: list[tuple[str, ...]] = field(default_factory=list)
    asked: int = 0
    requests: list[Request] = field(default_factory=list)
    scheduled: Mapping[str, float] = field(default_factory=dict)
    now: float | None = None
    cancelled: Callable[[], Collection[str]] = tuple
    outcome: Callable[[Request], Outcome] = lambda request: Outcome(request.key, Result.PUBLISHED, COMMIT)
    refuses: Callable[[Request], Exception | None] = lambda _: None
    """Raised for a whole batch that contains such a request."""
    published: list[list[str]] = field(default_factory=list)
    while_reading: Callable[[], None] = lambda: None
    before_push: Callable[[], None] = lambda: None

    def publish(
        self,
        requests: Sequence[Request],
        *,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        self.requests, self.now, self.cancelled = list(requests), now, cancelled
        self.scheduled = scheduled()
        self.while_reading()
        checked = {
            r.key: check(r.key, [Change(path, "100644", COMMIT) for path in r.paths]) for r in requests
        }
        for request in requests:
            if error := self.refuses(request):
                raise error
        if ended := [outcome for outcome in checked.values() if outcome]:
            yield ended
        pushed = [request for request in requests if checked[request.key] is None]
        if not pushed:
            return
        plan = tuple(request.key for request in pushed)
        self.plans.append(plan)
        self.before_push()
        step = self.steps.popleft() if self.steps else None
        if step is not None:
            raise step
        self.published.append(sorted(request.slug for request in pushed))
        yield [self.outcome(request) for request in pushed]
        self.plans.remove(plan)

    def resolve(self) -> Iterator[Mapping[str, str]]:
        for plan in list(self.plans):
            self.asked += 1
            answer = self.remote.popleft() if self.remote else False
            if isinstance(answer, Exception):
                raise answer
            yield dict.fromkeys(plan, COMMIT) if answer else {}
            self.plans.remove(plan)

    def undecided(self) -> Collection[str]:
        return {key for plan in self.plans for key in plan}

    def tidy(self, now: float) -> None:
        """Nothing to do."""


@dataclass
class Bench:
    """A drain on a real queue."""

    disk: Disk
    publisher: FakePublisher = field(default_factory=FakePublisher)
    events: list[Event] = field(default_factory=list)
    """What was emitted, without the progress."""
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    stopping: bool = False
    dry_run: bool = False
    plugins: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new worker on the same folder."""
        self.disk.restart(dry_run=self.dry_run)
        self.drain = Drain(
            queue=self.disk.queue,
            publisher=self.open_publisher,
            emit=self,
            plugins=cache(partial(Plugins, {}, self.plugins)),
            backoff=Backoff((60.0,)),
            max_attempts=MAX_ATTEMPTS,
            dry_run=self.dry_run,
            stopping=lambda: self.stopping,
            clock=lambda: NOW,
        )

    def open_publisher(self) -> Publisher:
        return self.publisher

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, Progress):
            self.progress.append((event.phase, event.done, event.total))
        else:
            self.events.append(event)

    def deliver(self, events: Sequence[Event], acknowledge: Callable[[], None], /) -> None:
        acknowledge()
        self.events.extend(events)

    def save(self, *slugs: str) -> None:
        for slug in slugs:
            self.disk.save(slug, [f"content/{slug}.md"])

    def cancel(self, slug: str) -> None:
        self.disk.queue.cancel(slug, NOW)

    def kill(self, step: Callable[[], object]) -> None:
        """The worker dies in the middle of its push."""
        self.publisher.steps.append(KilledError())
        with pytest.raises(KilledError):
            step()
        self.start()

    def names(self) -> list[str]:
        """The names of the events."""
        return [event.name for event in self.events]

    def state(self, slug: str) -> tuple[State, int]:
        (row,) = [row for row in self.disk.queue.jobs(NOW) if row.job.slug == slug]
        return row.state, row.job.attempts
