"""The queue folder belongs to the CMS's account: whatever lies in it is input, and never trusted."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from queue_backends import NOW, Disk

from briter_worker.errors import Failure, FailureCode
from briter_worker.job import State

FORGED = "a.0123456789abcdef.json"


# The folder of claims


def test_a_link_in_place_of_the_claimed_folder_is_refused_and_named(disk: Disk, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in (".x.tmp", "a.json", ".a.json"):
        (elsewhere / name).write_text("kept")
    (disk.root / ".claimed").symlink_to(elsewhere)
    disk.save("a", ["a"])
    for operation in (disk.queue.claim, disk.queue.recover, disk.queue.retry_all):
        with pytest.raises(NotADirectoryError) as refused:
            operation(NOW)
        assert refused.value.filename == str(disk.root / ".claimed")
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == dict.fromkeys(
        (".x.tmp", "a.json", ".a.json"), "kept"
    )


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


def forge(disk: Disk, secret: Path) -> None:
    folder = disk.root / ".claimed"
    folder.mkdir()
    (folder / FORGED).symlink_to(secret)
    os.mkfifo(folder / "pipe.0123456789abcdef.json")
    (folder / "folder.0123456789abcdef.json").mkdir()
    (folder / ".taken.json").symlink_to(secret)
    disk.put(
        ".claimed/b.0123456789abcdef.json", b'{"slug": "b", "paths": ["b"]}'
    )  # the digest is of another save


def test_forged_claims_are_neither_followed_nor_believed(disk: Disk, tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"slug": "stolen", "paths": ["x"]}')
    forge(disk, secret)
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


@pytest.mark.parametrize("settle", ["retry_later", "dead_letter", "release"])
def test_what_was_written_to_a_claim_in_place_is_not_marked_with_the_older_saves_failure(
    disk: Disk, settle: str
) -> None:
    path = disk.put("a.json", b'{"slug": "a", "paths": ["old"]}')
    with path.open("r+b") as file:
        (claim,) = disk.queue.claim(NOW).claims
        file.write(b'{"slug": "a", "paths": ["new"]}')
        file.truncate()
    failure = Failure(FailureCode.LOST_RACE, "lost")
    match settle:
        case "retry_later":
            disk.queue.retry_later(claim, failure, at=NOW + 60)
        case "dead_letter":
            disk.queue.dead_letter(claim, failure)
        case _:
            disk.queue.release([claim])
    assert disk.rows("a") == [(State.PENDING, ("new",))]
    assert disk.document("a").get("lastError") is None


# Files that cannot be moved


def refuse_to_move(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rename = os.rename

    def refusing(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.rename
        if source == name:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source)
        rename(source, target, **keys)

    monkeypatch.setattr(os, "rename", refusing)


def test_an_immutable_job_file_is_reported_and_stops_no_other(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save("a", ["a"], name="a")
    disk.save("b", ["b"], name="b")
    with monkeypatch.context() as immutable:
        refuse_to_move(immutable, "a.json")
        assert [claim.job.slug for claim in disk.queue.claim(NOW).claims] == ["b"]
        assert "cannot be claimed" in disk.queue.stuck_files()["a.json"]
        assert disk.queue.claim(NOW + 1).claims == ()
        due = disk.queue.next_due(NOW + 1)
        assert due is not None
        assert due > NOW + 30  # not in a busy loop
    assert [claim.job.slug for claim in disk.queue.claim(NOW + 90).claims] == ["a"]


def test_an_older_save_is_not_published_in_place_of_a_newest_that_is_immutable(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save("a", ["old"], created=NOW - 9, name="old")
    disk.save("a", ["new"], created=NOW - 1, name="new")
    with monkeypatch.context() as immutable:
        refuse_to_move(immutable, "new.json")
        for now in (NOW, NOW + 1, NOW + 90):
            assert disk.queue.claim(now).claims == ()
    (claim,) = disk.queue.claim(NOW + 200).claims
    assert claim.job.paths == ("new", "old")


# Scheduled jobs whose files are damaged


# The pause


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"since": 1}', b'{"since": "x", "until": null}', b"\xff", b"[" * 99_999],
)
def test_damage_does_not_end_a_pause(disk: Disk, content: bytes) -> None:
    (disk.root / ".paused").write_bytes(content)
    pause = disk.queue.active_pause(NOW)
    assert pause is not None
    assert "cannot be read" in pause.reason


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_in_place_of_the_pause_is_a_pause_too(disk: Disk, make: Any) -> None:  # noqa: ANN401
    make(disk.root / ".paused")
    assert disk.queue.active_pause(NOW) is not None
