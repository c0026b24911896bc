"""What a power cut leaves: shown by the order of the system calls of the worker, its git, and the commands.

A file's content is durable once the file is flushed, its name once its folder is. So: write, flush the file,
give it its name, flush the folder, and only then go on to what depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import pytest
from requirements import provide, unavailable
from soak.strace import WORKER, Tracer, may_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from sites import Site
    from soak.strace import Call

QUEUE, CLAIMED = "storage/queue", "storage/queue/.claimed"
STATE = "site/.git/briter"
WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "copy_file_range", "sendfile"}
FLUSHES = {"fsync", "fdatasync"}
GIVES_A_NAME = {"rename", "renameat", "renameat2", "link", "linkat"}
TAKES_A_NAME = {"unlink", "unlinkat"}


@dataclass(frozen=True)
class Trace:
    """What was done, by all processes, in the order in which it was begun. Only what succeeded."""

    calls: Sequence[Call]

    def where(self, wanted: Callable[[Call], bool]) -> list[Call]:
        return [call for call in self.calls if wanted(call)]

    def flushed(self, path: str, *, after: float, before: float) -> bool:
        """Whether the file or folder was flushed, wholly between the two moments."""
        return any(
            call.name in FLUSHES
            and call.paths[:1] == (path,)
            and after <= call.begun
            and call.ended <= before
            for call in self.calls
        )

    def named(self, *, within: str = "", like: str = "") -> list[Call]:
        """The calls by which a file got a name, of which this is the beginning and the pattern."""
        return self.where(
            lambda call: (
                call.name in GIVES_A_NAME
                and call.paths[-1].startswith(within)
                and (not like or PurePath(call.paths[-1]).match(like))
            )
        )

    def removed(self, like: str) -> list[Call]:
        return self.where(lambda call: call.name in TAKES_A_NAME and PurePath(call.paths[-1]).match(like))

    def unflushed(self, within: str) -> Iterator[str]:
        """Every file below the folder that got its name before its content was durable."""
        for naming in self.named(within=within):
            source = naming.paths[0]
            written = [
                call.ended
                for call in self.calls
                if call.name in WRITES and call.paths[:1] == (source,) and call.ended <= naming.begun
            ]
            if written and not self.flushed(source, after=max(written), before=naming.begun):
                yield str(naming)

    def objects(self) -> list[Call]:
        return self.where(lambda call: call.changes and call.paths[-1].startswith("site/.git/objects"))

    def began(self, kind: str) -> float:
        """When the first process of git's of this kind began."""
        return min(call.begun for call in self.calls if call.process.startswith(f"{kind}."))

    def ended(self, kind: str) -> float:
        """When the last process of git's of this kind did its last call."""
        return max(call.ended for call in self.calls if call.process.startswith(f"{kind}."))


@pytest.fixture
def trace(site: Site, tmp_path: Path) -> Callable[..., Trace]:
    """Run a command of the worker's, and follow all that it and its git do."""
    provide("strace", package="strace")
    if not may_trace():
        unavailable("strace may not follow processes here: a container needs --cap-add SYS_PTRACE")

    def run(*arguments: str, code: int = 0) -> Trace:
        tracer = Tracer(tmp_path / "trace", site.root)
        process = tracer.start(*arguments, env=site.environment())
        out, err = process.communicate(timeout=100)
        assert process.returncode == code, out + err
        calls = [call for call in tracer.calls() if call.ok]
        assert {call.process for call in calls} >= {WORKER}
        return Trace(sorted(calls, key=lambda call: call.begun))

    return run


def publish(site: Site, trace: Callable[..., Trace], posts: int) -> Trace:
    for number in range(posts):
        path = f"content/posts/{number}.md"
        site.save_post(f"post-{number}", f"{number}\n", path)
    found = trace("run", "--once")
    assert len(site.remote_log()) == posts + 1
    return found


@pytest.fixture
def publication(site: Site, trace: Callable[..., Trace]) -> Trace:
    return publish(site, trace, 3)


def assert_names_are_durable(trace: Trace, folder: str, calls: Sequence[Call], *, before: float) -> None:
    assert calls
    last = max(call.ended for call in calls)
    assert last <= before
    assert trace.flushed(folder, after=last, before=before), f"{folder} is not flushed after {calls[-1]}"


def test_jobs_are_durably_claimed_before_anything_is_pushed(publication: Trace) -> None:
    claims = publication.named(within=CLAIMED, like="post-*.json")
    assert len(claims) == 3
    assert_names_are_durable(publication, CLAIMED, claims, before=publication.began("push"))


