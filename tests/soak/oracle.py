"""The tree oracle: what is published of random path lists, against what git itself and `lstat` say."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import shutil
import stat
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING

from briter_worker import events as seen
from soak.bystander import (
    GITLINK,
    LAX,
    Blob,
    Oracle,
    Tree,
    Wanted,
    above,
    lines,
    proper,
    tree_of,
)
from soak.grove import ATTRIBUTES, BAD, FOLDERS, IGNORE, LARGE, Grove
from soak.overtaking import Colleague, put
from soak.place import Place, in_memory
from soak.report import Report
from soak.surroundings import Cms, iso

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

SECRETS = "other"
"""A folder that no job may publish; its file has the name of a good one, too."""
LISTS = 25
"""Path lists of one drain, all against one work tree."""
DRAINS = 4
"""Drains of one site; the work tree changes in between, and at the last one the remote, too."""
_START = 1_800_000_000.0


class Trial:
    """One site: random lists are published, and each commit is compared with what the oracle says."""

    def __init__(self, place: Place, dice: random.Random, figures: Counter[str]) -> None:
        self._place = place
        self._dice = dice
        self._figures = figures
        self._grove = Grove(place, dice)
        self._cms = Cms(place)
        self._number = 0

    def prepare(self) -> None:
        """A commit with some of all that is there, and with a submodule."""
        self._grove.grow(45)
        place = self._place
        for key, value, often in (("core.fileMode", "false", 0.25), ("core.ignoreCase", "true", 0.15)):
            if self._dice.random() < often:  # a clone that was made on another system
                place.git("config", key, value)
        chosen = []
        for path in self._grove.everything():
            name = os.fspath(path.relative_to(place.site))
            kind = os.lstat(path).st_mode
            nested = any(
                (place.site / each / ".git").exists() or (place.site / each / "refs").exists()
                for each in above(name)
            )
            if (
                not stat.S_ISFIFO(kind)
                and not stat.S_ISDIR(kind)
                and not nested
                and self._dice.random() < 0.6
            ):
                chosen.append(name)
        fine = [name for name in chosen if ".git" not in name.lower().split("/")]
        place.git(*LAX, "update-index", "--add", "-z", "--stdin", stdin=lines(fine))
        folder = self._dice.choice(["content/module", "content/a/module"])
        if not any(each in fine for each in above(folder)):
            place.git("update-index", "--add", "--cacheinfo", f"{GITLINK},{'1' * 40},{folder}")
        place.git("commit", "--quiet", "--message=Some of it")
        place.git("push", "--quiet", "origin", "main")

    def drain(self, *, overtaken: bool = False) -> None:
        """The work tree changes; then lists are published, and compared.

        Where they are overtaken, somebody has pushed meanwhile.
        """
        self._grove.change(self._dice.randrange(25))
        self._grove.grow(self._dice.randrange(8))
        tracked = [path for path in tree_of(self._place, "main", self._place.site) if "\udcff" not in path]
        self._leave_out(tracked)
        held = [path for _ in range(self._dice.randrange(3)) for path in self._grove.declared(tracked)]
        if held and self._dice.random() < 0.7:
            self._number += 1
            self._cms.save(f"held{self._number}", "held", held, scheduledFor=iso(_START * 2))
        else:
            held = []
        lists: dict[str, list[str]] = {}
        for _ in range(LISTS):
            self._number += 1
            lists[f"job{self._number}"] = self._grove.declared(tracked)
        for order, (name, paths) in enumerate(lists.items()):
            self._cms.save(name, name, paths, createdAt=iso(_START + self._number + order / 1000))
        oracle = Oracle(self._place, held)
        expected = self._expected(oracle, lists)
        every = {path for each in expected.values() if isinstance(each, Wanted) for path in each.files}
        blobs = oracle.blobs(every)
        before = _snapshot(self._place)
        ground = self._overtake(oracle.tip) if overtaken else oracle.tip
        events: list[seen.Event] = []
        self._place.worker(clock=lambda: _START * 1.5, emit=events.append, folders=FOLDERS).run_once()
        self._compare(expected, events, ground, blobs, tip=oracle.tip)
        if not overtaken:
            assert _snapshot(self._place) == before, "the work tree was changed"
        staged = self._place.ask("diff-index", "--cached", "--name-only", "-z", "HEAD")
        # Git puts none of its own names into an index, from where they would be checked out unasked.
        own = {name.lower() for name in BAD}
        left = os.fsdecode(staged).split("\0")[:-1]
        kept_out = [path for path in left if not own.isdisjoint(path.lower().split("/"))]
        assert left == kept_out, f"left in the index: {staged!r}"
        self._figures["lists"] += len(lists)
        for file in self._place.queue.glob("*.json"):
            file.unlink()

    def _overtake(self, tip: Tree) -> Tree:
        here = [os.fspath(path.relative_to(self._place.site)) for path in self._grove.everything()]
        Colleague(self._place, self._dice).push(tip, sorted(here))
        self._figures["overtaken"] += 1
        return tree_of(self._place, "main", self._place.remote)

    def swap(self) -> None:
        """While it is published, files and folders become links to what no job may publish."""
        tracked = tree_of(self._place, "main", self._place.site)
        for _ in range(5):
            self._number += 1
            self._cms.save(f"job{self._number}", f"job{self._number}", self._grove.declared(list(FOLDERS)))
        swapped = False

        def progress(_phase: str, _done: int, _total: int) -> None:
            # Told before the first file is read, when it is known what is to be read.
            nonlocal swapped
            if not swapped:
                swapped = True
                self._grove.swap_for_links(f"{self._place.site}/{SECRETS}")
                self._figures["swaps"] += 1

        self._place.worker(
            clock=lambda: _START * 1.5, emit=lambda _: None, folders=FOLDERS, progress=progress
        ).run_once()
        there = tree_of(self._place, "main", self._place.remote)
        for path in there.keys() - tracked.keys():
            assert there[path][0] in {"100644", "100755"}, f"published: {path}, {there[path]}"
        secret = self._place.git("hash-object", "--no-filters", f"{SECRETS}/secret")
        assert secret not in {sha for path, (_, sha) in there.items() if not path.startswith(SECRETS)}, (
            "what a link points to was published"
        )
        for file in self._place.queue.glob("*.json"):
            file.unlink()

    def _leave_out(self, tracked: list[str]) -> None:
        """Sometimes a sparse checkout leaves files out, or a folder."""
        fine = [path for path in tracked if "/" in path and not path.startswith(SECRETS)]
        if fine and self._dice.random() < 0.1:
            shut = f"!/{self._dice.choice(fine)}"
            self._place.git(*LAX, "sparse-checkout", "set", "--no-cone", "/*", shut)
        elif fine and self._dice.random() < 0.05:
            # Git reads no such index that has names of its own in it.
            kind = (
                "--no-sparse-index"
                if any(set(path.split("/")) & set(BAD) for path in tracked)
                else "--sparse-index"
            )
            # In a cone, git takes no folder whose name it could mistake for a pattern.
            folders = [each for path in fine for each in above(path) if not set(each) & set('*?[]!#"\\')]
            folder = self._dice.choice(folders or ["content"])
            self._place.git(*LAX, "sparse-checkout", "set", "--cone", kind, folder, SECRETS)
        # `git hash-object` does not know a .gitattributes that is not in the work tree.
        tracked = [path for path in tracked if path != ".gitattributes" and not path.startswith(SECRETS)]
        if self._dice.random() < 0.3:
            chosen = self._dice.sample(tracked, min(len(tracked), 3))
            modes = self._place.ask("ls-files", "--stage", "-z").split(b"\0")
            modules = {os.fsdecode(line.partition(b"\t")[2]) for line in modes if line.startswith(b"160000")}
            chosen = [path for path in chosen if path not in modules]
            self._place.git("update-index", "--skip-worktree", "-z", "--stdin", stdin=lines(chosen))
            for path in chosen:
                file = self._place.site / path
                if not any((self._place.site / each).is_symlink() for each in above(path)) and (
                    file.is_symlink() or file.is_file()
                ):
                    file.unlink()

    def _expected(self, oracle: Oracle, lists: dict[str, list[str]]) -> dict[str, Wanted | str]:
        looked = {name: oracle.wanted(paths) for name, paths in lists.items()}
        merged: dict[str, Wanted] = {}
        for name, found in looked.items():
            merged[name] = Wanted()
            for each in (each for each in found.values() if each is not None):
                for kind in ("files", "gone", "rejected", "folders"):
                    getattr(merged[name], kind).update(getattr(each, kind))
        ignored = oracle.ignored({path for wanted in merged.values() for path in wanted.files})
        expected: dict[str, Wanted | str] = {}
        for name, wanted in merged.items():
            places = [path for declared in looked[name] if (path := proper(declared)) is not None]
            oracle.settle(wanted, ignored, places)
            refused = [
                each is None
                or proper(declared) in wanted.rejected | wanted.ignored
                or (proper(declared) in each.folders and oracle.is_barren(str(proper(declared)), wanted))
                for declared, each in looked[name].items()
            ]
            sizes = [os.lstat(self._place.site / path).st_size for path in wanted.files]
            if any(size >= LARGE for size in sizes):
                expected[name] = "too-large"
                continue
            clashes = oracle.clashes(wanted, places)
            refused = [
                no or proper(declared) in clashes for no, declared in zip(refused, looked[name], strict=True)
            ]
            expected[name] = "nopaths" if all(refused) else wanted
        return expected

    def _compare(
        self,
        expected: dict[str, Wanted | str],
        events: list[seen.Event],
        tree: Tree,
        blobs: Tree,
        *,
        tip: Tree,
    ) -> None:
        outcomes = {
            event.job_id: event
            for event in events
            if isinstance(
                event,
                (seen.Published, seen.NoChange, seen.NoPaths, seen.DeadLettered, seen.Failed),
            )
        }
        commits = self._commits()
        for name, wanted in expected.items():
            outcome = outcomes[name]
            about = f"{name}, {outcome}"
            if isinstance(wanted, str):
                word = "nopaths" if isinstance(outcome, seen.NoPaths) else getattr(outcome, "failure", None)
                assert word == wanted, f"expected {wanted}: {about}"
                assert name not in commits, f"refused, and yet a commit: {about}"
                self._figures[wanted] += 1
                continue
            after = put(self._place, tree, wanted, blobs, tip)
            if after is None:
                assert getattr(outcome, "failure", None) == "conflict", f"expected a conflict: {about}"
                assert name not in commits, f"a conflict, and yet a commit: {about}"
                self._figures["conflicts"] += 1
                continue
            changed = {
                path: after.get(path)
                for path in tree.keys() | after.keys()
                if tree.get(path) != after.get(path)
            }
            deferred = bool(wanted.on_hold) and not changed
            # Another job of the batch may have published the same: then there is a commit.
            kinds = (seen.Failed if deferred else seen.NoChange, seen.Published)
            assert isinstance(outcome, kinds), f"expected {wanted}: {about}"
            found = commits.pop(name, {})
            assert found == changed, f"expected {changed}, found {found}: {about}"
            self._figures["commits" if changed else "deferred" if deferred else "nothing to publish"] += 1
            tree = after
        assert not commits, f"commits of nobody: {commits}"
        assert tree_of(self._place, "main", self._place.remote) == tree, "the remote has another tree"

    def _commits(self) -> dict[str, dict[str, Blob | None]]:
        """What each new commit on the remote changed, by its job."""
        out = os.fsdecode(
            self._place.ask(
                *("log", "--raw", "-z", "--no-renames", "--no-abbrev", "--format=%x01%s%x02", "main"),
                cwd=self._place.remote,
            )
        )
        found: dict[str, dict[str, Blob | None]] = {}
        for entry in out.split("\x01")[1:]:
            subject, _, raw = entry.partition("\x02")
            name = subject.removeprefix("save ")
            parts = raw.lstrip("\0\n").split("\0")
            changes: dict[str, Blob | None] = {}
            for about, path in zip(parts[::2], parts[1::2], strict=False):
                _, mode, _, sha, kind = about.lstrip(":").split()
                changes[path] = None if kind == "D" else (mode, sha)
            found[name] = changes
        first = self._number - LISTS
        return {
            name: each for name, each in found.items() if name.startswith("job") and int(name[3:]) > first
        }


def _snapshot(place: Place) -> dict[str, tuple[int, str]]:
    """The work tree, without git's own folder."""
    found = {}
    for current, folders, files in os.walk(place.site):
        folders[:] = [name for name in folders if os.path.join(current, name) != str(place.site / ".git")]  # noqa: PTH118
        for name in (*folders, *files):
            path = os.path.join(current, name)  # noqa: PTH118
            mode = os.lstat(path).st_mode
            content = b""
            if stat.S_ISREG(mode):
                with open(path, "rb") as file:  # noqa: PTH123
                    content = file.read()
            found[path] = (mode, hashlib.sha256(content).hexdigest())
    return found


