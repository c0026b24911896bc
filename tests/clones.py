"""A site of a cluster, for tests of its clones and its publisher: a real remote, and nodes as wanted."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from postgres import add_site
from queue_backends import LONGEST_DELAY, NOW, store, take_site
from sites import Site, write_files

from briter_worker.allowlist import Allowlist
from briter_worker.cluster.leases import Leases
from briter_worker.git.clone import open_clone
from briter_worker.git.commits import Person
from briter_worker.git.payloads import SubmittedCopies
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.staging import Staging
from briter_worker.ports import Payload
from briter_worker.queues.postgres.payloads import PayloadSource, PostgresBases
from briter_worker.queues.postgres.queue import PostgresPlans, PostgresQueue
from briter_worker.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from briter_worker.git.repository import Repository
    from briter_worker.ports import Outcome
    from briter_worker.queues.postgres.database import Database

WORKER = Person("Briter Worker", "briter-worker@localhost")
LINES = "".join(f"line {n}\n" for n in range(20))


@dataclass
class Cluster:
    """One site's remote, the database, and as many nodes as are asked for."""

    root: Path
    url: str
    database: Database
    branch: str = "main"
    credentials: Mapping[str, str] | None = None
    warned: list[str] = field(default_factory=list)
    clock: float = NOW

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    def folder(self, node: str = "one") -> Path:
        """Where this node has the site."""
        return self.root / "nodes" / node / "site"

    def clone(self, node: str = "one") -> Path:
        return self.folder(node) / "clone.git"

    @property
    def site(self) -> Site:
        """The remote's folder, as other tests have it."""
        return Site(self.root)

    def git(self, *args: str, cwd: Path | None = None) -> str:
        """Run git as a person would, on the remote if nowhere else."""
        return self.site.git(*args, cwd=cwd or self.remote)

    def log(self, branch: str = "main") -> list[str]:
        """The subjects on the remote's branch, newest first."""
        return self.git("log", "--format=%s", branch).splitlines()

    def tip(self) -> str:
        return self.git("rev-parse", "main")

    def file(self, path: str) -> str | None:
        """The remote's version of a file; None when it has none."""
        return self.site.remote_file(path)

    def person(self, changes: Mapping[str, str | None]) -> None:
        """Somebody changes files on the remote."""
        self.site.push_elsewhere(changes, "Somebody else's")

    def save(
        self,
        slug: str,
        files: Mapping[str, str | None],
        *,
        folders: Sequence[str] = (),
        bases: Mapping[str, str | None] | None = None,
    ) -> str:
        """A CMS saves a post: a job with all that it publishes. Return its slug."""
        self.clock += 1
        contents = {path: None if text is None else text.encode() for path, text in files.items()}
        source = PayloadSource.of(contents, folders=folders)
        submitted = tuple(
            file._replace(base=(bases or {}).get(file.path), has_base=file.path in (bases or {}))
            for file in source.payload.files
        )
        return self.submit(slug, source._replace(payload=Payload(submitted, tuple(folders))))

    def submit(self, slug: str, source: PayloadSource) -> str:
        """Store a job with what it brings."""
        paths = [*(source.payload.folders or (file.path for file in source.payload.files))]
        store(self.database, {"slug": slug, "paths": paths}, source, now=self.clock)
        return slug

    @contextmanager
    def opened(self, node: str = "one") -> Iterator[Repository]:
        """A node's clone."""
        with open_clone(
            self.folder(node), url=self.url, branch=self.branch, credentials=self.credentials, timeout=30
        ) as repository:
            yield repository

    def take(self) -> int:
        """A worker takes the site; return its fencing token."""
        return int(take_site(self.database)["token"])

    def plans(self, token: int) -> PostgresPlans:
        return PostgresPlans(self.database, "site", token=token)

    def publisher(self, repository: Repository, token: int) -> GitPublisher:
        staging = Staging(repository, Allowlist(["content"]), 100 << 20, lambda *_: None)
        bases = PostgresBases(self.database, "site", token=token)
        return GitPublisher(
            repository,
            copies=SubmittedCopies(staging, bases, bases),
            plans=self.plans(token),
            bases=bases,
            identity=WORKER,
            dry_run=False,
            progress=lambda _phase, _done, _total: None,
            warn=lambda text, _fix: self.warned.append(text),
            still_ours=lambda: True,
        )

    def publish(
        self,
        *slugs: str,
        node: str = "one",
        scheduled: Mapping[str, float] | None = None,
        settle: bool = True,
    ) -> dict[str, Outcome]:
        """Drain these on a node; the outcomes by slug. `settle` False: the worker dies after the push."""
        token = self.take()
        queue = PostgresQueue(self.database, "site", token=token, longest_delay=LONGEST_DELAY, dry_run=False)
        waiting = [*queue.recover(self.clock), *queue.claim(self.clock).claims]
        claims = [claim for slug in slugs for claim in waiting if claim.job.slug == slug]
        queue.release([claim for claim in waiting if claim.job.slug not in slugs])
        by_key = {claim.key: claim for claim in claims}
        found: dict[str, Outcome] = {}
        with self.opened(node) as repository:
            publisher = self.publisher(repository, token)
            for outcomes in publisher.publish(
                claims,
                scheduled=lambda: scheduled or {},
                check=lambda _key, _changes: None,
                withdrawn=dict,
                now=NOW,
            ):
                found |= {by_key[outcome.key].job.slug: outcome for outcome in outcomes}
                if not settle:
                    break
                done = [by_key[outcome.key] for outcome in outcomes if outcome.failure is None]
                queue.acknowledge(done, {})
            else:
                self.release(publisher, token)
        return found

    def resolve(self, node: str = "one") -> int:
        """Look what landed of the recorded plans; return the number of its jobs."""
        with self.opened(node) as repository:
            token = self.take()
            publisher = self.publisher(repository, token)
            number = sum(len(outcomes) for outcomes in publisher.resolve())
            self.release(publisher, token)
        return number

    def release(self, publisher: GitPublisher, token: int) -> None:
        """The worker leaves the site, which deletes what it has resolved."""
        plans = cast("PostgresPlans", publisher.plans).dropped
        settings = load_settings({"BRITER_APP_ROOT": str(self.root)})
        Leases(self.database, "worker", settings).release("site", token, is_slow=False, plans=plans)


def made(root: Path, database: Database, files: Mapping[str, str | None]) -> Cluster:
    """A remote with these files in one commit."""
    cluster = Cluster(root, str(root / "remote.git"), database)
    cluster.git("init", "-q", "--bare", "--initial-branch=main", str(cluster.remote), cwd=root)
    cluster.git("init", "-q", "--initial-branch=main", str(root / "other"), cwd=root)
    cluster.git("remote", "add", "origin", str(cluster.remote), cwd=root / "other")
    cluster.git("config", "uploadpack.allowFilter", "true")
    write_files(root / "other", files)
    cluster.site.push_elsewhere(message="Start the site")
    cluster.git("branch", "-q", "--set-upstream-to=origin/main", cwd=root / "other")
    return cluster


def small(root: Path, database: Database) -> Cluster:
    """A site with a few posts."""
    add_site(database)
    return made(
        root,
        database,
        {"content/posts/welcome.md": "# Welcome\n", "content/posts/b.md": LINES, "README.md": "Hello\n"},
    )


def blobs_here(cluster: Cluster, node: str = "one") -> set[str]:
    """The contents that a node's clone has."""
    options = ("--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    out = cluster.git("cat-file", *options, cwd=cluster.clone(node))
    return {line.split()[1] for line in out.splitlines() if line.startswith("blob")}
