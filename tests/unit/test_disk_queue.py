"""What is particular to a queue made of files: torn, hostile and racing ones, and a process that dies."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from mounts import read_only
from queue_backends import NOW, Disk

from briter_worker.errors import DeclinedError, Failure, FailureCode
from briter_worker.job import State, format_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.events import Quarantined
    from briter_worker.ports import Claim


def quarantined(disk: Disk, now: float = NOW) -> Quarantined:
    (one,) = disk.queue.claim(now).quarantined
    return one


def claimed(disk: Disk, now: float = NOW) -> Sequence[Claim]:
    claims = disk.queue.claim(now).claims
    assert claims
    return claims


def large(slug: str, first: int, size: int) -> bytes:
    """A job of many short paths, nearly as large as a job may be."""
    paths = [f"p{number}" for number in range(first, first + size // 11)]
    data = json.dumps({"id": f"{slug}{first}", "slug": slug, "paths": paths}, separators=(",", ":")).encode()
    assert len(data) < 1 << 20
    return data


def test_a_job_that_is_nearly_too_large_stays_a_job_however_often_it_is_written_anew(disk: Disk) -> None:
    disk.put("a.json", large("a", 1_000_000, 1_045_000))
    claims = claimed(disk)
    disk.queue.retry_later(claims[0], Failure(FailureCode.NETWORK, "\N{SNOWMAN}" * 2_000), at=NOW)
    claims = claimed(disk, NOW + 1)
    assert len(claims[0].job.paths) == 1_045_000 // 11
    disk.queue.dead_letter(claims[0], Failure(FailureCode.NETWORK, "no network"))
    assert [job.status.value for job in disk.queue.retry_all(NOW + 2)] == ["pending"]
    (claim,) = claimed(disk, NOW + 3)
    assert claim.job.id == "a1000000"


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


def test_names_that_are_not_jobs_are_never_touched(disk: Disk) -> None:
    for name in (".a.json", "a.json.tmp", "a.txt", ".json", "A.JSON"):
        disk.put(name, b"{")
    before = sorted(path.name for path in disk.root.iterdir())
    disk.queue.claim(NOW)
    assert sorted(path.name for path in disk.root.iterdir()) == before


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


def test_each_try_to_put_a_file_aside_leaves_no_dead_letter_more(disk: Disk) -> None:
    disk.put("torn.json", b"{")
    (disk.folder / "quarantine").mkdir()
    with read_only(disk.folder / "quarantine"):
        for minute in range(3):
            assert disk.queue.claim(NOW + 120 * minute).quarantined == ()
            assert [path.name for path in disk.root.glob("*.json")] == ["torn.json"]
    quarantined(disk, NOW + 600)
    assert len(disk.queue.jobs(NOW + 600)) == 1


def test_bytes_kept_earlier_are_never_overwritten(disk: Disk) -> None:
    for number in range(5):
        disk.put("bad.json", b"[%d]" % number)
        quarantined(disk)
        (disk.root / "bad.json").unlink()
    assert sorted(path.read_bytes() for path in disk.queue.quarantined()) == [b"[%d]" % n for n in range(5)]


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_a_command_never_touches_what_a_writer_has_put_in_its_place(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    disk.save("a", ["old"], created=NOW - 9, name="a", status="failed", failure="rejected")
    rename = os.rename

    def raced(source: str, target: str, **folders: int) -> None:
        monkeypatch.setattr(os, "rename", rename)
        disk.save("a", ["new"], created=NOW - 1, name="a", scheduledFor=format_time(NOW + 9))
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", raced)  # the moment between looking and taking
    if command == "cancel":
        with pytest.raises(DeclinedError, match="saved again"):
            disk.queue.cancel("a", NOW)
    else:
        assert disk.queue.retry("a", NOW) == []
    assert disk.rows("a") == [(State.SCHEDULED, ("new",))]
