"""Random histories of a CMS, a worker, an operator, a remote and a clock, held against a small model.

Everything but the clock and the worker's death is real: the queue's folder, git, the remote. The worker
dies at any call of a port, before it or after it, and at any start of git; what it would have done on its
way out is not done either. `model` says what must be true, independent of how the worker decides.
"""

from __future__ import annotations

import os
import random
import shutil
import traceback
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from briter_worker.errors import DeclinedError, PublishError
from soak.checks import (
    FOLDER_SLUG,
    LINK,
    MEDIA,
    POSTS,
    CheckedHistory,
    Fate,
    Model,
    Save,
    first_line,
    iso,
    last_line,
    post_text,
)
from soak.ledger import Ledger
from soak.report import Report, share_out
from soak.repository import git, read_files
from soak.users import NOTES, Operator, RemoteFaults, commit_files
from soak.worker import CrashedError, CrashPoint, LocalSite, memory_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from briter_worker.worker import Worker
    from soak.report import Options

STEPS = 50
_CHUNK = 25
"""Examples of one process: each worker leaves a thread behind, for as long as its process lives."""
_START = 1_800_000_000.0
_HOUR = 3600.0
_SLUGS = range(len(POSTS))


class Machine(CheckedHistory):
    """One history."""

    template: LocalSite
    folder: Path

    @initialize()
    def begin(self) -> None:
        """A fresh site, and a worker."""
        self.figures["examples"] += 1
        root = self.folder / "site"
        shutil.rmtree(root, ignore_errors=True)
        self.site = self.template.copy(root)
        (self.site.worktree / LINK).symlink_to("../../config.toml")
        self.ledger = Ledger()
        self.operator = Operator(self.site, self.ledger, random.Random(0))
        self.remote = RemoteFaults(self.site)
        self.model = Model()
        self.now = self.latest = _START
        self.number = 0
        self.live = True
        self.worker: Worker | None = None
        self.crash = CrashPoint()
        self.events = []
        self.torn = {}
        self.flying = set()
        self.joined = {}
        before = set(self.site.git("rev-list", "main").split())
        self.known = {True: before, False: set(before)}
        self.messages = Counter()

    def teardown(self) -> None:
        """Calm comes, and everything that was promised is there."""
        if hasattr(self, "site"):
            self._calm()
            self.check_end()

    # What the CMS does.

    @rule(
        slug=st.sampled_from(_SLUGS),
        media=st.booleans(),
        hold=st.sampled_from([0.0, 0.0, 0.0, 0.0, 600.0, 7 * _HOUR]),
        older=st.sampled_from([0.0, 0.0, 0.0, 900.0]),
    )
    def save(self, slug: int, media: bool, hold: float, older: float) -> None:  # noqa: FBT001
        self._save(f"p{slug}", [POSTS[slug], *([MEDIA[slug]] if media else [])], hold=hold, older=older)

    @rule(slug=st.sampled_from(_SLUGS), junk=st.sampled_from([LINK, "config.toml", "../x", "content/.git/x"]))
    def save_with_a_path_that_is_refused(self, slug: int, junk: str) -> None:
        """The rest of it is published."""
        self._save(f"p{slug}", [junk, POSTS[slug]])

    @rule(slug=st.sampled_from(_SLUGS))
    def delete(self, slug: int) -> None:
        self._save(f"p{slug}", [POSTS[slug]], gone=True)

    @rule(hold=st.sampled_from([0.0, 0.0, 600.0]), wide=st.booleans())
    def save_a_folder(self, hold: float, wide: bool) -> None:  # noqa: FBT001
        """Everything under a folder, but for what is on hold."""
        self._save(FOLDER_SLUG, ["content/" if wide else "content/posts"], hold=hold)

    @rule(what=st.sampled_from(["type", "paths", "link", "list"]))
    def save_what_is_refused(self, what: str) -> None:
        """A job that can never be published."""
        keys: dict[str, Any] = {}
        # What a damaged job declares stays withheld until it is cancelled: here, a path of nobody else's.
        own = ["content/posts/refused.md"] if what == "list" else [POSTS[0]]
        paths = {"paths": ["config.toml", "a/../b"], "link": [LINK]}.get(what, own)
        word = "nopaths" if what in ("paths", "link") else "unknown-type" if what == "type" else "malformed"
        if what == "type":
            keys["type"] = "rss"
        if what == "list":
            keys["attempts"] = "many"
        self._job(f"bad{self.number}", paths, refused=word, **keys)

    @rule(content=st.sampled_from([b"", b'{"slug": "torn"', b"\xff\xfe", b"[1, 2"]))
    def tear(self, content: bytes) -> None:
        """A file that is no JSON."""
        self.number += 1
        name = f"torn{self.number}"
        file = self.site.queue / f"{name}.json"
        file.write_bytes(content)
        os.utime(file, (self.now, self.now))
        self.torn[name] = content

    def _save(
        self, slug: str, paths: list[str], *, hold: float = 0.0, older: float = 0.0, gone: bool = False
    ) -> None:
        if slug != FOLDER_SLUG:
            for path in (p for p in paths if p in POSTS or p in MEDIA):
                version = f"{path.rpartition('/')[2]} {self.number}"
                self._write(path, None if gone else version)
        self._job(slug, paths, hold=hold, older=older)

    def _write(self, path: str, version: str | None) -> None:
        """Edit the file that is there: only the first line changes."""
        file = self.site.worktree / path
        if version is None:
            file.unlink(missing_ok=True)
        else:
            last = last_line(file.read_bytes()) if file.exists() else "-"
            temp = self.site.write_post(f"{path}.tmp", post_text(version, last))
            temp.rename(file)
        self.model.write(path, version)

    def _job(
        self,
        slug: str,
        paths: list[str],
        *,
        hold: float = 0.0,
        older: float = 0.0,
        refused: str = "",
        **keys: object,
    ) -> None:
        self.number += 1
        created = round(self.now - older + self.number / 1000, 3)
        until = round(self.now + hold, 3) if hold else 0.0
        self.latest = max(self.latest, until, self.now)
        save = Save(f"{slug}-{self.number}", slug, tuple(paths), created, until, refused)
        self.model.save(save, self.now, self.existing_posts())
        schedule = {"scheduledFor": iso(until)} if until else {}
        job = {"id": save.id, "message": f"save {save.id}", "createdAt": iso(created), "kept": self.number}
        self.site.save(slug, paths, **{**job, **schedule, **keys})

    # What a person does at the queue.

    @rule(slug=st.sampled_from([*(f"p{number}" for number in _SLUGS), FOLDER_SLUG]))
    def cancel(self, slug: str) -> None:
        """What waits or has failed is taken out; what is in flight is not."""
        before = self.files()
        try:
            self.site.open_queue(lambda: self.now).cancel(slug, self.now)
        except DeclinedError:
            return
        after, flying = self.files(), self.in_flight()
        for job_id, document in before.items():
            if document["slug"] == slug:
                assert job_id not in after or job_id in flying, f"{job_id} was cancelled and is there"
                if job_id not in after and job_id in self.model.saves:
                    self.model.saves[job_id].fate = Fate.CANCELLED
        self.model.excuse(slug)

    @rule(slug=st.sampled_from([*(f"p{number}" for number in _SLUGS), FOLDER_SLUG]))
    def retry(self, slug: str) -> None:
        try:
            jobs = self.site.open_queue(lambda: self.now).retry(slug, self.now)
        except DeclinedError:
            return
        for job in jobs:
            self.model.saves[job.id].attempts = 0
        assert not any(
            document["slug"] == slug and document.get("status") == "failed"
            for document in self.files().values()
        )

    # What time does.

    @rule(seconds=st.sampled_from([1.0, 5.0, 61.0, 301.0, 1801.0, 8 * _HOUR]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([30.0, _HOUR, 48 * _HOUR]))
    def clock_is_set_back(self, seconds: float) -> None:
        self.latest = max(self.latest, self.now)
        self.now -= seconds

    # What the worker does.

    @rule()
    def drain(self) -> None:
        self._drain(None)

    @rule(steps=st.integers(1, 60))
    def drain_and_die(self, steps: int) -> None:
        """The worker dies on its way; another one takes its place when it drains next."""
        self._drain(steps)

    @rule()
    def restart(self) -> None:
        self.worker = None

    @rule()
    def switch_dry_run(self) -> None:
        """A new worker, that only rehearses or that does not."""
        self.live = not self.live
        self.worker = None

    def _drain(self, steps: int | None) -> None:
        before = self.files()
        secrets = self.model.secrets(self.now, before.keys() & self.model.saves.keys())
        mine = self.operator.state()
        if self.worker is None:
            self.crash = CrashPoint()
            self.worker = self.site.worker(
                clock=lambda: self.now, emit=self.events.append, dry_run=not self.live, crash=self.crash
            )
        self.crash.left = steps
        self.events.clear()
        self.figures["drains"] += 1
        died = False
        try:
            self.worker.run_once()
        except CrashedError:
            died = True
            self.worker = None
            self.crash.restore()
            self.figures["deaths"] += 1
        self.crash.left = None
        self.check_events(died=died)
        self.check_commits(secrets)
        assert self.operator.state() == mine, "the worker touched the operator's files"

    # What the operator does in the repository.

    def is_locked(self) -> bool:
        """Return True if a dead worker has the index: git lets nobody change it until the next worker ran."""
        return (self.site.worktree / ".git/index.lock").exists()

    @rule()
    def operator_edits(self) -> None:
        """Change a file, and leave it unstaged."""
        self.operator.edit()

    @precondition(lambda self: not self.operator.is_merging() and not self.is_locked())
    @rule(stages=st.booleans())
    def operator_stages(self, stages: bool) -> None:  # noqa: FBT001
        """Stage a change, or unstage all."""
        (self.operator.stage if stages else self.operator.unstage)()

    @precondition(lambda self: not self.operator.is_merging() and not self.operator.is_away())
    @rule(pushes=st.booleans())
    def operator_commits(self, pushes: bool) -> None:  # noqa: FBT001
        """Commit on the branch; push it, unless the remote has moved on."""
        if self.is_locked():
            return
        assert self.operator.commit()
        if pushes and not self.remote.is_away():
            self.remote.recover()
            self.operator.push()

    @rule(pushes=st.booleans(), steps=st.one_of(st.none(), st.integers(1, 30)))
    def operator_pulls(self, pushes: bool, steps: int | None) -> None:  # noqa: FBT001
        """Run `pull --rebase`; the command may die."""
        mine = self.operator.state()
        crash = CrashPoint(steps)
        self.worker = None
        try:
            with suppress(DeclinedError, PublishError):
                self.site.pull(crash, push=pushes)
        except CrashedError:
            crash.restore()
            self.figures["deaths"] += 1
        assert self.operator.state() == mine, "the pull touched the operator's files"

    @precondition(lambda self: not self.operator.is_merging() and not self.is_locked())
    @rule()
    def operator_switches(self) -> None:
        assert (self.operator.come_back if self.operator.is_away() else self.operator.leave)()

    @precondition(lambda self: not self.operator.is_away() and not self.is_locked())
    @rule()
    def operator_merges(self) -> None:
        if self.operator.is_merging():
            assert self.operator.end_merge()
        else:
            self.operator.unstage()
            self.operator.begin_merge()

    # What happens at the remote.

    @rule(slug=st.sampled_from(_SLUGS), what=st.sampled_from(["foot", "foot", "other", "head", "gone"]))
    def colleague_pushes(self, slug: int, what: str) -> None:
        """A commit on the remote: to another file, to another line, or to what the CMS writes, too."""
        path: str = POSTS[slug]
        self.number += 1
        version = f"o{self.number}"
        content = read_files(self.remote.repository).get(path)
        text: str | None = version
        if what == "other" or content is None:
            path = f"others/{self.number}.txt"
        elif what == "foot":
            self.model.touched.add(path)
            self.model.feet[path] = version
            text = post_text(first_line(content) or "", version)
        else:
            self.model.touched.add(path)
            self.model.disputed.add(path)
            text = post_text(version, last_line(content)) if what == "head" else None
        repository, message = self.remote.repository, f"colleague {self.number}"
        self.ledger.persons[message] = frozenset({path})
        assert commit_files(repository, git(repository, "rev-parse", "main"), {path: text}, message)

    @rule(how=st.sampled_from(["gone", "all", "p1", "well", "well"]))
    def remote_fails(self, how: str) -> None:
        """It cannot be reached, or refuses all or some, or is well again."""
        self.remote.recover()
        if how == "gone":
            self.remote.vanish()
        elif how != "well":
            self.model.refusing = True
            self.remote.refuse(".*" if how == "all" else f"save {how}-")

    # How it ends.

    def _calm(self) -> None:
        """Everything is as it should be again, and all the time there is has passed."""
        self.remote.recover()
        self.live, self.worker = True, None
        if self.is_locked():
            self._drain(None)
        assert self.operator.end_merge()
        assert self.operator.come_back()
        self._until_nothing_is_due()
        self.site.pull(CrashPoint(), push=True)
        self._write("content/last.md", "the last one")
        self._job("last", ["content/last.md"])
        self._until_nothing_is_due()
        for job in self.site.open_queue(lambda: self.now).retry_all(self.now):
            self.model.saves[job.id].attempts = 0
        self._until_nothing_is_due()

    def _until_nothing_is_due(self) -> None:
        for _ in range(8):
            self.latest = self.now = max(self.now, self.latest) + 2 * _HOUR
            self._drain(None)
            waiting = [each for each in self.files().values() if each.get("status") != "failed"]
            if not waiting and not self.in_flight():
                return
        raise AssertionError(f"it never ends: {waiting}")


def histories(examples: int, dice: int) -> tuple[Counter[str], str]:
    """Run histories; return how often what happened, and what went wrong, with the steps that lead to it."""
    os.environ["LC_ALL"] = "C.UTF-8"
    figures: Counter[str] = Counter()
    folder = memory_folder()

    @seed(dice)
    class ThisMachine(Machine):
        pass

    profile = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        phases=(Phase.generate,),  # to shrink a failing one takes minutes
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        files = {path: post_text("start", "start") for path in (*POSTS[:2], *MEDIA[:2])}
        files |= {"config.toml": "x = 1\n", **NOTES}
        ThisMachine.template = LocalSite.with_files(folder / "template", files)
        ThisMachine.folder, ThisMachine.figures = folder, figures
        run_state_machine_as_test(ThisMachine, settings=profile)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return figures, f"seed {dice}: " + "".join(traceback.format_exception(error))[-6000:]
    else:
        return figures, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """All histories, in several processes; a failing one is told with the steps that lead to it."""
    examples = options.of(5_000, 20)
    figures, failures = share_out(histories, "examples", examples, _CHUNK, options, tell)
    names = ("examples", "saves", "drains", "deaths", "published", "commits", "failed", "examples/s")
    shown = {name: figures.get(name, 0) for name in names}
    return Report("machine", {"steps in each, at most": STEPS, **shown}, failures)
