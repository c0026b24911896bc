"""Publishing from a cache that may be lost at any time, of what jobs brought along."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from faults.servers import HttpRemote, asks_for, cuts_after, git_daemon, http_remote
from machine import provide
from sites import PERSON

from briter_worker.allowlist import Allowlist
from briter_worker.errors import Failure, LockLostError, PublishError
from briter_worker.git.cache import Cache, open_cache, open_publisher
from briter_worker.git.commits import Person
from briter_worker.ports import Delivered, Delivery, Plan, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

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

    def of(self, keys: Collection[str]) -> Mapping[str, Delivery]:
        return {key: self.deliveries[key] for key in keys}

    def content(self, blob: str) -> Iterator[bytes]:
        content = self.contents[blob]
        for at in range(0, len(content), PART):
            yield content[at : at + PART]

    def published(self, paths: Collection[str]) -> Mapping[str, float]:
        return {path: self.saved[path] for path in paths if path in self.saved}

    def settle(self, key: str) -> None:
        """As the queue does in the transaction that removes a published job."""
        for each in self.deliveries.pop(key).files:
            self.saved[each.path] = max(each.saved_at, self.saved.get(each.path, 0.0))


@dataclass
class Versions:
    """The part of it that says what the CMS's files started from."""

    database: Database

    def bases(self, paths: Collection[str]) -> Mapping[str, Base]:
        return {path: self.database.known[path] for path in paths if path in self.database.known}

    def remember(self, bases: Mapping[str, Base], contents: Mapping[str, bytes]) -> None:
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
                max_file_bytes=100 << 20,
                dry_run=dry_run,
                progress=lambda _phase, _done, _total: None,
                warn=self.warned.append,
                still_ours=still_ours,
            )
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


