"""What is particular to a queue made of files: odd, hostile and replaced ones, and the kernel's news."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_backends import NOW, Disk
from sites import eventually

from briter_worker.errors import DeclinedError, Failure, FailureCode
from briter_worker.job import QuietTime, State, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sites import Site

    from briter_worker.events import Quarantined
    from briter_worker.ports import Claim
    from briter_worker.queues.disk.queue import DiskQueue


def quarantined(disk: Disk, now: float = NOW) -> Quarantined:
    (one,) = disk.queue.claim(now).quarantined
    return one


def claimed(disk: Disk, now: float = NOW) -> Sequence[Claim]:
    claims = disk.queue.claim(now).claims
    assert claims
    return claims


def test_a_save_that_was_read_half_written_does_not_begin_the_longest_wait_again(disk: Disk) -> None:
    disk.restart(quiet=QuietTime(2.0, 5.0))
    for number in range(4):
        at = NOW + 1.5 * number
        for text in ('{"slug": "a", "pa', '{"slug": "a", "paths": ["x"]}'):
            disk.put("a.json", text.encode(), age=NOW - at)
            assert disk.queue.claim(at).claims == ()
    assert [claim.job.slug for claim in claimed(disk, NOW + 5.0)] == ["a"]


@pytest.mark.parametrize(
    "name",
    [b"\xff\xfe.json", "ü ☃.json".encode(), b"new\nline.json", b"-rf.json", b"*.json", b"x" * 250 + b".json",
     "ä".encode() * 125 + b".json", b" .json"],
)  # fmt: skip
def test_a_file_of_any_name_is_claimed_and_settled(disk: Disk, name: bytes) -> None:
    disk.put(name, b'{"slug": "a", "paths": ["old"]}', age=20)
    claims = claimed(disk)
    disk.put(name, b'{"slug": "b", "paths": ["x"]}', age=15)
    disk.queue.retry_later(claims[0], Failure(FailureCode.LOST_RACE, "busy"), at=NOW)
    first = claims[0].job
    again = claimed(disk)
    assert sorted(claim.job.slug for claim in again) == ["a", "b"]
    (a,) = (claim.job for claim in again if claim.job.slug == "a")
    assert (a.id, a.created_at) == (first.id, first.created_at)  # though its file has another name now
    assert a.id.isprintable()
    disk.put(name, b"{", age=10)
    quarantined(disk)
    disk.queue.release(again)
    disk.restart()
    assert {row.job.slug for row in disk.queue.jobs(NOW)} >= {"a", "b"}


def test_what_a_killed_producer_had_half_written_is_removed_an_hour_later(disk: Disk) -> None:
    ours, young, anybodys = f".{'a' * 32}.tmp", f".{'b' * 32}.tmp", ".a.tmp"
    for name, age in ((ours, 3601.0), (young, 3599.0), (anybodys, 9999.0)):
        disk.put(name, b"{", age=age)
    disk.queue.recover(NOW)
    assert {path.name for path in disk.root.iterdir() if path.is_file()} == {young, anybodys}


def test_a_rewritten_file_stays_as_open_to_the_cms_as_it_was(disk: Disk) -> None:
    path = disk.put("a.json", b'{"slug": "a", "paths": ["x"]}')
    path.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(path, 1234, 2345)
    before = path.stat()
    claims = claimed(disk)
    disk.queue.retry_later(claims[0], Failure(FailureCode.LOST_RACE, "busy"), at=NOW + 1)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_mtime == before.st_mtime  # which orders it, as it says not when it was created


def test_what_a_killed_command_had_taken_is_claimed_at_the_next_poll(disk: Disk) -> None:
    assert disk.queue.claim(NOW).claims == ()
    path = disk.put("a.json", b'{"slug": "a", "paths": ["x"]}')
    (disk.root / ".claimed").mkdir(exist_ok=True)
    path.rename(disk.root / ".claimed" / ".a.json")
    assert [claim.job.id for claim in claimed(disk)] == ["a"]


def test_bytes_kept_earlier_are_never_overwritten(disk: Disk) -> None:
    for number in range(5):
        disk.put("bad.json", b"[%d]" % number)
        quarantined(disk)
        (disk.root / "bad.json").unlink()
    assert sorted(path.read_bytes() for path in disk.queue.quarantined()) == [b"[%d]" % n for n in range(5)]


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, when: Callable[[str], bool]) -> None:
    """Have a call of `os` refuse files of these names."""
    original = getattr(os, call)

    def refusing(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as the call
        if when(os.path.basename(source)):  # noqa: PTH119 - as the call gets it
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        original(source, target, **keys)

    monkeypatch.setattr(os, call, refusing)


def test_a_job_is_given_back_where_links_of_anothers_file_are_refused(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under fs.protected_hardlinks."""
    disk.save("a", ["content/a.md"], mine=1)
    claims = claimed(disk)
    (held,) = (path for path in (disk.root / ".claimed").glob("*.json") if "job0" in path.name)
    held.chmod(0o604)
    refuse(monkeypatch, "link", lambda name: not name.endswith(".tmp"))
    disk.queue.release(claims)
    monkeypatch.undo()
    assert disk.rows("a") == [(State.PENDING, ("content/a.md",))]
    (waiting,) = disk.root.glob("*.json")
    assert json.loads(waiting.read_bytes())["mine"] == 1
    assert stat.S_IMODE(waiting.stat().st_mode) == 0o604
    assert [path.name for path in (disk.root / ".claimed").iterdir()] == [".lock"]


