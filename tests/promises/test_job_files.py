"""Job files that are no jobs, and job files that somebody changes while they are in flight."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from outcomes import assert_published, save
from sites import lines_of

from briter_worker.errors import FailureClass, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sites import Result, Site


ONE = b'{"id": "x", "slug": "x", "paths": ["content/posts/x.md"]'
TORN = {"torn": ONE, "empty": b"", "not-text": b"\xff\xfe\x00\x01", "not-json": b"slug: x\n"}
MALFORMED = {
    "wrong-types": b'{"slug": 7, "paths": "content"}',
    "a-list": b"[]",
    "no-slug": b'{"paths": []}',
    "huge": ONE + b', "n": "' + b"x" * (1 << 20) + b'"}',
    "deep": ONE + b', "n": ' + b"[" * 100 + b"]" * 100 + b"}",
    "very-deep": b"[" * 200_000,
    "twice": ONE + b', "slug": "y"}',
    "nan": ONE + b', "n": NaN}',
    "infinity": ONE + b', "n": -Infinity}',
    "nul": ONE.replace(b'"slug": "x"', b'"slug": "x\\u0000"') + b"}",
    "surrogate": ONE + b', "message": "\\udc00"}',
}


def document_of(site: Site, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((site.queue / f"{name}.json").read_bytes())
    return found


def test_what_is_no_job_is_a_dead_letter_with_its_bytes_kept_and_the_others_go_on(site: Site) -> None:
    """All of them at once: none may stop another, and none may be read as something else."""
    old = time.time() - 60
    for name, data in (TORN | MALFORMED).items():
        file = site.queue / f"{name}.json"
        file.write_bytes(data)
        os.utime(file, (old, old))
    save(site, "a", "b")
    result = site.run_once()
    assert_published(site, result, "a", "b")
    told = {Path(entry["file"]).read_bytes() for entry in result.of("quarantined")}
    assert told == set((TORN | MALFORMED).values())
    assert site.subjects() == ["Publish b", "Publish a", "Start the site"]
    for name in TORN | MALFORMED:
        job = document_of(site, name)
        code = FailureCode.UNREADABLE if name in TORN else FailureCode.MALFORMED
        assert code.failure_class is FailureClass.REFUSED
        assert (job["status"], job["failure"], job["attempts"]) == ("failed", code, 0), name
        assert job["lastError"].isprintable()
        assert "save the post again" in job["fix"]
    again = site.run_once()
    assert not again.of("quarantined")
    assert not again.of("start")


def test_a_job_with_a_broken_path_keeps_its_slug_its_message_and_its_author(site: Site) -> None:
    author = {"name": "Ada", "email": "ada@example.org"}
    site.save("hello", ["content/\0"], message="Say hello", author=author)

    (entry,) = site.run_once().of("quarantined")

    assert "NUL" in entry["error"]
    job = site.job("hello")
    assert (job["slug"], job["message"], job["author"]) == ("hello", "Say hello", author)


def test_what_cannot_be_put_aside_is_told_once_and_the_others_go_on(site: Site) -> None:
    quarantine = site.storage / "quarantine"
    quarantine.write_text("in the way\n")
    files = [site.queue / f"{name}.json" for name in ("s", "t")]
    for file in files:
        file.write_bytes(ONE)
        os.utime(file, (time.time() - 9,) * 2)
    save(site, "a")
    result = site.run_once()
    assert [event["slug"] for event in result.of("published")] == ["a"]
    assert result.returncode == 1
    (warning,) = result.of("warning")
    assert "could not be quarantined, and 1 more: " in warning["error"]
    assert f"{quarantine} is not a folder" in warning["error"]
    assert [file.read_bytes() for file in files] == [ONE, ONE]
    quarantine.unlink()
    result = site.run_once()
    assert result.returncode == 1
    assert len(result.of("quarantined")) == 2
    assert not result.of("warning")
    assert site.run_once().returncode == 0


def test_what_is_no_file_is_neither_followed_nor_waited_for(site: Site) -> None:
    secret = site.root / "secret.json"
    secret.write_text(json.dumps({"slug": "stolen", "paths": ["content/posts/welcome.md"]}))
    (site.queue / "link.json").symlink_to(secret)
    (site.queue / "folder.json").mkdir()
    (site.queue / "folder.json" / "inside").write_text("kept")
    os.mkfifo(site.queue / "pipe.json")
    with socket.socket(socket.AF_UNIX) as sock, contextlib.chdir(site.queue):  # its path is short
        sock.bind("sock.json")
    save(site, "a")
    result = site.run_once(BRITER_GIT_TIMEOUT_MS="20000")
    assert_published(site, result)
    assert "stolen" not in result.stdout
    kept = {entry["slug"]: Path(entry["file"]) for entry in result.of("quarantined")}
    assert kept.keys() == {"link", "folder", "pipe", "sock"}
    assert kept["link"].is_symlink()
    assert secret.exists()
    assert (kept["folder"] / "inside").read_text() == "kept"
    assert stat.S_ISFIFO(kept["pipe"].lstat().st_mode)
    for name in kept:
        job = document_of(site, name)
        assert (job["status"], job["failure"], job["attempts"]) == ("failed", "unreadable", 0)


def test_a_torn_file_that_is_younger_than_two_seconds_is_left_to_its_writer(site: Site) -> None:
    soon = time.time() + 60
    file = site.queue / "a.json"
    file.write_bytes(ONE)
    os.utime(file, (soon, soon))
    result = site.run_once()
    assert result.returncode == 0
    assert file.read_bytes() == ONE
    assert not result.of("quarantined")


# In flight


@contextmanager
def push_held(site: Site, *, refuse: bool = False) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A post's push waits in the remote's hook; the function lets it go and returns the whole log."""
    push = site.hold_push(f"rm $0; exit {int(refuse)}")
    with site.running("run", "--once") as worker:
        push.wait()

        def let_go() -> list[dict[str, Any]]:
            push.release()
            events = list(lines_of(worker))
            worker.wait(60)
            return events

        yield let_go