def made(root: Path, files: Mapping[str, str]) -> Cluster:
    """A remote with these files in one commit."""
    cluster = Cluster(root, str(root / "remote.git"))
    cluster.git("init", "-q", "--bare", "--initial-branch=main", str(cluster.remote), cwd=root)
    clone = root / "person"
    cluster.git("clone", "-q", str(cluster.remote), str(clone), cwd=root)
    cluster.git("symbolic-ref", "HEAD", "refs/heads/main", cwd=clone)
    cluster.git("config", "uploadpack.allowFilter", "true")
    for path, text in files.items():
        file = clone / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    cluster.git("add", "-A", cwd=clone)
    cluster.git("commit", "-qm", "Start the site", cwd=clone)
    cluster.git("push", "-q", "origin", "main", cwd=clone)
    return cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return made(
        tmp_path,
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


# What jobs brought is what is published


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_what_a_job_brought_is_published_from_a_fresh_cache(cluster: Cluster, *, filters: bool) -> None:
    cluster.git("config", "uploadpack.allowFilter", str(filters).lower())
    a = cluster.save("a", {"content/posts/a.md": "A\n"})
    outcome = cluster.publish(a)["a"]
    assert (outcome.failure, outcome.commit) == (None, cluster.tip())
    assert cluster.file("content/posts/a.md") == "A\n"
    assert cluster.file("content/posts/b.md") == LINES
    assert cluster.log() == ["Publish a", "Start the site"]
    assert cluster.git("show", "-s", "--format=%an %cn", "main") == "Briter Worker Briter Worker"
    assert (named(LINES.encode()) in blobs_here(cluster)) is not filters


def test_every_job_of_a_batch_becomes_its_own_commit_by_one_push(cluster: Cluster) -> None:
    cluster.publish(*(cluster.save(f"p{n}", {f"content/posts/{n}.md": f"{n}\n"}) for n in range(5)))
    assert cluster.log() == [*(f"Publish p{n}" for n in (4, 3, 2, 1, 0)), "Start the site"]
    assert len(cluster.plans) == 1


def test_a_deleted_post_is_deleted(cluster: Cluster) -> None:
    cluster.publish(cluster.save("welcome", {"content/posts/welcome.md": None}))
    assert cluster.file("content/posts/welcome.md") is None
    assert cluster.file("content/posts/b.md") == LINES


def test_a_folder_is_published_with_what_is_gone_from_it(cluster: Cluster) -> None:
    cluster.person({"content/posts/x/old.md": "old\n", "content/posts/x/kept.md": "kept\n"})
    request = cluster.save(
        "x",
        {"content/posts/x/kept.md": "kept\n", "content/posts/x/new.md": "new\n"},
        folders=["content/posts/x"],
    )
    cluster.publish(request)
    names = cluster.git("ls-tree", "-r", "--name-only", "main", "content/posts").splitlines()
    assert names == [f"content/posts/{name}" for name in ("b.md", "welcome.md", "x/kept.md", "x/new.md")]


def test_a_folder_that_is_gone_is_deleted_with_all_that_was_in_it(cluster: Cluster) -> None:
    cluster.person({"content/posts/x/a.md": "a\n", "content/posts/x/y/b.md": "b\n"})
    cluster.publish(cluster.save("x", {"content/posts/x": None}))
    assert cluster.git("ls-tree", "main", "content/posts/x") == ""


def test_what_a_job_declares_and_did_not_bring_is_left_alone(cluster: Cluster) -> None:
    request = cluster.save(
        "a", {"content/posts/a.md": "A\n"}, paths=["content/posts/a.md", "content/posts/b.md"]
    )
    cluster.publish(request)
    assert cluster.file("content/posts/a.md") == "A\n"
    assert cluster.file("content/posts/b.md") == LINES


def test_a_folder_never_carries_what_a_post_on_hold_declares(cluster: Cluster) -> None:
    request = cluster.save(
        "x",
        {"content/posts/x/now.md": "now\n", "content/posts/x/later.md": "later\n"},
        folders=["content/posts/x"],
    )
    cluster.publish(request, held=["content/posts/x/later.md"])
    assert cluster.file("content/posts/x/now.md") == "now\n"
    assert cluster.file("content/posts/x/later.md") is None


def test_the_mode_that_was_saved_is_published(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.sh": "#!/bin/sh\n"}, mode="100755"))
    assert cluster.git("ls-tree", "main", "content/a.sh").startswith("100755 ")


def test_what_is_not_allowed_is_refused_with_the_reason_and_never_written(cluster: Cluster) -> None:
    request = cluster.save(
        "a",
        {"content/a.md": "A\n", "../../escaped.md": "no\n", "content/.git/config": "no\n", "x.md": "no\n"},
    )
    outcome = cluster.publish(request)["a"]
    assert outcome.commit
    assert set(outcome.rejected_paths) == {"../../escaped.md", "content/.git/config", "x.md"}
    assert cluster.git("show", "--format=", "--name-only", "main") == "content/a.md"
    assert not list(cluster.root.rglob("escaped.md"))


def test_a_job_none_of_whose_paths_is_allowed_is_refused(cluster: Cluster) -> None:
    assert cluster.publish(cluster.save("a", {"x.md": "no\n"}))["a"].failure is Failure.NO_PATHS


def test_what_is_there_already_changes_nothing(cluster: Cluster) -> None:
    outcome = cluster.publish(cluster.save("b", {"content/posts/b.md": LINES}))["b"]
    assert (outcome.failure, outcome.commit) == (None, None)
    assert cluster.log() == ["Start the site"]


def test_the_posts_files_do_not_lie_about_when_the_drain_is_over(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    assert os.listdir(cluster.repository()) == [".git"]  # noqa: PTH208


def test_a_content_that_is_not_what_was_saved_is_not_published(cluster: Cluster) -> None:
    torn = cluster.save("torn", {"content/torn.md": "all of it\n"})
    whole = cluster.save("whole", {"content/whole.md": "whole\n"})
    cluster.database.contents[named(b"all of it\n")] = b"all o"
    outcomes = cluster.publish(torn, whole)
    assert outcomes["torn"].failure is Failure.INTERNAL
    assert cluster.log() == ["Publish whole", "Start the site"]


def test_of_two_versions_in_a_batch_the_newer_is_published(cluster: Cluster) -> None:
    new = cluster.save("new", {"content/a.md": "new\n"})
    old = cluster.save("old", {"content/a.md": "old\n"}, at=NOW - 5)
    cluster.publish(old, new)
    assert cluster.file("content/a.md") == "new\n"


def test_an_older_version_never_takes_the_place_of_a_newer_one_that_is_published(cluster: Cluster) -> None:
    old = cluster.save("old", {"content/a.md": "old\n", "content/only.md": "only\n"})
    cluster.publish(cluster.save("new", {"content/a.md": "new\n"}))
    outcome = cluster.publish(old)["old"]
    assert outcome.failure is None
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/only.md") == "only\n"


def test_an_older_deletion_never_takes_a_newer_version_away(cluster: Cluster) -> None:
    gone = cluster.save("gone", {"content/a.md": None})
    folder = cluster.save("folder", {"content/x/1.md": "1\n"}, folders=["content/x"])
    cluster.publish(cluster.save("new", {"content/a.md": "new\n", "content/x/2.md": "2\n"}))
    cluster.publish(gone, folder)
    assert cluster.file("content/a.md") == "new\n"
    assert cluster.file("content/x/2.md") == "2\n"
    assert cluster.file("content/x/1.md") == "1\n"


# Git's own rules


def test_line_ends_are_as_the_sites_attributes_want_them(cluster: Cluster) -> None:
    cluster.person({".gitattributes": "*.md text eol=lf\n", "content/posts/.gitattributes": "*.bin binary\n"})
    first = cluster.save("a", {"content/posts/a.md": "A\r\nB\r\n", "content/posts/a.bin": "1\r\n"})
    cluster.publish(first)
    assert cluster.file("content/posts/a.md") == "A\nB\n"
    assert cluster.file("content/posts/a.bin") == "1\r\n"
    # What it started from is what git made of it, so that the next edit is an edit of that.
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\r\nB\r\nC\r\n"}), host="two")
    assert cluster.file("content/posts/a.md") == "A\nB\nC\n"


def test_large_files_are_stored_by_lfs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    provide("git-lfs", package="git-lfs")
    config = cluster.root / "gitconfig"
    config.write_text('[filter "lfs"]\n\tclean = git-lfs clean -- %f\n\tprocess = git-lfs filter-process\n')
    config.write_text(config.read_text() + "\tsmudge = git-lfs smudge -- %f\n\trequired = true\n")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    home = cluster.root / "home"
    home.mkdir()
    config.rename(home / ".gitconfig")
    monkeypatch.setenv("HOME", str(home))
    cluster.person({".gitattributes": "*.jpg filter=lfs diff=lfs merge=lfs -text\n"})
    cluster.url = f"file://{cluster.remote}"
    cluster.publish(cluster.save("a", {"content/a.jpg": b"\xff\xd8" + b"x" * 1000}))
    assert str(cluster.file("content/a.jpg")).startswith("version https://git-lfs.github.com/spec/v1\n")
    stored = [path for path in (cluster.remote / "lfs" / "objects").rglob("*") if path.is_file()]
    assert [path.stat().st_size for path in stored] == [1002]


def test_what_the_site_ignores_is_refused_unless_git_has_it(cluster: Cluster) -> None:
    cluster.person({"content/tracked.tmp": "tracked\n"})
    cluster.person({".gitignore": "*.tmp\n", "content/posts/.gitignore": "draft-*\n"})
    outcomes = cluster.publish(
        cluster.save("ignored", {"content/a.tmp": "no\n"}),
        cluster.save("draft", {"content/posts/draft-a.md": "no\n"}),
        cluster.save("tracked", {"content/tracked.tmp": "new\n"}),
        cluster.save("folder", {"content/y/a.md": "a\n", "content/y/b.tmp": "no\n"}, folders=["content/y"]),
    )
    assert outcomes["ignored"].failure is outcomes["draft"].failure is Failure.NO_PATHS
    assert cluster.file("content/tracked.tmp") == "new\n"
    assert cluster.git("ls-tree", "--name-only", "main", "content/y/") == "content/y/a.md"


# The remote moved


def test_a_persons_commit_is_built_upon(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.person({"content/theirs.md": "theirs\n"})
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert cluster.log() == ["Publish c", "Somebody else's", "Publish a", "Start the site"]


def test_lines_of_one_post_are_merged_with_a_persons(cluster: Cluster) -> None:
    cluster.publish(cluster.save("b", {"content/posts/b.md": LINES + "first\n"}))
    cluster.person({"content/posts/b.md": LINES.replace("line 1\n", "line one\n") + "first\n"})
    mine = LINES.replace("line 12\n", "line twelve\n") + "first\n"
    outcome = cluster.publish(cluster.save("b", {"content/posts/b.md": mine}), host="two")["b"]
    assert outcome.failure is None
    merged = mine.replace("line 1\n", "line one\n")
    assert cluster.file("content/posts/b.md") == merged
    # The CMS has not got the person's line: its next edit is still one of its own version.
    cluster.publish(cluster.save("b", {"content/posts/b.md": mine + "more\n"}), host="three")
    assert cluster.file("content/posts/b.md") == merged + "more\n"


def test_what_the_author_started_from_is_merged_with_where_it_is_known(cluster: Cluster) -> None:
    cluster.person({"content/posts/b.md": LINES.replace("line 1\n", "line one\n")})
    mine = LINES.replace("line 18\n", "line eighteen\n")
    request = cluster.save(
        "b", {"content/posts/b.md": mine}, bases={"content/posts/b.md": named(LINES.encode())}
    )
    assert cluster.publish(request)["b"].failure is None
    assert cluster.file("content/posts/b.md") == mine.replace("line 1\n", "line one\n")


def test_a_conflict_concerns_its_own_post_alone_and_the_next_save_resolves_it(cluster: Cluster) -> None:
    cluster.publish(cluster.save("w", {"content/posts/welcome.md": "# Hello\n"}))
    cluster.person({"content/posts/welcome.md": "# Theirs\n"})
    ours = {"content/posts/welcome.md": "# Ours\n"}
    for host in ("one", "two"):  # the same content conflicts again, also elsewhere
        outcomes = cluster.publish(
            cluster.save("w", ours), cluster.save("a", {"content/a.md": f"{host}\n"}), host=host
        )
        assert outcomes["w"].failure is Failure.CONFLICT
        assert "conflict/w" in outcomes["w"].text
        assert outcomes["a"].failure is None
        assert cluster.file("content/posts/welcome.md") == "# Theirs\n"
        assert cluster.file("content/posts/welcome.md", "conflict/w") == "# Ours\n"
    cluster.publish(cluster.save("w", {"content/posts/welcome.md": "# Theirs, and ours\n"}), host="three")
    assert cluster.file("content/posts/welcome.md") == "# Theirs, and ours\n"


def test_a_start_that_the_remote_never_had_is_a_conflict_not_an_error(cluster: Cluster) -> None:
    request = cluster.save(
        "b", {"content/posts/b.md": LINES + "x\n"}, bases={"content/posts/b.md": named(b"never pushed\n")}
    )
    a = cluster.save("a", {"content/a.md": "A\n"})
    outcomes = cluster.publish(request, a)
    assert outcomes["b"].failure is Failure.CONFLICT
    assert outcomes["a"].commit
    assert cluster.file("content/posts/b.md") == LINES


def test_a_deleted_branch_is_not_recreated(cluster: Cluster) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "-d", "refs/heads/main")
    c = cluster.save("c", {"content/c.md": "C\n"})
    for host in ("one", "fresh"):
        with pytest.raises(PublishError) as failure:
            cluster.publish(c, host=host)
        assert failure.value.failure is Failure.REMOTE_REWRITTEN
        assert "no branch main" in failure.value.text
    assert cluster.git("for-each-ref") == ""


@pytest.mark.parametrize("lost", [False, True], ids=["cache", "fresh"])
def test_a_rewritten_branch_is_built_upon_and_never_set_back(cluster: Cluster, *, lost: bool) -> None:
    first = cluster.tip()
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    cluster.git("update-ref", "refs/heads/main", first)
    cluster.person({"content/theirs.md": "theirs\n"})
    host = "fresh" if lost else "one"
    outcome = cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), host=host)["c"]
    assert outcome.failure is None
    assert cluster.log() == ["Publish c", "Somebody else's", "Start the site"]
    if not lost:
        assert "rewritten" in cluster.warned[0]


REJECT_BAD = """#!/bin/sh
while read old new ref; do
  for c in $(git rev-list $old..$new); do
    if git show $c | grep -q '^+.*SECRET'; then echo "found a secret in $c" >&2; exit 1; fi
  done
done
"""


def test_a_job_that_the_remote_refuses_fails_alone(cluster: Cluster) -> None:
    hook = cluster.remote / "hooks" / "pre-receive"
    hook.write_text(REJECT_BAD)
    hook.chmod(0o755)
    outcomes = cluster.publish(
        *(cluster.save(f"p{n}", {f"content/{n}.md": "SECRET\n" if n == 1 else "fine\n"}) for n in range(4))
    )
    assert [slug for slug, outcome in outcomes.items() if outcome.failure] == ["p1"]
    assert outcomes["p1"].failure is Failure.REJECTED
    assert len(cluster.log()) == 4


def test_a_dry_run_moves_nothing_anywhere(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    assert cluster.publish(a, dry_run=True)["a"].commit
    before = cluster.tip()
    assert cluster.log() == ["Start the site"]
    refs = cluster.git("for-each-ref", "--format=%(objectname)", cwd=cluster.repository()).splitlines()
    assert set(refs) == {before}
    assert not cluster.landed(cluster.plans[-1])
    assert cluster.publish(a)["a"].commit == cluster.tip()


# The cache may be lost


def lose(cluster: Cluster) -> None:
    shutil.rmtree(cluster.cache())


def lose_the_clone(cluster: Cluster) -> None:
    shutil.rmtree(cluster.repository())


def lose_the_objects(cluster: Cluster) -> None:
    shutil.rmtree(cluster.repository() / ".git" / "objects")


def tear_a_pack(cluster: Cluster) -> None:
    for pack in (cluster.repository() / ".git" / "objects" / "pack").glob("*.pack"):
        pack.chmod(0o644)
        pack.write_bytes(pack.read_bytes()[:40])


def empty_the_branch(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "refs" / "heads" / "main").write_bytes(b"")


def break_the_config(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "config").write_text("[core\n")


def leave_locks(cluster: Cluster) -> None:
    for name in ("packed-refs.lock", "shallow.lock", "index.lock", "refs/heads/main.lock", "HEAD.lock"):
        (cluster.repository() / ".git" / name).touch()


def check_another_branch_out(cluster: Cluster) -> None:
    (cluster.repository() / ".git" / "HEAD").write_text("ref: refs/heads/other\n")


def put_a_file_there(cluster: Cluster) -> None:
    lose_the_clone(cluster)
    cluster.repository().write_text("a file\n")


def put_anothers_clone_there(cluster: Cluster) -> None:
    lose_the_clone(cluster)
    cluster.git("clone", "-q", str(cluster.remote), str(cluster.repository()), cwd=cluster.root)


def litter(cluster: Cluster) -> None:
    (cluster.repository() / "content" / "posts").mkdir(parents=True)
    (cluster.repository() / "content" / "posts" / "b.md").write_text("left by a dead worker\n")


@pytest.mark.parametrize(
    "damage",
    [
        lose,
        lose_the_clone,
        lose_the_objects,
        tear_a_pack,
        empty_the_branch,
        break_the_config,
        leave_locks,
        check_another_branch_out,
        put_a_file_there,
        put_anothers_clone_there,
        litter,
    ],
)
def test_a_cache_that_is_lost_or_broken_costs_no_attempt(
    cluster: Cluster, damage: Callable[[Cluster], None]
) -> None:
    cluster.publish(cluster.save("a", {"content/posts/a.md": "A\n"}))
    damage(cluster)
    outcome = cluster.publish(cluster.save("c", {"content/posts/c/c.md": "C\n"}, folders=["content/posts/c"]))
    assert outcome["c"].commit == cluster.tip()
    assert cluster.log() == ["Publish c", "Publish a", "Start the site"]
    assert cluster.file("content/posts/b.md") == LINES
    cluster.git("fsck", "--strict", "--no-dangling")


def test_a_cache_of_another_address_or_branch_is_not_used(cluster: Cluster, tmp_path: Path) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    (tmp_path / "elsewhere").mkdir()
    other = made(tmp_path / "elsewhere", {"content/other.md": "other\n"})
    url, cluster.url = cluster.url, other.url
    cluster.database.tip = None
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert other.log() == ["Publish c", "Start the site"]
    cluster.url, cluster.branch, cluster.database.tip = url, "drafts", None
    cluster.git("branch", "drafts", "main~1")
    cluster.publish(cluster.save("d", {"content/d.md": "D\n"}))
    assert cluster.log("drafts") == ["Publish d", "Start the site"]
    assert cluster.log() == ["Publish a", "Start the site"]


def test_a_cache_that_has_grown_is_cloned_anew(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("briter_worker.git.cache._MOST_PACKS", 4)
    packs: list[int] = []
    for number in range(12):
        cluster.publish(cluster.save("a", {"content/a.md": f"{number}\n"}))
        packs.append(len(list((cluster.repository() / ".git" / "objects" / "pack").glob("*.pack"))))
    assert max(packs) <= 5
    assert packs.count(2) > 1
    assert len(cluster.log()) == 13


def test_while_somebody_has_a_cache_another_is_taken_and_given_up_after(cluster: Cluster) -> None:
    with cluster.publisher() as (held, _):
        assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit
        assert held.commands.worktree == cluster.repository()
    assert not (cluster.cache() / "1").exists()
    assert cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))["c"].commit


def test_no_thread_and_no_process_outlives_a_drain(cluster: Cluster) -> None:
    before = threading.active_count()
    with cluster.publisher() as (cache, publisher):
        list(
            publisher.publish(
                [cluster.save("a", {"content/a.md": "A\n"})],
                held=(),
                examine=lambda _key, _changes: None,
                cancelled=tuple,
                record=cluster.plans.append,
                now=NOW,
            )
        )
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert not cache.commands.running()


# Many hosts


def test_two_hosts_publish_one_site_by_turns(cluster: Cluster) -> None:
    for number in range(6):
        text = f"{number}\n" + LINES
        outcome = cluster.publish(
            cluster.save("b", {"content/posts/b.md": text}), host="one" if number % 2 else "two"
        )
        assert outcome["b"].commit == cluster.tip()
    assert cluster.file("content/posts/b.md") == "5\n" + LINES
    assert len(cluster.log()) == 7


def test_hosts_that_race_for_the_branch_lose_no_post(cluster: Cluster) -> None:
    failed: list[Exception] = []

    def drain(host: str) -> None:
        try:
            for number in range(6):
                slug = f"{host}-{number}"
                request = replace(cluster.save(slug, {f"content/{slug}.md": slug}), key=f"{slug}-key")
                cluster.database.deliveries[request.key] = Delivery(
                    (Delivered(f"content/{slug}.md", "100644", named(slug.encode()), NOW),)
                )
                while True:
                    try:
                        assert cluster.publish(request, host=host, settle=False)[slug].commit
                        break
                    except PublishError as failure:
                        if failure.failure is not Failure.LOST_RACE:
                            raise
        except Exception as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    threads = [threading.Thread(target=drain, args=[host]) for host in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    expected = [f"Publish {host}-{number}" for host in ("one", "two") for number in range(6)]
    assert sorted(cluster.log()) == sorted([*expected, "Start the site"])


def test_a_host_that_lost_the_site_pushes_nothing(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with pytest.raises(LockLostError):
        cluster.publish(a, still_ours=lambda: False)
    assert cluster.log() == ["Start the site"]


def test_a_push_that_went_out_late_is_refused_and_what_landed_is_found(cluster: Cluster) -> None:
    """A worker is stopped right before its push; another host publishes the same job meanwhile."""
    a = cluster.save("a", {"content/a.md": "A\n"})

    def stopped_meanwhile() -> bool:
        if len(cluster.plans) == 1:
            cluster.publish(a, host="two", settle=False)
        return True

    outcome = cluster.publish(a, still_ours=stopped_meanwhile, settle=False)["a"]
    assert cluster.log() == ["Publish a", "Start the site"]
    assert outcome.commit == cluster.tip()
    assert not cluster.landed(cluster.plans[0], host="three")
    assert cluster.landed(cluster.plans[1], host="three")


@pytest.fixture
def http(cluster: Cluster) -> Iterator[HttpRemote]:
    with http_remote(cluster.root) as server:
        cluster.url = server.url(cluster.remote)
        yield server


def test_a_push_whose_answer_was_lost_is_found_by_another_host(cluster: Cluster, http: HttpRemote) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})

    def then_nothing(exchange: object) -> None:
        cuts_after(exchange)  # type: ignore[arg-type]
        http.behaviour = lambda each: each.hang_up()

    http.on_push = then_nothing
    with pytest.raises(PublishError) as failure:
        cluster.publish(a)
    assert failure.value.failure is Failure.NETWORK
    http.heal()
    assert cluster.log() == ["Publish a", "Start the site"]
    (plan,) = cluster.plans
    assert cluster.landed(plan, host="two")
    # However much was published upon it, and whatever the host has of it.
    for number in range(60):
        cluster.person({"content/theirs.md": f"{number}\n"})
    assert cluster.landed(plan, host="three")
    assert cluster.landed(plan, host="two")
    assert cluster.landed(plan, host="one")


def test_a_push_that_never_arrived_is_not_found_and_only_so_much_is_asked(cluster: Cluster) -> None:
    a = cluster.save("a", {"content/a.md": "A\n"})
    with pytest.raises(LockLostError):
        cluster.publish(a, still_ours=lambda: False)
    (plan,) = cluster.plans
    for number in range(60):
        cluster.person({"content/theirs.md": f"{number}\n"})
    assert not cluster.landed(plan, host="two")
    assert not cluster.landed(plan, host="one")
    assert cluster.publish(a, host="two")["a"].commit == cluster.tip()


def test_an_edit_of_what_landed_unsettled_is_no_conflict_with_ourselves(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = named(LINES.encode())
    first = cluster.save("b", {path: LINES + "one\n"}, bases={path: start})
    cluster.publish(first, settle=False)  # it landed, and the worker died before it could say so
    cluster.database.known.clear()
    cluster.database.tip = None
    second = cluster.save("b", {path: LINES + "two\n"}, bases={path: start})
    for host in ("fresh", "one"):
        assert cluster.publish(second, host=host, settle=False)["b"].failure is None
    assert cluster.file(path) == LINES + "two\n"


def test_a_persons_edit_of_what_landed_unsettled_is_kept(cluster: Cluster) -> None:
    path = "content/posts/b.md"
    start = named(LINES.encode())
    cluster.publish(cluster.save("b", {path: LINES + "one\n"}, bases={path: start}), settle=False)
    cluster.database.known.clear()
    cluster.person({path: "their first\n" + LINES + "one\n"})
    second = cluster.save("b", {path: LINES + "one and more\n"}, bases={path: start})
    assert cluster.publish(second, host="fresh")["b"].failure is None
    assert cluster.file(path) == "their first\n" + LINES + "one and more\n"


# What opens the remote


SECRET = "s3cret-canary-0451"  # noqa: S105 - the canary


@pytest.mark.parametrize("kind", ["env", "file"])
def test_a_credential_is_used_and_is_nowhere_to_be_seen(
    cluster: Cluster,
    http: HttpRemote,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    http.behaviour = asks_for("blog", SECRET)
    seen: list[str] = []
    serve = http.behaviour

    def look(exchange: object) -> None:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                seen.append((process / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
        serve(exchange)  # type: ignore[arg-type]

    http.behaviour = look
    if kind == "env":
        monkeypatch.setenv("BLOG_TOKEN", SECRET)
        cluster.credentials = {"env": "BLOG_TOKEN", "username": "blog"}
    else:
        (cluster.root / "token").write_text(f"{SECRET}\n")
        cluster.credentials = {"file": str(cluster.root / "token"), "username": "blog"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit == cluster.tip()
    assert not [line for line in seen if SECRET in line]
    assert any("git-remote-http" in line for line in seen)
    for file in cluster.cache().rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    http.behaviour = asks_for("blog", "another")
    with pytest.raises(PublishError) as failure:
        cluster.publish(cluster.save("c", {"content/c.md": "C\n"}), host="two")
    assert failure.value.failure is Failure.AUTH
    assert SECRET not in failure.value.text + caplog.text + "".join(cluster.warned)


def test_no_helper_of_the_hosts_is_told_the_credential(
    cluster: Cluster, http: HttpRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = cluster.root / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[credential]\n\thelper = store\n")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("BLOG_TOKEN", SECRET)
    http.behaviour = asks_for("x-access-token", SECRET)
    cluster.credentials = {"env": "BLOG_TOKEN"}
    assert cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))["a"].commit
    assert [path.name for path in home.iterdir()] == [".gitconfig"]


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ({"env": "BLOG_TOKEN"}, "BLOG_TOKEN"),
        ({"file": "/nowhere/token"}, "/nowhere/token"),
        ({"sshKey": "/nowhere/key"}, "/nowhere/key"),
    ],
)
def test_a_credential_that_is_missing_is_named_with_its_place(
    cluster: Cluster, credentials: dict[str, str], words: str
) -> None:
    cluster.credentials = credentials
    with pytest.raises(PublishError) as failure:
        cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    assert failure.value.failure is Failure.AUTH
    assert words in failure.value.text


# What it costs


@pytest.mark.slow
def test_a_file_of_50_megabytes_is_published_in_parts(cluster: Cluster) -> None:
    content = os.urandom(50 << 20)
    outcome = cluster.publish(cluster.save("large", {"content/large.bin": content}))["large"]
    assert outcome.commit
    assert cluster.git("cat-file", "-s", "main:content/large.bin") == str(50 << 20)


@pytest.mark.parametrize("filters", [True, False], ids=["filters", "no-filters"])
def test_publishing_by_gits_own_protocol_fetches_no_contents(cluster: Cluster, *, filters: bool) -> None:
    cluster.git("config", "uploadpack.allowFilter", str(filters).lower())
    with git_daemon(cluster.root, "--enable=receive-pack") as address:
        cluster.url = f"{address}/remote.git"
        for number in range(3):
            cluster.publish(cluster.save("b", {"content/posts/b.md": f"{number}\n" + LINES}))
    assert len(cluster.log()) == 4
    assert (named(b"Hello\n") in blobs_here(cluster)) is not filters
    assert (named(LINES.encode()) in blobs_here(cluster)) is not filters


def test_a_drain_asks_the_remote_once_and_then_pushes(cluster: Cluster, http: HttpRemote) -> None:
    cluster.publish(cluster.save("a", {"content/a.md": "A\n"}))
    http.asked.clear()
    cluster.publish(cluster.save("c", {"content/c.md": "C\n"}))
    assert http.asked == ["GET git-receive-pack", "POST git-receive-pack"]
