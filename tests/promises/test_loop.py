"""How the loop ends and how it goes on, from outside: a lost lock, a stop at any place, a remote in doubt."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outcomes import save
from sites import events_in, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site

FAST = {"BRITER_WORKER_BACKOFF_MS": "0", "BRITER_WORKER_POLL_INTERVAL_MS": "100"}


class Running:
    """A worker whose log goes to a file, so that it can be read while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        return events_in(self.text)

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def has(self, name: str) -> bool:
        return f'"event":"{name}"' in self.text.replace('": "', '":"')

    def end(self) -> int:
        """What it exits with after a SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


@contextmanager
def worker(site: Site, **env: str) -> Iterator[Running]:
    log = site.root / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "briter_worker", "run"],
            cwd=site.root,
            env=site.environment(**FAST, **env),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Running(process, log)
        finally:
            process.kill()
            process.wait()


def die_in_a_push(site: Site, *slugs: str) -> None:
    """The jobs are in flight, their worker is dead, and the remote has none of them."""
    save(site, *slugs)
    begun = site.root / "begun"
    site.hook(f"touch {begun}\nsleep 1\nexit 1")
    with worker(site) as running:
        eventually(begun.exists)
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
    # The hook, an heir of the worker's push, keeps the lock until it is gone.
    eventually(lambda: is_free(site.storage / "worker.lock"))
    begun.unlink()
    (site.remote / "hooks" / "pre-receive").unlink()


def is_free(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def in_flight(site: Site) -> int:
    return len(list((site.queue / ".claimed").glob("[!.]*.json")))


def test_a_worker_whose_lock_file_is_gone_publishes_nothing_more_and_ends(site: Site) -> None:
    with worker(site) as running:
        eventually(lambda: running.has("worker-started"))
        (site.storage / "worker.lock").unlink()
        save(site, "a")
        assert running.process.wait(20) == 1
        assert running.names()[-2:] == ["warning", "worker-stopped"]
        assert "lock" in running.events[-2]["error"]
        assert running.names().count("start") <= 1
    assert len(site.remote_log()) == 1
    assert site.job("a").get("attempts", 0) == 0
    assert site.run_once().of("published")


def test_a_lock_lost_between_claim_and_push_gives_the_job_back(site: Site) -> None:
    # The filter runs while the post is staged.
    site.write_post(".gitattributes", "*.md filter=thief\n")
    site.git("config", "filter.thief.clean", f"rm -f {site.storage}/worker.lock; cat")
    save(site, "a")
    with worker(site) as running:
        assert running.process.wait(20) == 1
        assert running.names() == ["worker-started", "start", "warning", "worker-stopped"]
    assert len(site.remote_log()) == 1
    assert (site.job("a")["slug"], site.job("a").get("attempts", 0)) == ("a", 0)
    assert in_flight(site) == 0


def test_a_stop_during_recovery_leaves_what_has_not_begun(site: Site) -> None:
    die_in_a_push(site, "a", "b", "c", "d")
    begun = site.root / "begun"
    site.hook(f"touch {begun}\nexec sleep 30")
    with worker(site, BRITER_WORKER_SHUTDOWN_TIMEOUT_MS="200") as running:
        eventually(begun.exists)
        assert running.end() == 0
        assert Counter(running.names())["start"] == 1, "one by one"
    (site.remote / "hooks" / "pre-receive").unlink()
    site.run_once(**FAST)
    assert Counter(subject for _, subject in site.remote_log()) == Counter(
        ["Start the site", *(f"Publish {slug}" for slug in "abcd")]
    )
    assert site.jobs() == []


def test_jobs_in_doubt_wait_while_others_go_on_and_are_decided_without_a_restart(site: Site) -> None:
    die_in_a_push(site, "a")
    away = site.root / "away.git"
    site.remote.rename(away)
    with worker(site) as running:
        eventually(lambda: running.has("warning"))
        save(site, "b")
        eventually(lambda: running.has("dead-lettered") or running.has("failed"))
        assert in_flight(site) >= 1
        time.sleep(2)
        # Asked at 0, 0.2, 0.6, 1.4, … s, and told once.
        assert Counter(running.names())["warning"] == 1
        away.rename(site.remote)
        eventually(lambda: len(site.remote_log()) == 3, within=30)
        assert running.end() == 0
    assert site.jobs() == []