# Forged: the queue folder belongs to the CMS's account, and whatever lies in it is input


def test_a_claimed_folder_that_is_replaced_during_a_claim_is_not_written_to(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    disk.save("a", ["a"])
    rename = os.rename

    def after_replacing(*names: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.rename
        monkeypatch.undo()
        (disk.root / ".claimed").rename(disk.root / ".old")
        (disk.root / ".claimed").symlink_to(elsewhere)
        rename(*names, **keys)

    monkeypatch.setattr(os, "rename", after_replacing)
    disk.queue.claim(NOW)
    assert list(elsewhere.iterdir()) == []


def test_forged_claims_are_neither_followed_nor_believed(disk: Disk, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"slug": "stolen", "paths": ["x"]}')
    folder = disk.root / ".claimed"
    folder.mkdir()
    (folder / "a.0123456789abcdef.json").symlink_to(secret)
    os.mkfifo(folder / "pipe.0123456789abcdef.json")
    (folder / "folder.0123456789abcdef.json").mkdir()
    (folder / ".taken.json").symlink_to(secret)
    # The digest is of another save.
    disk.put(".claimed/b.0123456789abcdef.json", b'{"slug": "b", "paths": ["b"]}')
    assert disk.queue.recover(NOW) == []
    found = disk.queue.claim(NOW)
    assert [claim.job.slug for claim in found.claims] == ["b"]
    assert {each.slug for each in found.quarantined} == {"a", "pipe", "folder", "taken"}
    assert secret.read_text() == '{"slug": "stolen", "paths": ["x"]}'
    for each in found.quarantined:
        assert not stat.S_ISREG(Path(each.file).lstat().st_mode)


def test_what_was_written_to_a_claim_in_place_outlives_a_crash(disk: Disk) -> None:
    path = disk.put("a.json", b'{"slug": "a", "paths": ["old"]}')
    with path.open("r+b") as file:
        claims = disk.queue.claim(NOW).claims
        file.write(b'{"slug": "a", "paths": ["new"]}')
        file.truncate()
    disk.restart()
    assert disk.queue.recover(NOW) == []
    disk.queue.acknowledge(claims, {})  # as a plan that landed has it done
    assert disk.rows("a") == [(State.PENDING, ("new",))]


def test_an_immutable_job_file_is_reported_and_stops_no_other(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save("a", ["a"], name="a")
    disk.save("b", ["b"], name="b")
    with monkeypatch.context() as immutable:
        refuse(immutable, "rename", lambda name: name == "a.json")
        assert [claim.job.slug for claim in disk.queue.claim(NOW).claims] == ["b"]
        assert "cannot be claimed" in disk.queue.stuck_files()["a.json"]
        assert disk.queue.claim(NOW + 1).claims == ()
        due = disk.queue.next_due(NOW + 1)
        assert due is not None
        assert due > NOW + 30  # not in a busy loop
    assert [claim.job.slug for claim in disk.queue.claim(NOW + 90).claims] == ["a"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"since": 1}', b'{"since": "x", "until": null}', b"\xff", b"[" * 99_999],
)
def test_damage_does_not_end_a_pause(disk: Disk, content: bytes) -> None:
    (disk.root / ".paused").write_bytes(content)
    pause = disk.queue.active_pause(NOW)
    assert pause is not None
    assert "cannot be read" in pause.reason


# The kernel reports what changes in the folder


def write(folder: Path, name: str, year: int, *, in_place: bool = False) -> None:
    document = {"slug": name, "paths": ["content/a.md"], "scheduledFor": f"{year}-01-01"}
    file = folder / f"{name}.json"
    if in_place:
        file.write_text(json.dumps(document))
    else:
        other = folder / f"{name}.partial"
        other.write_text(json.dumps(document))
        other.rename(file)


def assert_knows_all(queue: DiskQueue, disk: Disk) -> None:
    disk.restart()
    assert rows(queue) == rows(disk.queue)


def rows(queue: DiskQueue) -> list[tuple[str, str, float | None]]:
    return sorted((row.where, row.state.value, row.job.scheduled_for) for row in queue.jobs(NOW))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(range(8))), max_size=12))
