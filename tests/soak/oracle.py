"""The tree oracle: what is published of random path lists, against what git itself and `lstat` say."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import stat
import traceback
from collections import Counter
from typing import TYPE_CHECKING

from briter_worker import events as seen
from soak.checks import iso
from soak.report import Report, share_out
from soak.repository import GITLINK, LAX, Blob, Tree, git, join, read_history, read_tree
from soak.trees import ATTRIBUTES, BAD, FOLDERS, IGNORE, LARGE, Oracle, RandomTree, Wanted, above, proper, put
from soak.worker import LocalSite, memory_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from soak.report import Options

SECRETS = "other"
"""A folder that no job may publish; its file has the name of a good one, too."""
LISTS = 25
"""Path lists of one drain, all against one work tree."""
DRAINS = 4
"""Drains of one site; the work tree changes in between."""
_START = 1_800_000_000.0


class Trial:
    """One site: random lists are published, and each commit is compared with what the oracle says."""

    def __init__(self, site: LocalSite, dice: random.Random, figures: Counter[str]) -> None:
        self._site = site
        self._root = site.worktree
        self._dice = dice
        self._figures = figures
        self._tree = RandomTree(site.worktree, dice)
        self._number = 0

    def prepare(self) -> None:
        """A commit with some of all that is there, and with a submodule."""
        self._tree.grow(45)
        for key, value, often in (("core.fileMode", "false", 0.25), ("core.ignoreCase", "true", 0.15)):
            if self._dice.random() < often:  # a clone that was made on another system
                git(self._root, "config", key, value)
        chosen = []
        for path in self._tree.everything():
            name = os.fspath(path.relative_to(self._root))
            kind = os.lstat(path).st_mode
            nested = any(
                (self._root / each / ".git").exists() or (self._root / each / "refs").exists()
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
        git(self._root, *LAX, "update-index", "--add", "-z", "--stdin", stdin=join(fine))
        folder = self._dice.choice(["content/module", "content/a/module"])
        if not any(each in fine for each in above(folder)):
            git(self._root, "update-index", "--add", "--cacheinfo", f"{GITLINK},{'1' * 40},{folder}")
        git(self._root, "commit", "--quiet", "--message=Some of it")
        git(self._root, "push", "--quiet", "origin", "main")

    def _save(self, name: str, paths: list[str], **keys: object) -> None:
        self._site.save(name, paths, id=name, message=f"save {name}", **keys)

    def drain(self) -> None:
        """Change the work tree, publish lists, and compare what was published."""
        self._tree.change(self._dice.randrange(25))
        self._tree.grow(self._dice.randrange(8))
        tracked = [path for path in read_tree(self._root) if "\udcff" not in path]
        held = [path for _ in range(self._dice.randrange(3)) for path in self._tree.declared(tracked)]
        if held and self._dice.random() < 0.7:
            self._number += 1
            self._save(f"held{self._number}", held, scheduledFor=iso(_START * 2))
        else:
            held = []
        lists: dict[str, list[str]] = {}
        for _ in range(LISTS):
            self._number += 1
            lists[f"job{self._number}"] = self._tree.declared(tracked)
        for order, (name, paths) in enumerate(lists.items()):
            self._save(name, paths, createdAt=iso(_START + self._number + order / 1000))
        oracle = Oracle(self._site, held)
        expected = self._expected(oracle, lists)
        every = {path for each in expected.values() if isinstance(each, Wanted) for path in each.files}
        blobs = oracle.blobs(every)
        before = _snapshot(self._root)
        events: list[seen.Event] = []
        self._site.worker(clock=lambda: _START * 1.5, emit=events.append, folders=FOLDERS).run_once()
        self._compare(expected, events, oracle.tip, blobs)
        assert _snapshot(self._root) == before, "the work tree was changed"
        staged = git(self._root, "diff-index", "--cached", "--name-only", "-z", "HEAD")
        # Git puts none of its own names into an index, from where they would be checked out unasked.
        own = {name.lower() for name in BAD}
        left = staged.split("\0")[:-1]
        kept_out = [path for path in left if not own.isdisjoint(path.lower().split("/"))]
        assert left == kept_out, f"left in the index: {staged!r}"
        self._figures["lists"] += len(lists)
        for file in self._site.queue.glob("*.json"):
            file.unlink()

    def swap(self) -> None:
        """While it is published, files and folders become links to what no job may publish."""
        tracked = read_tree(self._root)
        for _ in range(5):
            self._number += 1
            self._save(f"job{self._number}", self._tree.declared(list(FOLDERS)))
        swapped = False

        def progress(_phase: str, _done: int, _total: int) -> None:
            # Told before the first file is read, when it is known what is to be read.
            nonlocal swapped
            if not swapped:
                swapped = True
                self._tree.swap_for_links(f"{self._root}/{SECRETS}")
                self._figures["swaps"] += 1

        self._site.worker(
            clock=lambda: _START * 1.5, emit=lambda _: None, folders=FOLDERS, progress=progress
        ).run_once()
        there = read_tree(self._site.remote)
        for path in there.keys() - tracked.keys():
            assert there[path][0] in {"100644", "100755"}, f"published: {path}, {there[path]}"
        secret = git(self._root, "hash-object", "--no-filters", f"{SECRETS}/secret")
        assert secret not in {sha for path, (_, sha) in there.items() if not path.startswith(SECRETS)}, (
            "what a link points to was published"
        )
        for file in self._site.queue.glob("*.json"):
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
            sizes = [os.lstat(self._root / path).st_size for path in wanted.files]
            if any(size >= LARGE for size in sizes):
                expected[name] = "too-large"
                continue
            clashes = oracle.clashes(wanted, places)
            refused = [
                no or proper(declared) in clashes for no, declared in zip(refused, looked[name], strict=True)
            ]
            wanted.missing = {
                declared
                for declared, each in looked[name].items()
                if each is not None and oracle.is_missing(str(proper(declared)), each)
            }
            expected[name] = "nopaths" if all(refused) else wanted
        return expected

    def _compare(
        self, expected: dict[str, Wanted | str], events: list[seen.Event], tree: Tree, blobs: Tree
    ) -> None:
        outcomes = {
            event.job_id: event
            for event in events
            if isinstance(
                event, (seen.Published, seen.NoChange, seen.NoPaths, seen.DeadLettered, seen.Failed)
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
            after = put(tree, wanted, blobs)
            changed = {
                path: after.get(path)
                for path in tree.keys() | after.keys()
                if tree.get(path) != after.get(path)
            }
            deferred = bool(wanted.on_hold or wanted.missing) and not changed
            # Another job of the batch may have published the same: then there is a commit.
            kinds = (seen.Failed if deferred else seen.NoChange, seen.Published)
            assert isinstance(outcome, kinds), f"expected {wanted}: {about}"
            if wanted.missing and isinstance(outcome, seen.Failed):
                assert outcome.failure == "missing", f"expected {wanted.missing}: {about}"
            if isinstance(outcome, seen.Published):
                waits = bool(wanted.on_hold or wanted.missing)
                assert bool(outcome.waiting_paths) == waits, f"expected {wanted}: {about}"
            found = commits.pop(name, {})
            assert found == changed, f"expected {changed}, found {found}: {about}"
            self._figures["commits" if changed else "deferred" if deferred else "nothing to publish"] += 1
            tree = after
        assert not commits, f"commits of nobody: {commits}"
        assert read_tree(self._site.remote) == tree, "the remote has another tree"

    def _commits(self) -> dict[str, dict[str, Blob | None]]:
        """Return what each new commit on the remote changed, by its job."""
        first = self._number - LISTS
        found: dict[str, dict[str, Blob | None]] = {}
        for commit in read_history(self._site.remote, "main"):
            name = commit.message.strip().removeprefix("save ")
            if name.startswith("job") and int(name[3:]) > first:
                gone = "000000"
                found[name] = {
                    path: None if blob[0] == gone else blob for path, blob in commit.touched.items()
                }
        return found


def _snapshot(worktree: Path) -> dict[str, tuple[int, str]]:
    """The work tree, without git's own folder."""
    found = {}
    for current, folders, files in os.walk(worktree):
        folders[:] = [name for name in folders if os.path.join(current, name) != str(worktree / ".git")]  # noqa: PTH118
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
    folder = memory_folder()
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
        template = LocalSite.with_files(folder / "template", files)
        while figures["lists"] < lists:
            number += 1
            root = folder / f"site{number}"
            trial = Trial(template.copy(root), random.Random(f"{dice} {number}"), figures)
            trial.prepare()
            for _ in range(DRAINS):
                trial.drain()
            trial.swap()
            shutil.rmtree(root)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
        return figures, f"seed {dice}, site {number}: " + "".join(traceback.format_exception(error))[-5000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figures, ""


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """All lists, in several processes."""
    return Report(
        "oracle", *share_out(trials, "lists", options.of(10_000, 200), LISTS * DRAINS, options, tell)
    )
