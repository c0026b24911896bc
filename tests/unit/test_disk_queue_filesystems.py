"""The queue where the system refuses what it mostly grants: links, flushes of folders, its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest
from queue_backends import NOW, Disk

from briter_worker.errors import os_error_fix
from briter_worker.git.push import FilePlans
from briter_worker.job import State
from briter_worker.ports import Plan
from briter_worker.queues.disk import files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from briter_worker.ports import Claim


def in_flight(disk: Disk) -> Sequence[Claim]:
    disk.save("a", ["content/a.md"], mine=1)
    claims = disk.queue.claim(NOW).claims
    assert claims
    return claims


def refuse_links(monkeypatch: pytest.MonkeyPatch, code: int, when: Callable[[str], bool]) -> None:
    link = os.link

    def refusing(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.link
        if when(os.path.basename(source)):  # noqa: PTH119 - as os.link gets it
            raise OSError(code, os.strerror(code), str(source))
        link(source, target, **keys)

    monkeypatch.setattr(os, "link", refusing)


def test_a_job_is_given_back_where_links_of_anothers_file_are_refused(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under fs.protected_hardlinks."""
    claims = in_flight(disk)
    (held,) = (path for path in (disk.root / ".claimed").glob("*.json") if "job0" in path.name)
    held.chmod(0o604)
    refuse_links(monkeypatch, errno.EPERM, lambda name: not name.endswith(".tmp"))
    disk.queue.release(claims)
    monkeypatch.undo()
    assert disk.rows("a") == [(State.PENDING, ("content/a.md",))]
    (waiting,) = disk.root.glob("*.json")
    assert json.loads(waiting.read_bytes())["mine"] == 1
    assert stat.S_IMODE(waiting.stat().st_mode) == 0o604
    assert [path.name for path in (disk.root / ".claimed").iterdir()] == [".lock"]


def test_a_copy_overwrites_no_newer_save_either(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = in_flight(disk)
    disk.save("a", ["content/b.md"], created=NOW + 1, name="job00001")
    refuse_links(monkeypatch, errno.EPERM, lambda name: not name.endswith(".tmp"))
    disk.queue.release(claims)
    monkeypatch.undo()
    assert len(list(disk.root.glob("*.json"))) == 2
    found = disk.queue.claim(NOW + 2)
    assert {path for claim in found.claims for path in claim.job.paths} == {"content/a.md", "content/b.md"}


def test_a_file_system_without_hard_links_is_an_error_with_its_fix(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = in_flight(disk)
    refuse_links(monkeypatch, errno.EPERM, lambda _: True)
    with pytest.raises(OSError, match="the file system has no hard links") as refused:
        disk.queue.release(claims)
    assert "BRITER_QUEUE_ROOT" in os_error_fix(refused.value)
    monkeypatch.undo()
    assert [state for state, _ in disk.rows("a")] == [State.CLAIMED]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_does_not_sync_folders_will_do(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As mounts of a container's host may."""
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)
    disk.queue.acknowledge(in_flight(disk), {})
    assert disk.rows("a") == []
    plans, plan = FilePlans(tmp_path / "state", "main"), Plan("1", None, "a" * 40, {}, {})
    plans.record(plan)
    assert plans.plans() == [plan]


def test_a_queue_that_another_process_keeps_to_itself_is_an_error_that_says_so(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = in_flight(disk)
    monkeypatch.setattr(files, "_LOCK_TIMEOUT_S", 0.01)
    with (disk.root / ".claimed" / ".lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process has been changing the queue") as busy:
            disk.queue.release(claims)
    assert busy.value.errno == errno.EBUSY
    assert [state for state, _ in disk.rows("a")] == [State.CLAIMED]
    disk.queue.release(claims)
    assert [state for state, _ in disk.rows("a")] == [State.PENDING]