def test_the_plan_is_durable_before_the_push_begins(publication: Trace) -> None:
    (plan,) = publication.named(within=STATE, like="plans/*.json")
    # With the commits that it names.
    assert publication.objects()[-1].ended <= plan.begun
    assert list(publication.unflushed(STATE)) == []
    folder = str(PurePath(plan.paths[-1]).parent)
    assert_names_are_durable(publication, folder, [plan], before=publication.began("push"))
    # The folders are new: their names have to be durable, too.
    for parent in (PurePath(folder).parent, PurePath(STATE)):
        assert publication.flushed(str(parent), after=0, before=publication.began("push"))


def test_commits_are_durable_before_the_push_begins_and_refs_and_index_under_their_names(
    publication: Trace,
) -> None:
    objects = publication.named(within="site/.git/objects")
    assert objects
    assert max(call.ended for call in objects) <= publication.began("push")
    assert list(publication.unflushed("site/.git/objects")) == []
    refs = publication.named(within="site/.git/refs/briter")
    assert refs
    assert refs[0].ended <= publication.began("push")
    for place in ("site/.git/refs", "site/.git/index"):
        assert publication.named(within=place)
        assert list(publication.unflushed(place)) == []


def test_a_job_leaves_the_queue_only_after_the_push_and_durably_before_the_plan_goes(
    publication: Trace,
) -> None:
    gone = publication.removed(f"{CLAIMED}/post-*.json")
    assert len(gone) == 3
    moved = publication.named(within="site/.git/refs/heads/main")[-1]
    assert publication.ended("push") <= moved.begun
    assert moved.ended <= gone[0].begun, "the branch has followed before the jobs go"
    (forgotten,) = publication.removed("plans/*.json")
    assert_names_are_durable(publication, CLAIMED, gone, before=forgotten.begun)
    assert publication.flushed(
        str(PurePath(forgotten.paths[-1]).parent), after=forgotten.ended, before=float("inf")
    )


def test_a_job_that_could_not_be_published_waits_durably_when_its_plan_is_forgotten(
    site: Site, trace: Callable[..., Trace]
) -> None:
    publish(site, trace, 1)
    site.save_post("a", "A\n")
    site.git("remote", "set-url", "origin", str(site.root / "nowhere"))
    found = trace("run", "--once", code=1)
    assert site.job("a")["failure"] == "remote-missing"
    assert list(found.unflushed(QUEUE)) == []
    (back,) = [
        call
        for call in found.named(like=f"{QUEUE}/a-*.json")
        if PurePath(call.paths[-1]).parent.name == "queue"
    ]
    assert len(found.removed("plans/*.json")) == 1, "the push has not even begun to send"
    assert_names_are_durable(found, QUEUE, [back], before=float("inf"))


def test_a_job_is_durable_when_enqueue_has_said_so(site: Site, trace: Callable[..., Trace]) -> None:
    site.write_post("content/posts/a.md", "A\n")
    found = trace("enqueue", "a", "content/posts/a.md")
    assert site.job("a")["paths"] == ["content/posts/a.md"]
    assert list(found.unflushed(QUEUE)) == []
    (*_, told) = found.where(lambda call: call.name == "write" and not call.changes and call.does == "write")
    assert_names_are_durable(found, QUEUE, found.named(within=QUEUE, like="*.json"), before=told.begun)


def test_a_retry_is_durable_before_the_dead_letter_is_gone(site: Site, trace: Callable[..., Trace]) -> None:
    site.save("a", ["content/posts/a.md"], status="failed", attempts=8, failure="disk", lastError="full")
    found = trace("retry", "a")
    assert site.job("a")["status"] == "pending"
    assert list(found.unflushed(QUEUE)) == []
    back = [
        call for call in found.named(within=QUEUE, like="*.json") if not call.paths[-1].startswith(CLAIMED)
    ]
    (gone,) = found.removed(f"{CLAIMED}/.a-*.json")
    assert_names_are_durable(found, QUEUE, back, before=gone.begun)
    assert_names_are_durable(found, CLAIMED, [gone], before=float("inf"))


def test_a_cancelled_job_is_gone_for_good(site: Site, trace: Callable[..., Trace]) -> None:
    site.save("a", ["content/posts/a.md"])
    found = trace("cancel", "a")
    assert site.jobs() == []
    (gone,) = found.removed(f"{CLAIMED}/.a-*.json")
    assert_names_are_durable(found, CLAIMED, [gone], before=float("inf"))
    # Its name in the queue is gone for good, too: else a power cut would bring it back.
    taken = found.named(within=CLAIMED, like=".a-*.json")
    assert_names_are_durable(found, QUEUE, taken, before=float("inf"))
