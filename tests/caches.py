"""A site of a cluster, for tests of its publisher: a real remote, and caches on as many hosts as wanted.

`from caches import Cluster, small`. What all hosts share, a database in production, is kept in memory here.
"""

from __future__ import annotations

import hashlib
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sites import PERSON

from briter_worker.allowlist import Allowlist
from briter_worker.errors import AwayError
from briter_worker.git.cache import Cache, open_cache
from briter_worker.git.commits import Person
from briter_worker.git.delivering import open_publisher
from briter_worker.ports import Delivered, Delivery, Plan, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from briter_worker.git.bases import Base
    from briter_worker.git.publisher import GitPublisher
    from briter_worker.ports import Outcome

WORKER = Person("Briter Worker", "briter-worker@localhost")
NOW = 1_800_000_000.0
LINES = "".join(f"line {n}\n" for n in range(20))
PART = 1 << 20


def named(content: bytes) -> str:
    """The name that git gives a content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Database:
    """What all hosts share: what jobs brought, what was published of it, and what it started from."""

    deliveries: dict[str, Delivery] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    known: dict[str, Base] = field(default_factory=dict)
    starts: dict[str, bytes] = field(default_factory=dict)
    tip: str | None = None
    is_away: bool = False

    def of(self, keys: Collection[str]) -> Mapping[str, Delivery]:
        return {key: self.deliveries[key] for key in keys}

    def content(self, blob: str) -> Iterator[bytes]:
        if self.is_away:
            raise AwayError("the database is away")
        content = self.contents[blob]
        for at in range(0, len(content), PART):
            yield content[at : at + PART]

    def published(self, paths: Collection[str]) -> Mapping[str, float]:
        return {path: self.saved[path] for path in paths if path in self.saved}

    def settle(self, key: str) -> None:
        """As the queue does in the transaction that removes a published job."""
        for each in self.deliveries.pop(key).files:
            self.saved[each.path] = max(each.saved_at, self.saved.get(each.path, 0.0))
        needed = {each.blob for delivery in self.deliveries.values() for each in delivery.files}
        self.contents = {blob: content for blob, content in self.contents.items() if blob in needed}


@dataclass
class Versions:
    """The part of it that says what the CMS's files started from."""

    database: Database

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        return {path: self.database.known[path] for path in paths if path in self.database.known}

    def remember(self, bases: Mapping[str, Base], contents: Mapping[str, bytes]) -> None:
        if self.database.is_away:
            raise AwayError("the database is away")
        self.database.known |= bases
        self.database.starts |= contents

    def content(self, blob: str) -> bytes | None:
        return self.database.starts.get(blob)


