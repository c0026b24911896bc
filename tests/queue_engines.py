"""Each queue behind one face, so that one suite of behaviours runs against all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from briter_worker.job import State, format_time
from briter_worker.queues.disk import DiskQueue
from briter_worker.queues.postgres import tokens
from briter_worker.queues.postgres.queue import PostgresQueue
from briter_worker.queues.postgres.writing import submit

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.queues.postgres.database import Database

NOW = 1_800_000_000.0
MAX_ATTEMPTS = 3
LONGEST_DELAY = 1800.0


class Engine(Protocol):
    """A queue, and what stands around it: writers, a worker that dies, a person who looks."""

    @property
    def queue(self) -> DiskQueue | PostgresQueue:
        """What is under test."""
        ...

    def save(
        self, slug: str, paths: list[str], *, created: float = NOW, name: str = "", **keys: object
    ) -> str:
        """A CMS saves the post; the job's id. With a `name`, beside its other saves, not over one of them."""
        ...

    def die(self) -> None:
        """The worker is killed and another one starts: only what was durable is left."""
        ...

    def rows(self, slug: str, now: float = NOW) -> list[tuple[State, tuple[str, ...]]]:
        """What a person sees of the slug."""
        ...

    def document(self, slug: str, now: float = NOW) -> dict[str, Any]:
        """The slug's only job, with all its keys."""
        ...


@dataclass
class Disk:
    """The folder of files; a CMS may call them after ids, or after slugs and so write one over another."""

    folder: Path
    named_after_slugs: bool = False
    queue: DiskQueue = field(init=False)
    saves: int = 0

    def __post_init__(self) -> None:
        self.root = self.folder / "queue"
        self.root.mkdir(parents=True, exist_ok=True)
        self.die()

    def die(self) -> None:
        self.queue = DiskQueue(
            self.root,
            self.folder / "quarantine",
            max_attempts=MAX_ATTEMPTS,
            longest_delay=LONGEST_DELAY,
            clock=lambda: NOW,
        )

    def save(
        self, slug: str, paths: list[str], *, created: float = NOW, name: str = "", **keys: object
    ) -> str:
        self.saves += 1
        job_id = keys.pop("id", f"job{self.saves:05}")
        document = {"id": job_id, "slug": slug, "paths": paths, "createdAt": format_time(created), **keys}
        temp = self.root / f".{job_id}.tmp"
        temp.write_text(json.dumps(document))
        temp.rename(self.root / f"{name or (slug if self.named_after_slugs else job_id)}.json")
        return str(job_id)

    def rows(self, slug: str, now: float = NOW) -> list[tuple[State, tuple[str, ...]]]:
        return [(row.state, row.job.paths) for row in self.queue.jobs(now) if row.job.slug == slug]

    def document(self, slug: str, now: float = NOW) -> dict[str, Any]:
        (row,) = (row for row in self.queue.jobs(now) if row.job.slug == slug)
        return row.document


class _Drain(PostgresQueue):
    """Takes its token when it does a worker's work: a person who only looks takes nothing from anybody."""

    taken: int | None = None

    @property
    def token(self) -> int:
        if self.taken is None:
            self.taken = tokens.take(self._database, self._site, "worker")
        return self.taken


@dataclass
class Postgres:
    """The rows of one site, beside another site's."""

    database: Database
    site: str = "site"
    dry_run: bool = False
    queue: PostgresQueue = field(init=False)
    saves: int = 0

    def __post_init__(self) -> None:
        self.die()

    def die(self) -> None:
        self.queue = _Drain(
            self.database,
            self.site,
            token=None,
            max_attempts=MAX_ATTEMPTS,
            longest_delay=LONGEST_DELAY,
            dry_run=self.dry_run,
            clock=lambda: NOW,
        )

    def save(
        self,
        slug: str,
        paths: list[str],
        *,
        created: float = NOW,
        name: str = "",  # noqa: ARG002 - there are no files
        **keys: object,
    ) -> str:
        self.saves += 1
        job_id = str(keys.pop("id", f"job{self.saves:05}"))
        document = {"id": job_id, "slug": slug, "paths": paths, "createdAt": format_time(created), **keys}
        submit(self.database, self.site, document, now=NOW)
        return job_id

    def rows(self, slug: str, now: float = NOW) -> list[tuple[State, tuple[str, ...]]]:
        return [(row.state, row.job.paths) for row in self.queue.jobs(now) if row.job.slug == slug]

    def document(self, slug: str, now: float = NOW) -> dict[str, Any]:
        (row,) = (row for row in self.queue.jobs(now) if row.job.slug == slug)
        return row.document
