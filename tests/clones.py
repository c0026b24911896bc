"""A site of a cluster, for tests of its clones and its publisher: a real remote, and nodes as wanted.

`from clones import Cluster, small`. What all nodes share, a database in production, is kept in memory here.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sites import Site, write_files

from briter_worker.allowlist import Allowlist
from briter_worker.errors import UnavailableError
from briter_worker.git.clone import open_clone
from briter_worker.git.commits import Person
from briter_worker.git.payloads import SubmittedCopies
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.staging import Staging
from briter_worker.job import Job
from briter_worker.ports import Claim, Payload, Plan, PublishedVersion, SubmittedFile, blob_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from briter_worker.git.repository import Repository
    from briter_worker.ports import BaseVersion, Outcome

WORKER = Person("Briter Worker", "briter-worker@localhost")
NOW = 1_800_000_000.0
LINES = "".join(f"line {n}\n" for n in range(20))


@dataclass
class Database:
    """What all nodes share. It implements `Payloads`, `BaseVersions` and `PlanStore`."""

    payloads: dict[str, Payload] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    known: dict[str, BaseVersion] = field(default_factory=dict)
    recorded: dict[str, Plan] = field(default_factory=dict)
    is_away: bool = False

    def of(self, keys: Collection[str]) -> Mapping[str, Payload]:
        return {key: self.payloads[key] for key in keys}

    def content(self, blob: str) -> bytes:
        if self.is_away:
            raise UnavailableError("the database is away")
        return self.contents[blob]

    def published(self, paths: Collection[str]) -> Mapping[str, PublishedVersion]:
        return {path: PublishedVersion(self.saved[path]) for path in paths if path in self.saved}

    def acknowledge(self, key: str) -> None:
        """As the queue does in the transaction that removes a published job."""
        for each in self.payloads.pop(key).files:
            self.saved[each.path] = max(each.saved_at, self.saved.get(each.path, 0.0))

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        return {path: self.known[path] for path in paths if path in self.known}

    def remember(
        self,
        versions: Mapping[str, BaseVersion],
        contents: Mapping[str, bytes],
        tip: str | None = None,  # noqa: ARG002 - nothing is restored here
    ) -> None:
        if self.is_away:
            raise UnavailableError("the database is away")
        self.known |= versions
        self.contents |= contents

    def record(self, plan: Plan) -> None:
        self.recorded[plan.id] = plan

    def plans(self) -> Sequence[Plan]:
        return list(self.recorded.values())

    def drop(self, plan: Plan) -> None:
        self.recorded.pop(plan.id, None)


@dataclass
class Cluster:
    """One site's remote, the database, and as many nodes as are asked for."""

    root: Path
    url: str
    branch: str = "main"
    database: Database = field(default_factory=Database)
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
        files: Mapping[str, str | bytes | None],
        *,
        folders: Iterable[str] = (),
        at: float | None = None,
        bases: Mapping[str, str | None] | None = None,
    ) -> Claim:
        """A CMS saves a post: a job with all that it publishes."""
        self.clock += 1
        saved_at = self.clock if at is None else at
        submitted: list[SubmittedFile] = []
        for path, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            blob = None if content is None else blob_id(content)
            if content is not None and blob is not None:
                self.database.contents[blob] = content
            base = (bases or {}).get(path)
            submitted.append(SubmittedFile(path, "100644", blob, saved_at, base, path in (bases or {})))
        key = f"{slug}-{self.clock}"
        folders = tuple(folders)
        self.database.payloads[key] = Payload(tuple(submitted), folders)
        job = Job(id=key, slug=slug, paths=folders or tuple(files), created_at=saved_at)
        return Claim(key, job, 1)

    @contextmanager
    def opened(self, node: str = "one") -> Iterator[Repository]:
        """A node's clone."""
        with open_clone(
            self.folder(node), url=self.url, branch=self.branch, credentials=self.credentials, timeout=30
        ) as repository:
            yield repository

    def publisher(self, repository: Repository) -> GitPublisher:
        staging = Staging(repository, Allowlist(["content"]), 100 << 20, lambda *_: None)
        return GitPublisher(
            repository,
            copies=SubmittedCopies(staging, self.database, self.database),
            plans=self.database,
            bases=self.database,
            identity=WORKER,
            dry_run=False,
            progress=lambda _phase, _done, _total: None,
            warn=lambda text, _fix: self.warned.append(text),
            still_ours=lambda: True,
        )

    def publish(
        self,
        *claims: Claim,
        node: str = "one",
        scheduled: Mapping[str, float] | None = None,
        settle: bool = True,
    ) -> dict[str, Outcome]:
        """Drain these on a node; the outcomes by slug. `settle` False: the worker dies after the push."""
        slugs = {claim.key: claim.job.slug for claim in claims}
        found: dict[str, Outcome] = {}
        with self.opened(node) as repository:
            publisher = self.publisher(repository)
            for outcomes in publisher.publish(
                claims,
                scheduled=lambda: scheduled or {},
                check=lambda _key, _changes: None,
                cancelled=tuple,
                now=NOW,
            ):
                found |= {slugs[outcome.key]: outcome for outcome in outcomes}
                if not settle:
                    break
                for outcome in outcomes:
                    if outcome.failure is None:
                        self.database.acknowledge(outcome.key)
        return found

    def resolve(self, node: str = "one") -> dict[str, str]:
        """What landed of the recorded plans: commits by claim key."""
        with self.opened(node) as repository:
            landed = self.publisher(repository).resolve()
            return {each.key: each.commit or "" for outcomes in landed for each in outcomes}


def made(root: Path, files: Mapping[str, str | None]) -> Cluster:
    """A remote with these files in one commit."""
    cluster = Cluster(root, str(root / "remote.git"))
    cluster.git("init", "-q", "--bare", "--initial-branch=main", str(cluster.remote), cwd=root)
    cluster.git("init", "-q", "--initial-branch=main", str(root / "other"), cwd=root)
    cluster.git("remote", "add", "origin", str(cluster.remote), cwd=root / "other")
    cluster.git("config", "uploadpack.allowFilter", "true")
    write_files(root / "other", files)
    cluster.site.push_elsewhere(message="Start the site")
    cluster.git("branch", "-q", "--set-upstream-to=origin/main", cwd=root / "other")
    return cluster


def small(root: Path) -> Cluster:
    """A site with a few posts."""
    return made(
        root,
        {"content/posts/welcome.md": "# Welcome\n", "content/posts/b.md": LINES, "README.md": "Hello\n"},
    )


def blobs_here(cluster: Cluster, node: str = "one") -> set[str]:
    """The contents that a node's clone has."""
    options = ("--batch-all-objects", "--batch-check=%(objecttype) %(objectname)")
    out = cluster.git("cat-file", *options, cwd=cluster.clone(node))
    return {line.split()[1] for line in out.splitlines() if line.startswith("blob")}