@dataclass
class Cluster:
    """One site's remote, the database, and as many hosts as are asked for."""

    root: Path
    url: str
    branch: str = "main"
    database: Database = field(default_factory=Database)
    credentials: Mapping[str, str] | None = None
    warned: list[str] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    clock: float = NOW
    max_file_bytes: int = 100 << 20
    running: list[GitPublisher] = field(default_factory=list)

    @property
    def remote(self) -> Path:
        return self.root / "remote.git"

    def cache(self, host: str = "one") -> Path:
        """Where this host has the site."""
        return self.root / "hosts" / host / "site"

    def repository(self, host: str = "one") -> Path:
        return self.cache(host) / "0"

    def git(self, *args: str, cwd: Path | None = None) -> str:
        """Run git as a person would, on the remote if nowhere else."""
        done = subprocess.run(
            ["git", *PERSON, *args], cwd=cwd or self.remote, capture_output=True, check=False
        )
        assert done.returncode == 0, f"git {' '.join(args)}: {done.stderr.decode()}"
        return done.stdout.decode().strip()

    def log(self, branch: str = "main") -> list[str]:
        """The subjects on the remote's branch, newest first."""
        return self.git("log", "--format=%s", branch).splitlines()

    def tip(self) -> str:
        return self.git("rev-parse", "main")

    def file(self, path: str, branch: str = "main") -> str | None:
        """The remote's version of a file; None when it has none."""
        done = subprocess.run(
            ["git", "cat-file", "blob", f"refs/heads/{branch}:{path}"],
            cwd=self.remote,
            capture_output=True,
            check=False,
        )
        return done.stdout.decode() if done.returncode == 0 else None

    def person(self, changes: Mapping[str, str | None], message: str = "Somebody else's") -> str:
        """Somebody changes files on the remote; the new commit."""
        clone = self.root / "person"
        if not clone.exists():
            self.git("clone", "-q", str(self.remote), str(clone), cwd=self.root)
        self.git("pull", "-q", "--rebase", cwd=clone)
        for path, text in changes.items():
            file = clone / path
            if text is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode())
        self.git("add", "-A", cwd=clone)
        self.git("commit", "-qm", message, cwd=clone)
        self.git("push", "-q", "origin", "HEAD:main", cwd=clone)
        return self.git("rev-parse", "HEAD", cwd=clone)

    def flood(self, commits: int) -> None:
        """Somebody pushes so many commits at once."""
        self.person({"content/theirs.md": "0\n"})
        clone = self.root / "person"
        for number in range(commits):
            self.git("commit", "-qm", str(number), "--allow-empty", cwd=clone)
        self.git("push", "-q", "origin", "HEAD:main", cwd=clone)

    def save(
        self,
        slug: str,
        files: Mapping[str, str | bytes | None],
        *,
        folders: Iterable[str] = (),
        paths: Iterable[str] | None = None,
        at: float | None = None,
        bases: Mapping[str, str | None] | None = None,
        mode: str = "100644",
    ) -> Request:
        """A CMS saves a post: a job with all that it publishes."""
        self.clock += 1
        saved_at = self.clock if at is None else at
        delivered: list[Delivered] = []
        for path, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            if content is not None:
                self.database.contents[named(content)] = content
            delivered.append(
                Delivered(
                    path,
                    mode,
                    None if content is None else named(content),
                    saved_at,
                    base=(bases or {}).get(path),
                    knows_base=bases is not None and path in bases,
                )
            )
        key = f"{slug}-{self.clock}"
        folders = tuple(folders)
        self.database.deliveries[key] = Delivery(tuple(delivered), folders)
        declared = folders or tuple(files if paths is None else paths)
        return Request(key, slug, declared, f"Publish {slug}")

    @contextmanager
    def publisher(
        self,
        host: str = "one",
        *,
        dry_run: bool = False,
        timeout: float = 30,
        still_ours: Callable[[], bool] = lambda: True,
        tip: str | None = None,
    ) -> Iterator[tuple[Cache, GitPublisher]]:
        """One drain's way to the remote."""
        with open_cache(
            self.cache(host),
            url=self.url,
            branch=self.branch,
            credentials=self.credentials,
            tip=tip or self.database.tip,
            timeout=timeout,
        ) as cache:
            publisher = open_publisher(
                cache,
                deliveries=self.database,
                versions=Versions(self.database),
                allowlist=Allowlist(["content"]),
                identity=WORKER,
                max_file_bytes=self.max_file_bytes,
                dry_run=dry_run,
                progress=lambda _phase, _done, _total: None,
                warn=self.warned.append,
                still_ours=still_ours,
            )
            self.running.append(publisher)
            yield cache, publisher
            publisher.close(lambda: False, wait=0)

    def publish(
        self,
        *requests: Request,
        host: str = "one",
        held: Collection[str] = (),
        dry_run: bool = False,
        settle: bool = True,
        still_ours: Callable[[], bool] = lambda: True,
    ) -> dict[str, Outcome]:
        """Drain these on a host; what became of each, by its slug."""
        slugs = {request.key: request.slug for request in requests}
        found: dict[str, Outcome] = {}
        with self.publisher(host, dry_run=dry_run, still_ours=still_ours) as (cache, publisher):
            for outcomes in publisher.publish(
                requests,
                held=held,
                examine=lambda _key, _changes: None,
                cancelled=tuple,
                record=self.plans.append,
                now=NOW + len(self.plans),
            ):
                for outcome in outcomes:
                    found[slugs[outcome.key]] = outcome
                    if outcome.failure is None and settle and not dry_run:
                        self.database.settle(outcome.key)
            if settle:
                self.database.tip = cache.tip
        return found

    def landed(self, plan: Plan, *, host: str = "one") -> bool:
        with self.publisher(host) as (_, publisher):
            return publisher.landed(plan)


def made(root: Path, files: Mapping[str, str], *options: str) -> Cluster:
    """A remote with these files in one commit."""
    cluster = Cluster(root, str(root / "remote.git"))
    cluster.git("init", "-q", "--bare", "--initial-branch=main", *options, str(cluster.remote), cwd=root)
    clone = root / "person"
    cluster.git("init", "-q", "--initial-branch=main", *options, str(clone), cwd=root)
    cluster.git("remote", "add", "origin", str(cluster.remote), cwd=clone)
    cluster.git("config", "uploadpack.allowFilter", "true")
    for path, text in files.items():
        file = clone / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    cluster.git("add", "-A", cwd=clone)
    cluster.git("commit", "-qm", "Start the site", cwd=clone)
    cluster.git("push", "-q", "--set-upstream", "origin", "main", cwd=clone)
    return cluster


def small(root: Path) -> Cluster:
    """A site with a few posts."""
    return made(
        root,
        {"content/posts/welcome.md": "# Welcome\n", "content/posts/b.md": LINES, "README.md": "Hello\n"},
    )


def blobs_here(cluster: Cluster, host: str = "one") -> set[str]:
    """The contents that a host's cache has."""
    out = cluster.git(
        "cat-file",
        "--batch-all-objects",
        "--batch-check=%(objecttype) %(objectname)",
        cwd=cluster.repository(host),
    )
    return {line.split()[1] for line in out.splitlines() if line.startswith("blob")}
