"""A drain on a real queue, with a publisher that does as it is told."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from queue_engines import MAX_ATTEMPTS, NOW, Disk

from briter_worker.backoff import Backoff
from briter_worker.drain import Drain
from briter_worker.events import Progress
from briter_worker.plugins import Plugins
from briter_worker.ports import Change, Outcome, Plan
from briter_worker.settling import Desk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from briter_worker.events import Event
    from briter_worker.job import State
    from briter_worker.ports import Request

COMMIT = "c" * 40


class KilledError(BaseException):
    """The process is gone at this point."""


def plan_of(requests: Sequence[Request]) -> Plan:
    return Plan(
        "0" * 40, COMMIT, "refs/briter/x", dict.fromkeys([r.key for r in requests], COMMIT), {}, False
    )


@dataclass
class FakePublisher:
    """Publishes all at once, unless a step raises; knows what it was asked whether it landed."""

    steps: deque[BaseException | None] = field(default_factory=deque)
    remote: deque[bool | Exception] = field(default_factory=deque)
    asked: list[Plan] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    held: Collection[str] = ()
    now: float | None = None
    cancelled: Callable[[], Collection[str]] = tuple
    outcome: Callable[[Request], Outcome] = lambda request: Outcome(request.key, COMMIT)
    parts: int = 1
    """In how many pushes it is published."""
    flushed: str | None = None
    published: list[list[str]] = field(default_factory=list)
    before_push: Callable[[], None] = lambda: None
    while_reading: Callable[[], None] = lambda: None

    def publish(
        self,
        requests: Sequence[Request],
        *,
        held: Collection[str],
        record: Callable[[Plan], None],
        now: float,
        examine: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
    ) -> Iterator[Sequence[Outcome]]:
        self.requests, self.held, self.now, self.cancelled = list(requests), held, now, cancelled
        self.while_reading()
        read = {
            r.key: examine(r.key, [Change(path, "100644", COMMIT, None) for path in r.paths])
            for r in requests
        }
        if ended := [outcome for outcome in read.values() if outcome]:
            yield ended
        requests = [request for request in requests if read[request.key] is None]
        for part in range(self.parts if requests else 0):
            pushed = requests[part :: self.parts]
            record(plan_of(pushed))
            self.before_push()
            step = self.steps.popleft() if self.steps else None
            if step is not None:
                raise step
            self.published.append(sorted(request.slug for request in pushed))
            yield [self.outcome(request) for request in pushed]

    def landed(self, plan: Plan) -> bool:
        self.asked.append(plan)
        answer = self.remote.popleft() if self.remote else False
        if isinstance(answer, Exception):
            raise answer
        return answer

    def flush(self, now: float) -> str | None:
        self.now = now
        return self.flushed

    def tidy(self, now: float) -> None:
        """Nothing to do."""


@dataclass
class Bench:
    """A drain on a real queue."""

    disk: Disk
    publisher: FakePublisher = field(default_factory=FakePublisher)
    events: list[Event] = field(default_factory=list)
    """What is told, but for the progress."""
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    stopping: bool = False
    dry_run: bool = False
    plugins: tuple[object, ...] = ()
    timer: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new worker on the same folder."""
        self.disk.die()
        desk = Desk(
            queue=self.disk.queue,
            emit=self.tell,
            backoff=Backoff((60.0,)),
            max_attempts=MAX_ATTEMPTS,
            extensions=Plugins({}, self.plugins),
            dry_run=self.dry_run,
            clock=lambda: NOW,
            timer=self.timer,
        )
        self.drain = Drain(desk, lambda: self.publisher, stopping=lambda: self.stopping)

    def tell(self, event: Event, /) -> None:
        if isinstance(event, Progress):
            self.progress.append((event.phase, event.done, event.total))
        else:
            self.events.append(event)

    def save(self, *slugs: str) -> None:
        for slug in slugs:
            self.disk.save(slug, [f"content/{slug}.md"])

    def killed(self, step: Callable[[], object]) -> None:
        """The worker dies in the middle of its push."""
        self.publisher.steps.append(KilledError())
        with pytest.raises(KilledError):
            step()
        self.start()

    def names(self) -> list[str]:
        """What the log would tell."""
        return [event.name for event in self.events]

    def state(self, slug: str) -> tuple[State, int]:
        ((row),) = [row for row in self.disk.queue.jobs(NOW) if row.job.slug == slug]
        return row.state, row.job.attempts
