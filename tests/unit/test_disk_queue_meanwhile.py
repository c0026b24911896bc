"""What a file has become between the look at it and the deed: gone, another one, or not to be read."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_steps import before_change, refused_at
from queue_backends import NOW, Disk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.events import Quarantined
    from briter_worker.ports import Claim

STEPS = range(1, 200)


def claimed(disk: Disk, now: float = NOW) -> Sequence[Claim]:
    claims = disk.queue.claim(now).claims
    assert claims
    return claims


class Run:
    """A worker that publishes all it claims, and notes it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.published: Counter[str] = Counter()
        self.paths: set[str] = set()
        self.quarantined: list[Quarantined] = []

    def __call__(self, now: float = NOW) -> None:
        found = self.disk.queue.claim(now)
        self.quarantined += found.quarantined
        self.published.update(claim.job.slug for claim in found.claims)
        self.paths.update(path for claim in found.claims for path in claim.job.paths)
        self.disk.queue.acknowledge(found.claims, {})

    def go_on(self, *moments: float) -> None:
        """What nobody was told of is found, too."""
        for now in moments:
            self(now)
        hidden = [path.name for path in (self.disk.root / ".claimed").iterdir() if path.name != ".lock"]
        assert hidden == [], "left in flight"


# Gone


def one(disk: Disk) -> None:
    disk.save("a", ["a"], name="a")


def several(disk: Disk) -> None:
    disk.save("a", ["a1"], created=NOW - 9, name="a1")
    disk.save("a", ["a2"], created=NOW - 8, name="a2")


def torn(disk: Disk) -> None:
    disk.put("a.json", b"{")


@pytest.mark.parametrize("made", [one, several, torn])
def test_what_somebody_removes_at_any_step_of_a_claim_is_in_nobodys_way(
    tmp_path: Path, made: Callable[[Disk], None]
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        made(disk)
        disk.save("other", ["x"], name="other")
        run = Run(disk)

        def remove(disk: Disk = disk) -> None:
            for path in disk.root.glob("a*.json"):
                path.unlink()

        reached = before_change(step, remove, run)
        assert run.published["other"] == 1, f"at step {step}"
        run.go_on(NOW, NOW)
        assert run.published["other"] == 1, f"at step {step}"
        assert run.published["a"] + len(run.quarantined) <= 1, f"at step {step}"
        if not reached:
            assert run.published["a"] + len(run.quarantined) == 1
            assert step > 5
            return
    pytest.fail("it never ends")


# Another one


@pytest.mark.parametrize("made", [one, several])
def test_half_a_file_over_one_that_is_being_claimed_is_given_its_time(
    tmp_path: Path, made: Callable[[Disk], None]
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        made(disk)
        disk.save("other", ["x"], name="other")
        run = Run(disk)
        names = sorted(path.name for path in disk.root.glob("a*.json"))

        def begin(disk: Disk = disk, names: list[str] = names) -> None:
            for name in names:
                disk.put(f".{name}.tmp", b"{", age=0.0).rename(disk.root / name)

        reached = before_change(step, begin, run)
        run.go_on(NOW, NOW + 1)
        assert run.published["other"] == 1, f"at step {step}"
        assert run.quarantined == [], f"at step {step}"
        if not reached:
            assert step > 5
            return
        assert [(disk.root / name).read_bytes() for name in names] == [b"{"] * len(names), f"at step {step}"
        begin(disk, names)
        for name in names:
            disk.put(name, b'{"slug": "late", "paths": ["late"]}', age=0.0)
        run.go_on(NOW + 1)
        assert run.published["late"] == 1, f"at step {step}"
    pytest.fail("it never ends")


# Not to be read


def path_of(name: Any, folder: int | None) -> Path:  # noqa: ANN401 - as os.open
    return Path(name) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / name


def bind(path: Path) -> None:
    # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
        sock.bind(path.name)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), bind, os.mkfifo, os.mkdir])
def test_what_takes_the_place_of_a_file_before_it_is_read_is_never_followed_nor_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    one(disk)
    opened = os.open

    def then_another(path: Any, flags: int, *rest: Any, **keys: Any) -> int:  # noqa: ANN401 - as os.open
        if os.path.basename(path).removeprefix(".") == "a.json" and not flags & (os.O_CREAT | os.O_WRONLY):  # noqa: PTH119
            monkeypatch.undo()
            there = path_of(path, keys.get("dir_fd"))
            there.unlink()
            make(there)
        return opened(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", then_another)
    assert disk.queue.unusable_files(NOW) == {"a.json": "it is not a regular file"}
    (aside,) = disk.queue.claim(NOW).quarantined
    assert "it is not a regular file" in aside.error
    assert not stat.S_ISREG(Path(aside.file).lstat().st_mode)


def test_a_full_disk_at_any_step_of_a_move_to_another_file_system_loses_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def across(source: str, target: str, **keys: int) -> None:
        there = path_of(source, keys["src_dir_fd"]), path_of(target, keys["dst_dir_fd"])
        if tuple(path.parent.name for path in there) == (".claimed", "quarantine"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target, **keys)

    monkeypatch.setattr(os, "rename", across)
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        torn(disk)
        run = Run(disk)
        hit = refused_at(step, run, lasting=False)
        disk.restart()
        disk.queue.recover(NOW)
        run.go_on(NOW + 120)
        kept = {path.suffix: path.read_bytes() for path in (disk.folder / "quarantine").iterdir()}
        assert kept == {".json": b"{"}, f"at step {step}"
        if not hit:
            assert step > 8
            return
    pytest.fail("it never ends")