def settled(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [
        (e["event"], e["attempt"])
        for e in events
        if e["event"] in {"published", "nochange", "failed", "dead-lettered"}
    ]


def writer(site: Site, code: str) -> None:
    """A CMS: another process that does this in the queue's folder."""
    subprocess.run([sys.executable, "-c", code], cwd=site.queue, check=True)


@pytest.mark.parametrize("way", ["renamed over", "written in place"])
@pytest.mark.parametrize("refuse", [False, True], ids=["it lands", "it is refused"])
def test_a_save_during_the_push_is_published_next(site: Site, way: str, *, refuse: bool) -> None:
    save(site, "a")
    (file,) = site.queue.glob("a-*.json")
    newer = json.loads(file.read_bytes()) | {
        "id": "newer",
        "message": "Newer",
        "createdAt": "2039-01-01T00:00:00Z",
        "paths": ["content/posts/a.md", "content/posts/a.txt"],
    }
    with push_held(site, refuse=refuse) as let_go:
        site.write_post("content/posts/a.md", "newer\n")
        site.write_post("content/posts/a.txt", "newer\n")
        (site.root / "job").write_text(json.dumps(newer))
        target = f"pathlib.Path({file.name!r})"
        move = f"pathlib.Path('../../job').rename({target})"
        write = f"{target}.write_bytes(pathlib.Path('../../job').read_bytes())"
        writer(site, f"import pathlib; {move if way == 'renamed over' else write}")
        events = let_go()
    subjects = site.subjects()
    assert subjects == ["Newer", *([] if refuse else ["Publish a"]), "Start the site"]
    assert settled(events)[-1] == ("published", 1)
    assert site.remote_file("content/posts/a.md") == "newer\n"
    assert site.jobs() == []
    assert not list((site.queue / ".claimed").glob("[!.]*.json"))


def test_a_cancel_during_the_push_comes_too_late_and_says_so(site: Site) -> None:
    save(site, "a")
    with push_held(site) as let_go:
        cancelled = site.command("cancel", "a")
        events = let_go()
    assert "in flight" in cancelled.stderr
    assert settled(events) == [("published", 1)]
    assert site.jobs() == []


def test_a_cancel_during_the_push_of_a_part_ends_the_wait_for_the_rest_and_says_so(site: Site) -> None:
    site.write_post("content/posts/a.md", "a\n")
    site.save("a", ["content/posts/a.md", "content/posts/later.png"])
    with push_held(site) as let_go:
        site.command("cancel", "a")
        events = let_go()
    outcomes = [each for each in events if each.get("slug") == "a" and each["event"] != "start"]
    assert [each["event"] for each in outcomes] == ["published", "cancelled"]
    assert site.jobs() == []
    receipts = site.command("history", "--json").json()
    assert [each["outcome"] for each in receipts] == ["cancelled", "published"]


def test_a_save_behind_the_push_can_be_cancelled_and_stays_cancelled(site: Site) -> None:
    save(site, "a")
    with push_held(site) as let_go:
        site.save("a", ["content/posts/a.md"], id="newer", message="Newer")
        assert site.command("cancel", "newer").returncode == 0
        events = let_go()
    assert settled(events) == [("published", 1)]
    assert site.subjects() == ["Publish a", "Start the site"]
    assert site.jobs() == []


@pytest.mark.parametrize("refuse", [False, True], ids=["it lands", "it is refused"])
def test_a_job_that_is_deleted_during_the_push_is_not_brought_back(site: Site, *, refuse: bool) -> None:
    save(site, "a", "b")
    with push_held(site, refuse=refuse) as let_go:
        writer(site, "import pathlib; next(pathlib.Path('.claimed').glob('a-*.json')).unlink()")
        events = let_go()
    assert ("published", 1) in settled(events)
    assert "b" in [e["slug"] for e in events if e["event"] == "published"]
    assert [job for job in site.jobs() if job["slug"] == "a"] == []
    assert site.run_once().names() == ["worker-started", "worker-stopped"]
    assert len({commit for commit, subject in site.remote_log() if subject == "Publish b"}) == 1


# What a scheduled job declares, whatever becomes of its file


LATER = "content/posts/later.md"
SCHEDULED: dict[str, object] = {
    "id": "later",
    "slug": "later",
    "paths": [LATER],
    "scheduledFor": "2999-01-01",
}


@pytest.fixture
def job(site: Site) -> Path:
    """Return the file of a scheduled job, beside a due job for the folder of the job's post."""
    site.write_post(LATER, "later\n")
    site.write_post("content/posts/now.md", "now\n")
    return site.queue / "later.json"


def publish_folder(site: Site) -> Result:
    site.save("all", ["content/posts"])
    return site.run_once()


def put(job: Path, data: bytes, *, age: float = 0.0) -> None:
    job.write_bytes(data)
    os.utime(job, (time.time() - age,) * 2)


BROKEN: dict[str, dict[str, object]] = {
    "negative attempts": {"attempts": -1},
    "a bad time": {"scheduledFor": "next week"},
    "a bad author": {"author": {"name": 7}},
    "never scheduled": {"scheduledFor": None, "attempts": -1},
}
DAMAGES = {
    "torn": b'{"id": "later", "slug": "la',
    "empty": b"",
    "paths unreadable": json.dumps(SCHEDULED | {"paths": 7}).encode(),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_malformed_job_that_no_worker_saw_before_withholds_what_it_names(
    site: Site, job: Path, broken: str
) -> None:
    put(job, json.dumps(SCHEDULED | BROKEN[broken]).encode())
    for _ in range(2):
        publish_folder(site)
        assert site.remote_file("content/posts/now.md") == "now\n"
        assert site.remote_file(LATER) is None
    assert site.job("all")["lastError"] == f"a job that cannot be read declares {LATER}"


@pytest.mark.parametrize("age", [0.0, 60.0])
@pytest.mark.parametrize(
    "text",
    [
        f'{{"slug": "later", "paths": ["{LATER}"], "scheduledFor": "2099',
        f'{{"slug": "later", "paths": ["{LATER}", "content/po',
        f'{{"slug": "later", "scheduledFor": "2099-01-01", "paths": ["{LATER}"'.replace("/", "\\/"),
        f'{{"slug": "later", "slug": "twice", "paths": ["{LATER}"]}}',
        f'{{"slug": "later", "scheduledFor": NaN, "paths": ["{LATER}"]}}',
        f'{{"slug": "later", "scheduledFor": "2099-01-01", "paths": "{LATER}"}}',
        f'{{"slug": "later", "scheduledFor": "2099-01-01", "paths": ["{LATER}", 7]}}',
        f'{{"slug": "later", "scheduledFor": "2099-01-01", "Path": ["{LATER}"]}}',
    ],
)
def test_a_file_that_is_no_job_and_that_no_worker_saw_before_withholds_what_it_names(
    site: Site, job: Path, text: str, age: float
) -> None:
    put(job, text.encode(), age=age)
    for _ in range(2):
        result = publish_folder(site)
        assert site.remote_file("content/posts/now.md") == "now\n"
        assert site.remote_file(LATER) is None
    assert result.of("failed")[0]["error"] == f"a job that cannot be read declares {LATER}"


def test_a_new_save_frees_what_a_half_written_file_of_the_post_withholds(site: Site, job: Path) -> None:
    put(job, f'{{"slug": "later", "paths": ["{LATER}"], "mess'.encode(), age=60.0)
    publish_folder(site)
    site.save("later", [LATER])
    assert site.run_once().of("published")
    assert site.remote_file(LATER) == "later\n"
    site.command("publish-now", "all")
    site.run_once()
    assert site.command("list", "--json").json() == []


def test_what_is_scheduled_while_the_files_are_read_waits_for_its_time(site: Site, job: Path) -> None:
    late = site.root / "late.json"
    late.write_text(json.dumps(SCHEDULED))
    site.git("config", "filter.late.clean", f"mv {late} {job} 2>/dev/null; cat")
    site.write_post(".gitattributes", "*.late filter=late\n")
    site.write_post("content/posts/read.late", "read\n")
    publish_folder(site)
    assert site.remote_file("content/posts/now.md") == "now\n"
    assert not late.exists()
    assert site.remote_file(LATER) is None


@pytest.mark.parametrize("age", [0.0, 60.0])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_earlier_worker_read_stays_withheld_when_the_file_is_damaged(
    site: Site, job: Path, damage: str, age: float
) -> None:
    put(job, json.dumps(SCHEDULED).encode(), age=90.0)
    site.run_once()  # as cron starts one
    put(job, DAMAGES[damage], age=age)
    for _ in range(2):
        publish_folder(site)
        assert site.remote_file("content/posts/now.md") == "now\n"
        assert site.remote_file(LATER) is None


def test_withheld_files_are_free_when_the_damaged_job_is_cancelled(site: Site, job: Path) -> None:
    put(job, json.dumps(SCHEDULED | {"attempts": -1}).encode())
    publish_folder(site)
    assert site.remote_file(LATER) is None
    assert site.command("cancel", "later").returncode == 0
    publish_folder(site)
    assert site.remote_file(LATER) == "later\n"


@pytest.mark.parametrize("place", ["queue/.claimed", "queue/.claimed/.lock", "worker.lock"])
@pytest.mark.parametrize("kind", ["link", "wrong kind"])
def test_what_is_in_the_place_of_the_workers_own_files_is_named_with_the_fix(
    site: Site, place: str, kind: str
) -> None:
    save(site, "a")
    target, own = site.root / "precious", site.storage / place
    target.mkdir()
    (target / ".x.tmp").touch()
    own.parent.mkdir(exist_ok=True)
    if kind == "link":
        own.symlink_to(target)
    elif place.endswith("lock"):
        own.mkdir()
    else:
        own.write_text("")
    result = site.run_once()
    assert result.returncode == 1
    assert str(own) in result.stderr
    assert result.stderr.endswith("Fix: remove it\n")
    assert [file.name for file in target.iterdir()] == [".x.tmp"]
    own.rmdir() if own.is_dir() and kind != "link" else own.unlink()
    assert_published(site, site.run_once())