def trials(lists: int, dice: int) -> tuple[Counter[str], str]:
    """So many lists, on several sites; what was found, and what was not as it should be."""
    figures: Counter[str] = Counter()
    folder = in_memory()
    number = 0
    try:
        files = {
            ".gitignore": IGNORE,
            ".gitattributes": ATTRIBUTES,
            f"{SECRETS}/secret": "a secret\n",
            f"{SECRETS}/x.txt": "a secret\n",
            "config.toml": "c\n",
        }
        files |= {f"{each}/start.txt": "start\n" for each in FOLDERS}
        template = Place.make(folder / "template", files)
        while figures["lists"] < lists:
            number += 1
            root = folder / f"site{number}"
            trial = Trial(template.copy(root), random.Random(f"{dice} {number}"), figures)
            trial.prepare()
            for _ in range(DRAINS - 1):
                if figures["lists"] < lists:
                    trial.drain()
            if figures["lists"] < lists:
                trial.drain(overtaken=True)
            trial.swap()
            shutil.rmtree(root)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return figures, f"seed {dice}, site {number}: " + "".join(traceback.format_exception(error))[-5000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures, ""


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """All lists, in several processes."""
    wanted = options.of(10_000, 200)
    share = LISTS * DRAINS
    began = time.monotonic()
    figures: Counter[str] = Counter()
    failures: list[str] = []
    work = [(min(share, wanted - done), options.seed + done) for done in range(0, wanted, share)]
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=10) as pool:
        for found, trouble in pool.imap_unordered(_share, work):
            figures += found
            if trouble:
                failures.append(trouble)
            if figures["lists"] % 1000 == 0:
                tell(f"{figures['lists']:,} lists")
    seconds = time.monotonic() - began
    return Report("oracle", {**figures, "lists/s": figures["lists"] / seconds}, failures)


def _share(work: tuple[int, int]) -> tuple[Counter[str], str]:
    return trials(*work)
