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
from disk_steps import before_change, killed_at, refused_at
from queue_engines import NOW, Disk

from briter_worker.errors import Failure
from briter_worker.job import State, format_time
from briter_worker.queues import index
from briter_worker.queues.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from briter_worker.ports import Batch, PutAside

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


def batch_of(disk: Disk, now: float = NOW) -> Batch:
    batch = disk.queue.claim(now).batch
    assert batch is not None
    return batch


class Run:
    """A worker that publishes all it claims, and notes it."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.published: Counter[str] = Counter()
        self.paths: set[str] = set()
        self.put_aside: list[PutAside] = []

    def __call__(self, now: float = NOW) -> None:
        found = self.disk.queue.claim(now)
        self.put_aside += found.put_aside
        if found.batch is not None:
            self.published.update(claim.job.slug for claim in found.batch.claims)
            self.paths.update(path for claim in found.batch.claims for path in claim.job.paths)
            self.disk.queue.finish(found.batch, found.batch.claims)
            self.disk.queue.close(found.batch)

    def go_on(self, *moments: float) -> None:
        """What nobody was told of is found, too."""
        for now in moments:
            self.disk.queue.notice()
            self(now)
        hidden = [path.name for path in (self.disk.root / ".claimed").iterdir() if path.name != ".lock"]
        assert hidden == [], "left in flight"


# ── gone ────────────────────────────────────────────────────────────────────────────────────────────


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
        assert run.published["a"] + len(run.put_aside) <= 1, f"at step {step}"
        if not reached:
            assert run.published["a"] + len(run.put_aside) == 1
            assert step > 5
            return
    pytest.fail("it never ends")


def test_a_dead_letter_that_somebody_removes_while_its_post_is_published_is_in_nobodys_way(
    tmp_path: Path,
) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        letter = disk.root / "letter.json"
        disk.save("a", ["old"], created=NOW - 9, name="letter", status="failed", failure="rejected")
        disk.save("a", ["new"], name="new")
        run = Run(disk)
        reached = before_change(step, partial(letter.unlink, missing_ok=True), run)
        run.go_on(NOW)
        assert run.published == {"a": 1}, f"at step {step}"
        assert disk.rows("a") == [], f"at step {step}"
        if not reached:
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
        operation = partial(disk.queue.retry_all if command == "retry" else disk.queue.revive, NOW)
        reached = before_change(step, partial((disk.root / "a.json").unlink, missing_ok=True), operation)
        disk.queue.notice()
        assert disk.rows("b") == [(State.PENDING, ("b",))], f"at step {step}"
        assert disk.rows("a") in ([], [(State.PENDING, ("a",))]), f"at step {step}"
        if not reached:
            assert step > 5
            return
    pytest.fail("it never ends")


def test_a_folder_that_is_taken_away_with_all_in_it_is_an_empty_queue(disk: Disk) -> None:
    disk.save("a", ["a"], name="a")
    batch = batch_of(disk)
    disk.save("b", ["b"], name="b")
    assert [row.job.slug for row in disk.queue.jobs(NOW)] == ["a", "b"]
    disk.root.rename(disk.folder / "elsewhere")
    assert disk.queue.jobs(NOW) == []
    assert disk.queue.next_due(NOW) is None
    assert disk.queue.cancelled(batch) == set()
    disk.root.mkdir()
    disk.save("c", ["c"], name="c")
    assert [claim.job.slug for claim in batch_of(disk).claims] == ["c"]


def test_a_file_that_goes_while_the_folder_is_listed_is_not_there(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save("a", ["a"], name="a")
    disk.save("b", ["b"], name="b")
    scandir = os.scandir

    @contextlib.contextmanager
    def then_one_goes(folder: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(folder) as entries:
            found = list(entries)
        (disk.root / "a.json").unlink()
        yield found

    monkeypatch.setattr(os, "scandir", then_one_goes)
    assert disk.queue.stuck(NOW) == {}
    monkeypatch.undo()
    assert [row.job.slug for row in disk.queue.jobs(NOW)] == ["b"]


def test_a_batch_that_is_closed_while_somebody_looks_is_no_trouble(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save("a", ["a"])
    disk.save("b", ["b"], scheduledFor=format_time(NOW + 9))
    batch = batch_of(disk)
    reader = Disk(disk.folder).queue
    read = Journal._read  # noqa: SLF001 - the moment between listing the journals and reading one

    def just_closed(journal: Journal, path: Path) -> object:
        disk.queue.finish(batch, batch.claims)
        disk.queue.close(batch)
        return read(journal, path)

    monkeypatch.setattr(Journal, "_read", just_closed)
    assert [row.job.slug for row in reader.jobs(NOW)] == ["b"]


def test_what_has_been_shown_can_still_be_asked_for_its_details_when_it_is_gone(disk: Disk) -> None:
    disk.save(
        "a", ["content/a.md"], id="job-a", message="Hello", author={"name": "Ada", "email": "a@example.org"},
        scheduledFor=format_time(NOW + 9),
    )  # fmt: skip
    disk.save("b", ["b"], name="b")
    a, b = sorted(disk.queue.jobs(NOW), key=lambda row: row.job.slug)
    assert b.changed_at == b.path.stat().st_ctime
    before = a.document
    a.path.unlink()
    b.path.unlink()
    disk.save("c", ["c"], name="b")  # another post's job has its name now
    assert a.changed_at == 0.0
    assert a.place == str(a.path)
    assert {key: a.document[key] for key in before} == before
    assert (b.document["slug"], b.document["paths"]) == ("b", ["b"])


# ── another one ─────────────────────────────────────────────────────────────────────────────────────


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
        assert run.put_aside == [], f"at step {step}"
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
        assert {Path(aside.file).read_bytes() for aside in run.put_aside} <= {b"{"}, f"at step {step}"
        if not reached:
            assert len(run.put_aside) == 1
            assert step > 5
            return
        if data.startswith(b"["):
            assert data in {path.read_bytes() for path in disk.root.glob("a*.json")}, f"at step {step}"
            letters = len(run.put_aside) - sum(overwritten)  # as a new save takes an old one's place
            assert [state for state, _ in disk.rows("a")] == [State.FAILED] * letters, f"at step {step}"
        else:
            assert run.published == {"a": 1}, f"at step {step}"
    pytest.fail("it never ends")


def test_a_dead_letter_over_which_the_post_is_saved_again_is_not_revived(tmp_path: Path) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        disk.save("a", ["a"], name="a", status="failed", failure="auth", attempts=3)

        def save(disk: Disk = disk) -> None:
            disk.save("b", ["b"], name="a", attempts=2)

        reached = before_change(step, save, partial(disk.queue.revive, NOW))
        disk.queue.notice()
        assert disk.rows("a") in ([], [(State.PENDING, ("a",))]), f"at step {step}"
        if not reached:
            assert step > 5
            return
        assert disk.document("b")["attempts"] == 2, f"at step {step}"
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
        (aside,) = run.put_aside
        assert (Path(aside.file) / "inside").read_text() == "kept", f"at step {step}"
        if not reached:
            assert step > 3
            return
    pytest.fail("it never ends")


def test_dying_while_a_torn_file_is_given_back_leaves_it_once(tmp_path: Path) -> None:
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        torn(disk)
        (disk.folder / "quarantine").write_text("in the way")
        died = killed_at(step, partial(disk.queue.claim, NOW))
        disk.die()
        disk.queue.recover(NOW)
        (disk.folder / "quarantine").unlink()
        run = Run(disk)
        run.go_on(NOW, NOW + 120)
        (aside,) = run.put_aside
        assert Path(aside.file).read_bytes() == b"{", f"at step {step}"
        if not died:
            assert step > 3
            return
    pytest.fail("it never ends")


def test_a_name_that_becomes_free_again_while_a_job_is_given_back_is_not_needed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(disk)
    batch = batch_of(disk)
    one(disk)
    link = os.link

    def then_it_goes(source: Any, target: Any, **keys: Any) -> None:  # noqa: ANN401 - as os.link
        try:
            link(source, target, **keys)
        except FileExistsError:
            Path(target).unlink()
            raise

    monkeypatch.setattr(os, "link", then_it_goes)
    disk.queue.release(batch, batch.claims)
    monkeypatch.undo()
    disk.queue.close(batch)
    assert disk.rows("a") == [(State.PENDING, ("a",))]
    assert not list((disk.root / ".claimed").glob("*.json"))


def test_a_writer_that_begins_to_save_again_while_a_worker_recovers_loses_nothing(disk: Disk) -> None:
    path = put(disk, "a.json", b'{"slug": "a", "paths": ["old"]}')
    with path.open("r+b") as file:
        batch_of(disk)
        disk.die()
        looks = 0

        def truncate(_: tuple[int, int]) -> None:
            nonlocal looks
            looks += 1
            if looks == 2:  # it has been read; it is not remembered yet
                file.truncate(0)

        disk.queue.rely_on_notice(truncate)
        (again,) = disk.queue.recover(NOW)
        assert looks == 2
        disk.queue.finish(again, again.claims)
        disk.queue.close(again)
        file.write(b'{"slug": "a", "paths": ["newer"]}')
    disk.queue.notice()
    assert disk.rows("a") == [(State.PENDING, ("newer",))]


@pytest.mark.parametrize(
    ("created", "until", "is_overtaken"),
    [(NOW, NOW + 9, True), (NOW, None, False), (NOW - 9, NOW + 9, False)],
)
def test_a_post_in_flight_is_overtaken_by_a_newer_save_that_is_on_hold(
    disk: Disk, created: float, until: float | None, *, is_overtaken: bool
) -> None:
    disk.save("a", ["a"], created=NOW - 1, name="a")
    disk.save("b", ["b"], created=NOW - 1, name="b")
    batch = batch_of(disk)
    assert disk.queue.overtaken(batch, NOW) == set()
    held = {} if until is None else {"scheduledFor": format_time(until)}
    disk.save("a", ["a"], created=created, name="again", **held)
    assert disk.queue.overtaken(batch, NOW) == ({"a.json"} if is_overtaken else set())
    assert disk.queue.overtaken(batch, NOW + 9) == set()  # its time has come


def test_what_is_on_hold_is_found_anew_only_when_it_is_another(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_RACY_NS", 0)  # no file is too young to be believed
    disk.save("a", ["a"], scheduledFor=format_time(NOW + 9))
    found = disk.queue.held_paths(NOW)
    assert disk.queue.held_paths(NOW + 1) is found
    assert set(disk.queue.held_paths(NOW + 9)) == set()
    disk.save("b", ["b"], scheduledFor=format_time(NOW + 19))
    disk.queue.notice()
    assert set(disk.queue.held_paths(NOW + 9)) == {"b"}


def test_a_batch_that_is_closed_late_does_not_unsettle_the_next(disk: Disk) -> None:
    one(disk)
    first = batch_of(disk)
    disk.queue.put_off(first, first.claims[0], Failure.LOST_RACE, "busy", NOW)
    second = batch_of(disk)
    disk.queue.close(first)
    disk.queue.finish(second, second.claims)
    disk.queue.close(second)
    assert disk.rows("a") == []


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
    disk.queue.notice()
    disk.queue.remove(shown, NOW)
    disk.queue.notice()
    assert [paths for _, paths in disk.rows("a")] == left
    assert [paths for _, paths in disk.rows("b")] == [("b",)]


def test_saves_that_are_to_become_one_are_reason_to_look_now(disk: Disk) -> None:
    for number in (1, 2):
        disk.save("a", ["a"], created=NOW + number, name=f"a{number}", scheduledFor=format_time(NOW + 9))
    assert disk.queue.next_due(NOW) == NOW
    assert disk.queue.claim(NOW).batch is None
    assert disk.queue.next_due(NOW) == NOW + 9


# ── not to be read ──────────────────────────────────────────────────────────────────────────────────


def at_opening(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Path], object]) -> None:
    """`act` just before the file of this name is opened to be read."""
    opened = os.open

    def acting(path: Any, flags: int, *rest: Any, **keys: Any) -> int:  # noqa: ANN401 - as os.open
        if os.path.basename(path) == name and not flags & (os.O_CREAT | os.O_WRONLY):  # noqa: PTH119
            act(Path(path))
        return opened(path, flags, *rest, **keys)

    monkeypatch.setattr(os, "open", acting)


def test_a_file_that_goes_before_it_is_read_is_not_there(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    one(disk)
    disk.save("b", ["b"])
    at_opening(monkeypatch, "a.json", lambda path: path.unlink())
    assert disk.queue.stuck(NOW) == {}
    monkeypatch.undo()
    assert [row.job.slug for row in disk.queue.jobs(NOW)] == ["b"]


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
    (aside,) = run.put_aside
    assert "let its group or others read" in aside.reason
    assert run.published == {"b": 1}
    assert b'"slug": "a"' in Path(aside.file).read_bytes()


def test_a_file_that_may_be_read_in_time_is_a_job(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_RACY_NS", 3600 * 10**9)  # all that is so young is read again at each look
    path = put(disk, "a.json", b'{"slug": "a", "paths": ["a"]}', age=0.0)
    with monkeypatch.context() as refused:
        at_opening(refused, path.name, fail(errno.EACCES))
        assert disk.queue.claim(NOW).batch is None
        assert disk.queue.claim(NOW + 1).batch is None
    assert [claim.job.slug for claim in batch_of(disk, NOW + 1).claims] == ["a"]


def test_a_bad_block_under_one_file_is_shown_and_stops_nobody(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(disk)
    disk.save("b", ["b"])
    with monkeypatch.context() as broken:
        at_opening(broken, "a.json", fail(errno.EIO))
        assert [claim.job.slug for claim in batch_of(disk).claims] == ["b"]
        assert disk.queue.stuck(NOW + 5) == {"a.json": "the disk could not read it: Input/output error"}
        assert disk.queue.claim(NOW + 5).put_aside == ()
        due = disk.queue.next_due(NOW + 5)
        assert due is not None
        assert due > NOW + 30  # not in a busy loop
    disk.queue.notice()
    assert [claim.job.slug for claim in batch_of(disk, NOW + 6).claims] == ["a"]


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.symlink_to("elsewhere"), "a symbolic link"),
        (bind, "a socket"),
        (os.mkfifo, "a named pipe"),
        (os.mkdir, "a folder"),
    ],
)
def test_what_takes_the_place_of_a_file_before_it_is_read_is_never_followed_nor_waited_for(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], kind: str
) -> None:
    one(disk)

    def another(path: Path) -> None:
        monkeypatch.undo()
        path.unlink()
        make(path)

    at_opening(monkeypatch, "a.json", another)
    assert disk.queue.stuck(NOW) == {"a.json": f"it is {kind}, and a job is a regular file"}
    (aside,) = disk.queue.claim(NOW).put_aside
    assert f"it is {kind}" in aside.reason
    assert not stat.S_ISREG(Path(aside.file).lstat().st_mode)


def test_a_file_that_the_system_hands_out_in_small_pieces_is_read_whole(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(disk)
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: read(descriptor, min(size, 7)))
    assert [claim.job.slug for claim in batch_of(disk).claims] == ["a"]


@pytest.mark.parametrize("size", [9, 0, 60])
def test_a_file_that_shrinks_or_grows_while_it_is_read_is_read_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    data = b'{"slug": "a", "paths": ["a"]}'
    path = put(disk, "a.json", data)
    read = os.read

    def meanwhile(descriptor: int, count: int) -> bytes:
        monkeypatch.undo()
        path.write_bytes(data.ljust(size) if size > len(data) else data[:size])
        os.utime(path, (NOW, NOW))
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", meanwhile)
    if size > len(data):
        assert disk.queue.stuck(NOW) == {}
    else:
        assert disk.queue.claim(NOW).batch is None
        put(disk, "a.json", data, age=0.0)
    assert [claim.job.slug for claim in batch_of(disk, NOW + 1).claims] == ["a"]


def test_what_the_kernel_has_told_of_is_looked_at_again_when_the_look_failed(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def changes(_: tuple[int, int]) -> list[str]:
        names, told[:] = told[:], []
        return names

    disk.queue.rely_on_notice(changes)
    assert disk.queue.jobs(NOW) == []
    one(disk)
    told.append("a.json")
    with monkeypatch.context() as broken:
        broken.setattr(os, "lstat", lambda path: fail(errno.EIO)(Path(path)))
        with pytest.raises(OSError, match="Input/output error"):
            disk.queue.next_due(NOW)
    assert disk.queue.next_due(NOW) == 0.0


@pytest.mark.parametrize("damage", [b"", b"\0" * 50, b"null\n", b'{"started": true}\n', b"{half"])
def test_a_journal_that_is_damaged_from_its_start_owns_nothing(disk: Disk, damage: bytes) -> None:
    one(disk)
    batch_of(disk)
    (journal,) = (disk.root / ".claimed").glob(".journal-*")
    journal.write_bytes(damage)
    disk.die()
    assert list(disk.queue.recover(NOW)) == []
    assert disk.rows("a") == [(State.PENDING, ("a",))]
    (claim,) = batch_of(disk).claims
    assert claim.attempt == 1


def test_a_journal_that_is_damaged_further_on_is_read_around_the_damage(disk: Disk) -> None:
    one(disk)
    batch = batch_of(disk)
    (journal,) = (disk.root / ".claimed").glob(".journal-*")
    with journal.open("ab") as file:
        file.write(b"\0\0\0\nnull\n[]\n7\n{half")
    disk.queue.begin(batch)
    disk.die()
    (again,) = disk.queue.recover(NOW)
    assert (again.key, again.claims) == (batch.key, batch.claims)


def test_a_pipe_that_may_not_be_linked_is_left_as_it_is_and_never_opened(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    one(disk)
    held = disk.root / ".claimed" / "pipe.json"
    held.parent.mkdir()
    os.mkfifo(held)  # whose worker died before it was put aside
    monkeypatch.setattr(os, "link", lambda source, _, **__: fail(errno.EPERM)(source))
    with pytest.raises(OSError, match="only a file can be put back") as refused:
        disk.queue.recover(NOW)
    assert refused.value.filename == str(held)
    monkeypatch.undo()
    assert stat.S_ISFIFO(held.lstat().st_mode)
    disk.queue.recover(NOW)
    run = Run(disk)
    run.go_on(NOW)
    assert run.published == {"a": 1}
    assert [aside.slug for aside in run.put_aside] == ["pipe"]


def test_a_full_disk_at_any_step_of_a_move_to_another_file_system_loses_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def across(source: Any, target: Any) -> None:  # noqa: ANN401 - as os.rename
        if (Path(source).parent.name, Path(target).parent.name) == (".claimed", "quarantine"):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        rename(source, target)

    monkeypatch.setattr(os, "rename", across)
    for step in STEPS:
        disk = Disk(tmp_path / str(step))
        torn(disk)
        run = Run(disk)
        hit = refused_at(step, run, lasting=False)
        disk.die()
        disk.queue.recover(NOW)
        run.go_on(NOW + 120)
        kept = {path.suffix: path.read_bytes() for path in (disk.folder / "quarantine").iterdir()}
        assert kept == {".json": b"{"}, f"at step {step}"
        if not hit:
            assert step > 8
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize("data", [None, b'{"slug": "a", "paths": ["a"]}'], ids=["removed", "saved anew"])
def test_what_somebody_makes_of_the_letter_of_a_file_that_stays_is_what_counts(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    letter = disk.root / "a.json"
    rename = os.rename

    def refused(source: Any, target: Any) -> None:  # noqa: ANN401 - as os.rename
        if Path(target).parent.name != "quarantine":
            rename(source, target)
            return
        monkeypatch.undo()
        assert b'"failed"' in letter.read_bytes()
        letter.unlink()
        if data is not None:
            put(disk, letter.name, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torn(disk)
    monkeypatch.setattr(os, "rename", refused)
    run = Run(disk)
    run()
    assert run.put_aside == []
    run.go_on(NOW, NOW + 120)
    assert run.published["a"] == (data is not None)
    (aside,) = run.put_aside
    assert Path(aside.file).read_bytes() == b"{"


def test_what_a_person_has_put_into_quarantine_is_listed_too(disk: Disk) -> None:
    torn(disk)
    (aside,) = disk.queue.claim(NOW).put_aside
    own = Path(aside.file).with_name("mine.json")
    own.write_bytes(b"123")
    kept = {entry.path: (entry.bytes, entry.since) for entry in disk.queue.quarantined()}
    assert kept == {Path(aside.file): (1, NOW), own: (3, own.stat().st_ctime)}
