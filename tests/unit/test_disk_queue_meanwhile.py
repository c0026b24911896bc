"""What a file has become between the look at it and the deed: gone, another one, or not to be read."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disk_steps import before_change, refused_at
from queue_engines import NOW, Disk

from briter_worker.job import State, format_time
from briter_worker.queues.disk import claims as claims_module
from briter_worker.queues.disk import control

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.events import Quarantined
    from briter_worker.ports import Claim
    from briter_worker.queues.disk.files import Folder, JobFile

STEPS = range(1, 200)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """An empty queue folder."""
    return Disk(tmp_path)


def put(disk: Disk, name: str, data: bytes, *, age: float = 10.0) -> Path:
    """A file as a careless writer leaves it, last written `age` seconds ago."""
    path = disk.root / name
    path.write_bytes(data)
    os.utime(path, (NOW - age, NOW - age))
    return path


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
    put(disk, "a.json", b"{")


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


@pytest.mark.parametrize("command", ["retry", "revive"])
def test_a_dead_letter_that_is_gone_when_its_turn_comes_is_let_go_and_the_others_wait_again(
    tmp_path: Path, command: str
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        for slug in ("a", "b"):
            disk.save(slug, [slug], name=slug, status="failed", failure="auth")
        operation = partial(disk.queue.retry_all if command == "retry" else disk.queue.requeue, NOW)
        reached = before_change(step, partial((disk.root / "a.json").unlink, missing_ok=True), operation)
        assert disk.rows("b") == [(State.PENDING, ("b",))], f"at step {step}"
        assert disk.rows("a") in ([], [(State.PENDING, ("a",))]), f"at step {step}"
        if not reached:
            assert step > 5
            return
    pytest.fail("it never ends")


def test_a_folder_that_is_taken_away_with_all_in_it_is_an_empty_queue(disk: Disk) -> None:
    disk.save("a", ["a"], name="a")
    claims = claimed(disk)
    disk.save("b", ["b"], name="b")
    assert [row.job.slug for row in disk.queue.jobs(NOW)] == ["a", "b"]
    disk.root.rename(disk.folder / "elsewhere")
    assert disk.queue.jobs(NOW) == []
    assert disk.queue.next_due(NOW) is None
    assert disk.queue.cancelled(claims) == set()
    disk.root.mkdir()
    disk.save("c", ["c"], name="c")
    assert [claim.job.slug for claim in claimed(disk)] == ["c"]


def test_a_job_that_was_listed_can_still_be_read_when_it_is_gone(disk: Disk) -> None:
    disk.save("a", ["content/a.md"], id="job-a", message="Hello", scheduledFor=format_time(NOW + 9))
    (row,) = disk.queue.jobs(NOW)
    document = row.read()
    Path(row.where).unlink()
    disk.save("c", ["c"], name="job-a")  # another post's job has its name now
    assert {**document, **row.read()} == {**row.read(), **document}


# Another one


def test_a_save_for_later_over_one_that_is_being_claimed_is_not_published_now(tmp_path: Path) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        one(disk)
        disk.save("other", ["x"], name="other")
        run = Run(disk)

        def save(disk: Disk = disk) -> None:
            disk.save("a", ["new"], created=NOW + 1, name="a", scheduledFor=format_time(NOW + 9))

        reached = before_change(step, save, run)
        run.go_on(NOW, NOW)
        assert run.paths - {"a"} == {"x"}, f"at step {step}"
        if not reached:
            assert step > 5
            return
        assert [(state, paths[0]) for state, paths in disk.rows("a")] == [(State.SCHEDULED, "new")]
    pytest.fail("it never ends")


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
                put(disk, f".{name}.tmp", b"{", age=0.0).rename(disk.root / name)

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
            put(disk, name, b'{"slug": "late", "paths": ["late"]}', age=0.0)
        run.go_on(NOW + 1)
        assert run.published["late"] == 1, f"at step {step}"
    pytest.fail("it never ends")


@pytest.mark.parametrize("data", [b'{"slug": "a", "paths": ["a"]}', b"[ half"])
def test_what_a_writer_makes_of_a_torn_file_at_the_last_moment_is_what_counts(
    tmp_path: Path, data: bytes
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        torn(disk)
        run = Run(disk)
        overwritten: list[bool] = []

        def write(disk: Disk = disk, overwritten: list[bool] = overwritten) -> None:
            path = disk.root / "a.json"
            overwritten.append(path.exists() and b'"failed"' in path.read_bytes())
            put(disk, "a.json", data, age=0.0)

        reached = before_change(step, write, run)
        run.go_on(NOW, NOW + 1)
        assert {Path(aside.file).read_bytes() for aside in run.quarantined} <= {b"{"}, f"at step {step}"
        if not reached:
            assert len(run.quarantined) == 1
            assert step > 5
            return
        if data.startswith(b"["):
            assert data in {path.read_bytes() for path in disk.root.glob("a*.json")}, f"at step {step}"
            letters = len(run.quarantined) - sum(overwritten)  # as a new save takes an old one's place
            assert [state for state, _ in disk.rows("a")] == [State.FAILED] * letters, f"at step {step}"
        else:
            assert run.published == {"a": 1}, f"at step {step}"
    pytest.fail("it never ends")


def test_a_folder_that_cannot_be_put_aside_gives_way_to_no_job_and_keeps_what_is_in_it(
    tmp_path: Path,
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        (disk.root / "a.json").mkdir()
        (disk.root / "a.json" / "inside").write_text("kept")
        (disk.folder / "quarantine").write_text("in the way")
        run = Run(disk)

        def save(disk: Disk = disk) -> None:
            if not (disk.root / "a.json").exists():
                one(disk)

        reached = before_change(step, save, run)
        saved = (disk.root / "a.json").is_file() or run.published["a"]
        (disk.folder / "quarantine").unlink()
        run.go_on(NOW, NOW + 120)
        assert run.published["a"] == bool(saved), f"at step {step}"
        (aside,) = run.quarantined
        assert (Path(aside.file) / "inside").read_text() == "kept", f"at step {step}"
        if not reached:
            assert step > 3
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize("status", ["pending", "failed"])
@pytest.mark.parametrize(
    ("since", "left"),
    [
        ("nothing", []),
        ("saved over it", [("newer",)]),
        ("saved beside it", [("newer",)]),
        ("saved again with the same paths", [("a1",)]),
        ("an older one comes late", [("late",)]),
        ("removed", []),
    ],
)
def test_what_is_kept_elsewhere_leaves_the_queue_but_for_what_was_saved_since(
    disk: Disk, since: str, left: list[tuple[str, ...]], status: str
) -> None:
    disk.save("a", ["a1"], created=NOW - 9, name="a1", status=status)
    disk.save("a", ["a2"], created=NOW - 8, name="a2", status=status)
    disk.save("b", ["b"], name="b", status=status)
    shown = [row for row in disk.queue.jobs(NOW) if row.job.slug == "a"]
    match since:
        case "saved over it":
            disk.save("a", ["newer"], created=NOW - 1, name="a2")
        case "saved beside it":
            disk.save("a", ["newer"], created=NOW - 1, name="newer")
        case "saved again with the same paths":
            disk.save("a", ["a1"], created=NOW - 1, name="newer")
        case "an older one comes late":
            disk.save("a", ["late"], created=NOW - 10, name="late")
        case "removed":
            (disk.root / "a2.json").unlink()
    disk.queue.remove(shown, NOW)
    assert [paths for _, paths in disk.rows("a")] == left
    assert [paths for _, paths in disk.rows("b")] == [("b",)]


def test_saves_that_are_to_become_one_are_reason_to_look_now(disk: Disk) -> None:
    for number in (1, 2):
        disk.save("a", ["a"], created=NOW + number, name=f"a{number}", scheduledFor=format_time(NOW + 9))
    assert disk.queue.next_due(NOW) == NOW
    assert disk.queue.claim(NOW).claims == ()
    assert disk.queue.next_due(NOW) == NOW + 9


@pytest.mark.parametrize("status", ["pending", "failed"])
@pytest.mark.parametrize("name", ["older", "newer"])
def test_a_save_of_another_post_over_one_of_several_is_published_without_a_restart(
    tmp_path: Path, name: str, status: str
) -> None:
    for step in range(1, 100):
        disk = Disk(tmp_path / str(step))
        disk.save("a", ["content/1.md"], created=NOW - 9, name="older", status=status)
        disk.save("a", ["content/2.md"], created=NOW - 8, name="newer", status=status)
        disk.save("c", ["content/c.md"])
        published: Counter[str] = Counter()

        def claim(disk: Disk = disk, published: Counter[str] = published) -> None:
            claims = disk.queue.claim(NOW).claims
            published.update(claim.job.slug for claim in claims)
            disk.queue.acknowledge(claims, {})

        def save_another(disk: Disk = disk) -> None:
            disk.save("b", ["content/b.md"], name=name)

        reached = before_change(step, save_another, claim)
        for _ in range(2):
            claim()
        if not reached:
            assert step > 5
            return
        assert published["b"] == 1, f"at step {step}"
    pytest.fail("it never ends")


# Not to be read


def path_of(name: Any, folder: int | None) -> Path:  # noqa: ANN401 - as os.open
    return Path(name) if folder is None else Path(f"/proc/self/fd/{folder}").readlink() / name


def at_opening(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Path], object]) -> None:
    """Call `act` just before the file of this name, waiting or taken, is opened to be read."""
    opened = os.open

    def acting(path: Any, flags: int, *rest: Any, **keys: Any) -> int:  # noqa: ANN401 - as os.open
        if os.path.basename(path).removeprefix(".") == name and not flags & (os.O_CREAT | os.O_WRONLY):  # noqa: PTH119
            act(path_of(path, keys.get("dir_fd")))
        return opened(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", acting)


def fail(code: int) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    return act


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_file_that_may_not_be_read_is_put_aside_unread(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put(disk, "a.json", b'{"slug": "a", "paths": ["a"]}')
    disk.save("b", ["b"])
    at_opening(monkeypatch, "a.json", fail(code))
    run = Run(disk)
    run(NOW)
    monkeypatch.undo()
    (aside,) = run.quarantined
    assert "let its group or others read" in aside.error
    assert run.published == {"b": 1}
    assert b'"slug": "a"' in Path(aside.file).read_bytes()


def test_a_bad_block_under_one_file_is_shown_and_stops_nobody(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(disk)
    disk.save("b", ["b"])
    with monkeypatch.context() as broken:
        at_opening(broken, "a.json", fail(errno.EIO))
        assert [claim.job.slug for claim in claimed(disk)] == ["b"]
        reason = "the disk could not read it: Input/output error"
        assert disk.queue.unusable_files(NOW + 5) == {"a.json": reason}
        assert disk.queue.claim(NOW + 5).quarantined == ()
        due = disk.queue.next_due(NOW + 5)
        assert due is not None
        assert due > NOW + 30  # not in a busy loop
    assert [claim.job.slug for claim in claimed(disk, NOW + 6)] == ["a"]


def bind(path: Path) -> None:
    # The path of a socket is short.
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(path.parent):
        sock.bind(path.name)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("elsewhere"), bind, os.mkfifo, os.mkdir])
def test_what_takes_the_place_of_a_file_before_it_is_read_is_never_followed_nor_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    one(disk)

    def another(path: Path) -> None:
        monkeypatch.undo()
        path.unlink()
        make(path)

    at_opening(monkeypatch, "a.json", another)
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


def changes_of(operation: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The links, removals and flushes of folders that it makes, in order, with the folder of each."""
    seen: list[tuple[str, str]] = []
    link, unlink, fsync = os.link, os.unlink, os.fsync

    def linked(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.link
        link(source, target, **keys)
        seen.append(("link", str(path_of(target, keys["dst_dir_fd"]).parent)))

    def unlinked(path: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.unlink
        unlink(path, **keys)
        seen.append(("unlink", str(path_of(path, keys.get("dir_fd")).parent)))

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        where = Path(f"/proc/self/fd/{descriptor}").readlink()
        if where.is_dir():
            seen.append(("fsync", str(where)))

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", flushed)
    operation()
    monkeypatch.undo()
    return seen


def test_what_is_given_back_is_durable_in_the_queue_before_it_leaves_the_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.save("a", ["content/a.md"])
    claims = claimed(disk)
    seen = changes_of(lambda: disk.queue.release(claims), monkeypatch)
    here, there = str(disk.root), str(disk.root / ".claimed")
    assert seen[:3] == [("link", here), ("fsync", here), ("unlink", there)]
    assert ("fsync", there) in seen


def test_the_joined_paths_of_the_newest_save_are_durable_before_the_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path)
    disk.save("a", ["content/1.md"], created=NOW - 9, name="older")
    disk.save("a", ["content/2.md"], created=NOW - 8, name="newer")
    seen = changes_of(lambda: disk.queue.claim(NOW), monkeypatch)
    there = str(disk.root / ".claimed")
    assert ("unlink", there) in seen
    assert ("fsync", there) in seen[: seen.index(("unlink", there))]


@pytest.mark.parametrize("when", ["waiting", "in flight"])
def test_a_job_that_moves_while_somebody_looks_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    disk, worker = Disk(tmp_path), Disk(tmp_path)
    disk.save("a", ["content/a.md"])
    claims = list(claimed(worker)) if when == "in flight" else []
    looks = 0

    def then_it_moves(folder: Folder) -> dict[str, JobFile]:
        nonlocal looks
        looks += 1
        found = claims_module.jobs_in(folder)
        if looks == 1:
            worker.queue.release(claims)
            if when == "waiting":
                worker.queue.claim(NOW)
        return found

    (disk.root / ".claimed").mkdir(exist_ok=True)
    monkeypatch.setattr(control, "jobs_in", then_it_moves)
    assert [row.job.slug for row in disk.queue.jobs(NOW)] == ["a"]
    assert looks == 2
