"""Random histories of a CMS, a worker, an operator, a remote and a clock, held against a small model.

Everything but the clock and the worker's death is real: the queue's folder, git, the remote. The worker
dies at any call of a port, before it or after it, and at any start of git; what it would have done on its
way out is not done either. `model` says what must be true, independent of how the worker decides.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
import traceback
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from briter_worker.errors import DeclinedError, PublishError
from soak.checks import CheckedHistory
from soak.model import FOLDER_SLUG, Fate, Model, Save
from soak.place import DiedError, Fuse, Place, in_memory
from soak.report import Report
from soak.surroundings import (
    LINK,
    MEDIA,
    POSTS,
    Cms,
    Elsewhere,
    Operator,
    first_line,
    iso,
    last_line,
    template_files,
    text,
)

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

    template: Place
    folder: Path

    @initialize()
    def begin(self) -> None:
        """A fresh site, and a worker."""
        self.figures["examples"] += 1
        root = self.folder / "place"
        shutil.rmtree(root, ignore_errors=True)
        self.place = self.template.copy(root)
        (self.place.site / LINK).symlink_to("../../config.toml")
        self.cms, self.operator = Cms(self.place), Operator(self.place)
        self.elsewhere = Elsewhere(self.place)
        self.model = Model()
        self.first = self.elsewhere.tip()
        self.now = _START
        self.latest = _START
        self.number = 0
        self.live = True
        self.worker: Worker | None = None
        self.fuse = Fuse()
        self.events = []
        self.torn = {}
        self.flying = set()
        self.known = {True: {self.first}, False: {self.first}}
        self.messages = Counter()

    def teardown(self) -> None:
        """Calm comes, and everything that was promised is there."""
        if hasattr(self, "place"):
            self._calm()
            self.check_end()

    # What the CMS does.

    @rule(slug=st.sampled_from(_SLUGS))
    def save_plainly(self, slug: int) -> None:
        """Most saves are like this."""
        self._save(f"p{slug}", [POSTS[slug]])

    @rule(
        slug=st.sampled_from(_SLUGS),
        media=st.booleans(),
        hold=st.sampled_from([0.0, 0.0, 0.0, 600.0, 7 * _HOUR]),
        older=st.sampled_from([0.0, 0.0, 0.0, 900.0]),
    )
    def save(self, slug: int, media: bool, hold: float, older: float) -> None:  # noqa: FBT001
        """A post is edited and saved."""
        self._save(f"p{slug}", [POSTS[slug], *([MEDIA[slug]] if media else [])], hold=hold, older=older)

    @rule(slug=st.sampled_from(_SLUGS), junk=st.sampled_from([LINK, "config.toml", "../x", "content/.git/x"]))
    def save_with_a_path_that_is_refused(self, slug: int, junk: str) -> None:
        """The rest of it is published."""
        self._save(f"p{slug}", [junk, POSTS[slug]])

    @rule(slug=st.sampled_from(_SLUGS))
    def delete(self, slug: int) -> None:
        """A post is deleted, and that is saved."""
        self._save(f"p{slug}", [POSTS[slug]], gone=True)

    @rule(hold=st.sampled_from([0.0, 0.0, 600.0]), wide=st.booleans())
    def save_a_folder(self, hold: float, wide: bool) -> None:  # noqa: FBT001
        """Everything under a folder, but for what is on hold."""
        self._save(FOLDER_SLUG, ["content/" if wide else "content/posts"], hold=hold)

    @rule(what=st.sampled_from(["type", "paths", "link", "list"]))
    def save_what_is_refused(self, what: str) -> None:
        """A job that can never be published."""
        keys: dict[str, Any] = {}
        paths = {"paths": ["config.toml", "a/../b"], "link": [LINK]}.get(what, [POSTS[0]])
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
        self.cms.tear(name, content, self.now)
        self.torn[name] = content

    def _save(
        self, slug: str, paths: list[str], *, hold: float = 0.0, older: float = 0.0, gone: bool = False
    ) -> None:
        if slug != FOLDER_SLUG:
            for path in (p for p in paths if p in POSTS or p in MEDIA):
                version = f"{path.rpartition('/')[2]} {self.number}"
                if gone:
                    self.cms.delete(path)
                else:
                    self.cms.write(path, version)
                self.model.write(path, None if gone else version)
        self._job(slug, paths, hold=hold, older=older)

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
        self.model.save(save, self.now, self.cms.existing())
        self.cms.save(
            save.id,
            slug,
            paths,
            createdAt=iso(created),
            scheduledFor=iso(until) if until else None,
            kept=self.number,
            **keys,
        )

    # What a person does at the queue.

    @rule(slug=st.sampled_from([*(f"p{number}" for number in _SLUGS), FOLDER_SLUG]))
    def cancel(self, slug: str) -> None:
        """What waits or has failed is taken out; what is in flight is not."""
        before = self.files()
        try:
            self.place.open_queue(lambda: self.now).cancel(slug, self.now)
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
        """What failed is due at once, as if never tried."""
        try:
            jobs = self.place.open_queue(lambda: self.now).retry(slug, self.now)
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
        """The clock goes on."""
        self.now += seconds

    @rule(seconds=st.sampled_from([30.0, _HOUR, 48 * _HOUR]))
    def clock_is_set_back(self, seconds: float) -> None:
        """The clock goes backwards."""
        self.latest = max(self.latest, self.now)
        self.now -= seconds

    # What the worker does.

    @rule()
    def drain(self) -> None:
        """What is due is published."""
        self._drain(None)

    @rule(steps=st.integers(1, 60))
    def drain_and_die(self, steps: int) -> None:
        """The worker dies on its way; another one takes its place when it drains next."""
        self._drain(steps)

    @rule()
    def restart(self) -> None:
        """A new worker, in good order."""
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
            self.fuse = Fuse()
            self.worker = self.place.worker(
                clock=lambda: self.now, emit=self.events.append, dry_run=not self.live, fuse=self.fuse
            )
        self.fuse.left = steps
        self.events.clear()
        self.figures["drains"] += 1
        died = False
        try:
            self.worker.run_once()
        except DiedError:
            died = True
            self.worker = None
            self.fuse.restore()
            self.figures["deaths"] += 1
        self.fuse.left = None
        self.check_events(died=died)
        self.check_commits(secrets)
        assert self.operator.state() == mine, "the worker touched the operator's files"

    # What the operator does in the repository.

    @rule()
    def operator_edits(self) -> None:
        """Change a file, and leave it unstaged."""
        self.operator.edits()

    @precondition(lambda self: not self.operator.is_merging() and not self.operator.is_locked_out())
    @rule(stages=st.booleans())
    def operator_stages(self, stages: bool) -> None:  # noqa: FBT001
        """Stage a change, or unstage it."""
        (self.operator.stages if stages else self.operator.unstages)()

    @precondition(lambda self: not self.operator.is_merging() and not self.operator.is_away())
    @rule(pushes=st.booleans())
    def operator_commits(self, pushes: bool) -> None:  # noqa: FBT001
        """Commit on the branch; push it, unless the remote has moved on."""
        if self.operator.is_locked_out():
            return
        self.operator.commits_something()
        if pushes and not self.elsewhere.is_gone():
            self.elsewhere.is_well_again()
            with suppress(AssertionError):
                self.place.git("push", "--quiet", "origin", "main")

    @rule(pushes=st.booleans(), steps=st.one_of(st.none(), st.integers(1, 30)))
    def operator_pulls(self, pushes: bool, steps: int | None) -> None:  # noqa: FBT001
        """Run `pull --rebase`; the command may die."""
        mine = self.operator.state()
        fuse = Fuse()
        fuse.left = steps
        self.worker = None
        try:
            with suppress(DeclinedError, PublishError):
                self.place.pull(fuse, push=pushes)
        except DiedError:
            fuse.restore()
            self.figures["deaths"] += 1
        assert self.operator.state() == mine, "the pull touched the operator's files"

    @precondition(lambda self: not self.operator.is_merging() and not self.operator.is_locked_out())
    @rule()
    def operator_switches(self) -> None:
        """Switch to another branch, or back."""
        (self.operator.comes_back if self.operator.is_away() else self.operator.leaves)()

    @precondition(lambda self: not self.operator.is_away() and not self.operator.is_locked_out())
    @rule()
    def operator_merges(self) -> None:
        """Begin a merge, or abort it."""
        if self.operator.is_merging():
            self.operator.aborts_the_merge()
        else:
            self.operator.unstages()
            self.operator.begins_a_merge()

    # What happens elsewhere.

    @rule(slug=st.sampled_from(_SLUGS), what=st.sampled_from(["foot", "foot", "other", "head", "gone"]))
    def somebody_else_pushes(self, slug: int, what: str) -> None:
        """A commit on the remote: to another file, to another line, or to what the CMS writes, too."""
        path = POSTS[slug]
        self.number += 1
        version = f"o{self.number}"
        content = self.elsewhere.file(path)
        if what == "other" or content is None:
            self.elsewhere.changes(f"others/{self.number}.txt", version)
            return
        self.model.touched.add(path)
        if what == "foot":
            self.model.feet[path] = version
            self.elsewhere.changes(path, text(first_line(content) or "", version))
            return
        self.model.disputed.add(path)
        self.elsewhere.changes(path, text(version, last_line(content)) if what == "head" else None)

    @rule(how=st.sampled_from(["gone", "all", "p1", "well", "well"]))
    def remote_changes_its_mood(self, how: str) -> None:
        """It cannot be reached, or refuses all or some, or is well again."""
        self.elsewhere.is_well_again()
        if how == "gone":
            self.elsewhere.vanishes()
        elif how != "well":
            self.model.refusing = True
            self.elsewhere.refuses(".*" if how == "all" else f"save {how}-")

    # How it ends.

    def _calm(self) -> None:
        """Everything is as it should be again, and all the time there is has passed."""
        self.elsewhere.is_well_again()
        self.live, self.worker = True, None
        if self.operator.is_locked_out():
            self._drain(None)
        if self.operator.is_merging():
            self.operator.aborts_the_merge()
        if self.operator.is_away():
            self.operator.comes_back()
        self._until_nothing_is_due()
        self.place.pull(Fuse(), push=True)
        self.cms.write("content/last.md", "the last one")
        self.model.write("content/last.md", "the last one")
        self._job("last", ["content/last.md"])
        self._until_nothing_is_due()
        for job in self.place.open_queue(lambda: self.now).retry_all(self.now):
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


def histories(
    examples: int, dice: int, *, steps: int = STEPS, shrink: bool = False
) -> tuple[Counter[str], str]:
    """So many histories; how often what happened, and what went wrong, with the history in which it did.

    To shrink that takes minutes, and is for whoever looks into it.
    """
    figures: Counter[str] = Counter()
    folder = in_memory()
    try:

        @seed(dice)
        class ThisMachine(Machine):
            pass

        ThisMachine.template = Place.make(folder / "template", template_files())
        ThisMachine.folder = folder
        ThisMachine.figures = figures
        profile = settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=False,
            phases=(Phase.generate, *([Phase.shrink] if shrink else [])),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(ThisMachine, settings=profile)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            return figures, f"seed {dice}: " + "".join(traceback.format_exception(error))[-6000:]
        return figures, ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """All histories, in several processes; a failing one is told with the steps that lead to it."""
    examples = options.of(5_000, 20)
    chunks = [min(_CHUNK, examples - done) for done in range(0, examples, _CHUNK)]
    began = time.monotonic()
    figures: Counter[str] = Counter()
    failures: list[str] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=1) as pool:
        work = [(count, options.seed + number) for number, count in enumerate(chunks)]
        for found, trouble in pool.imap_unordered(_chunk, work):
            figures += found
            tell(f"{figures['examples']:,} histories, {figures['drains']:,} drains")
            if trouble:
                failures.append(trouble)
    seconds = time.monotonic() - began
    return Report(
        "machine",
        {
            "histories": figures["examples"],
            "steps in each, at most": STEPS,
            **{
                name: figures[name]
                for name in ("saves", "drains", "deaths", "published", "commits", "failed")
            },
            "histories/s": figures["examples"] / seconds,
        },
        failures,
    )


def _chunk(work: tuple[int, int]) -> tuple[Counter[str], str]:
    os.environ["LC_ALL"] = "C.UTF-8"
    return histories(*work)