@settings(max_examples=60, deadline=None)
def test_what_the_kernel_names_is_all_that_has_to_be_read(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, int]]
) -> None:
    disk = Disk(tmp_path_factory.mktemp("told"))
    queue = disk.queue
    rows(queue)
    for number, (name, what) in enumerate(changes):
        file, year = disk.root / f"{name}.json", 2040 + number
        match what:
            case 0 | 1:
                write(disk.root, name, year)
            case 2:
                write(disk.root, name, year, in_place=True)
            case 3:
                file.unlink(missing_ok=True)
            case 4 if file.exists():
                file.rename(disk.root / f"{name}-moved.json")
            case 5:
                file.write_text("{ half")
            case 6:
                disk.restart()
                with suppress(DeclinedError):
                    disk.queue.publish_now(name, NOW)  # by another process
            case 7:
                rows(queue)
    assert_knows_all(queue, disk)


def test_a_look_at_the_jobs_does_not_hide_a_pause(disk: Disk) -> None:
    queue = disk.queue
    assert queue.active_pause(NOW) is None
    disk.restart()
    disk.queue.pause(NOW)  # by another process
    rows(queue)
    began = time.monotonic()
    queue.watcher.wait(30, lambda: False)
    assert time.monotonic() - began < 15


def test_more_than_the_kernel_remembers_is_found_all_the_same(disk: Disk) -> None:
    queue = disk.queue
    write(disk.root, "c", 2040)
    assert rows(queue)
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with (disk.root / "a").open("wb", 0) as one, (disk.root / "b").open("wb", 0) as other:
        for _ in range(most // 2 + 10):
            one.write(b".")  # one after the other: the kernel reports the same change once
            other.write(b".")
    write(disk.root, "c", 2041, in_place=True)
    assert_knows_all(queue, disk)


def test_a_save_is_published_long_before_the_next_poll(site: Site) -> None:
    with site.running(BRITER_WORKER_POLL_INTERVAL_MS="60000"):
        eventually((site.storage / "worker.lock").exists)
        for slug in "abc":
            site.save_post(slug, f"{slug}\n")
            eventually(lambda: site.subjects()[0] == f"Publish {slug}")  # noqa: B023 - called at once


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "due"])
def test_saves_that_are_too_large_to_be_joined_are_published_one_after_another(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, *, is_held: bool
) -> None:
    monkeypatch.setattr("briter_worker.queues.disk.queue.MAX_JOINED_BYTES", 1000)
    at = format_time(NOW + 600) if is_held else None
    for number in range(4):
        scheduled_for = at if number == 3 else None
        disk.save("a", [f"{number}{'x' * 300}"], created=NOW + number, scheduledFor=scheduled_for)
    seen: list[str] = []
    for now in (NOW, NOW + 61, NOW + 601, NOW + 700, NOW + 800):
        disk.queue.claim(now)  # perhaps only joins
        claims = disk.queue.recover(now)
        assert not (is_held and now < NOW + 600 and claims)
        assert all(len(claim.job.paths) < 4 for claim in claims)
        seen += [path[0] for claim in claims for path in claim.job.paths]
        disk.queue.acknowledge(claims, {})
    assert seen == ["3", "2", "1", "0"]
    assert disk.rows("a") == []
