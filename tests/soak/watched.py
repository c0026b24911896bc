"""What must be true after each step of a history, and at its end."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hypothesis.stateful import RuleBasedStateMachine

from briter_worker import events as told
from soak.model import REFUSED, Fate, Model, Save
from soak.place import DELAYS, MAX_ATTEMPTS, WORKER, Place
from soak.surroundings import LINK, Cms, Elsewhere, Human, first_line, iso, last_line

if TYPE_CHECKING:
    from collections import Counter

_OUTCOMES = (told.Published, told.NoChange, told.NoPaths, told.Failed, told.DeadLettered)


class Watched(RuleBasedStateMachine):
    """A history that is held against its model."""

    place: Place
    model: Model
    human: Human
    elsewhere: Elsewhere
    now: float
    events: list[told.Event]
    torn: dict[str, bytes]
    """Files that are no jobs, by name."""
    flying: set[str]
    """What was in flight after the last drain."""
    known: dict[bool, set[str]]
    """The commits that were looked at, on the remote and here."""
    said: Counter[str]
    """Commits on the remote's branch, by message."""
    figures: Counter[str]
    cms: Cms
    rejected: set[str]
    """Commits of dry runs that the remote has rejected."""

    def _told_rightly(self, *, died: bool) -> None:
        """Exactly one outcome for each attempt; attempts, delays and reasons as they should be."""
        started: dict[str, int] = {}
        files = self._files()
        for event in self.events:
            if not isinstance(event, told.JobEvent):
                continue
            save = self.model.saves.get(event.job_id)
            if save is None:
                assert isinstance(event, told.Quarantined), f"an event for no save: {event}"
                assert event.job_id.startswith("torn"), f"no save: {event}"
                continue
            if isinstance(event, told.JobStarted):
                assert save.fate in (Fate.OPEN, Fate.UNTOLD), f"{save.fate}, and tried again: {event}"
                assert event.job_id not in started, f"started twice at once: {event}"
                started[event.job_id] = event.attempt
                extra = save.deaths
                assert save.attempts < event.attempt <= save.attempts + 1 + extra, f"{save} and {event}"
            elif isinstance(event, _OUTCOMES):
                self._outcome(save, event, started)
            elif isinstance(event, told.Superseded):
                save.fate = Fate.SUPERSEDED
                winner = self.model.saves[event.superseded_by]
                assert winner.slug == save.slug, f"superseded by a stranger: {event}"
                assert winner.created > save.created, f"the older save won: {save}, {winner}"
            elif isinstance(event, told.Revived):
                save.attempts = 0
            elif isinstance(event, told.Cancelled):
                started.pop(save.id, None)
                save.fate = Fate.CANCELLED
                self.model.excuse(save.slug)
        assert died or not started, f"no outcome was told for {sorted(started)}"
        self._accounted_for(files, died=died)
        self.flying = self._in_flight()

    def _outcome(self, save: Save, event: Any, started: dict[str, int]) -> None:  # noqa: ANN401 - one of several
        self.figures[event.name] += 1
        attempt = started.pop(save.id, None)
        if attempt is None:
            assert save.id in self.flying, f"an outcome of nothing that was begun: {event}"
        else:
            assert event.attempt == attempt, f"another attempt was begun: {event}"
        if isinstance(event, (told.Published, told.NoChange)):
            save.fate = Fate.DONE
            assert not save.refused, f"it should have been refused: {event}"
            return
        save.attempts = event.attempt
        assert event.error, f"no reason: {event}"
        word = "nopaths" if isinstance(event, told.NoPaths) else event.failure
        known = self.model.may_fail_with(save, word) or (word == "nopaths" and self._asks_for_nothing(save))
        assert known, f"this cannot be what went wrong: {event}"
        save.deaths = 0
        if isinstance(event, told.Failed):
            assert event.attempt < MAX_ATTEMPTS
            assert abs(event.retry_at - (self.now + DELAYS[event.attempt - 1])) < 1
        elif word in REFUSED:
            self.model.excuse(save.slug)
        else:
            assert event.attempt >= MAX_ATTEMPTS, f"buried too early: {event}"

    def _asks_for_nothing(self, save: Save) -> bool:
        """Whether the folder has no post in it, here or in git: a link is left, and that is refused."""
        tracked = self.place.git("ls-tree", "-r", "--name-only", "main", "content/posts/").splitlines()
        return save.paths == (str(PurePosixPath(LINK).parent),) and not self.cms.existing() and not tracked

    def _excuse_rejected(self) -> None:
        """What the remote rejects of dry runs is kept at refs of its own."""
        refs = self.place.git("for-each-ref", "--format=%(objectname)", "refs/briter/rejected")
        for sha in set(refs.split()) - self.rejected:
            self.rejected.add(sha)
            for path in self.place.git("diff-tree", "-r", "--no-commit-id", "--name-only", sha).splitlines():
                there = self.place.git("ls-tree", "--name-only", sha, path)
                content = self.place.ask("cat-file", "blob", f"{sha}:{path}") if there else None
                self.model.leave_out(path, first_line(content))

    def _accounted_for(self, files: dict[str, dict[str, Any]], *, died: bool) -> None:
        flying = self._in_flight()
        done = {event.slug for event in self.events if isinstance(event, (told.Published, told.NoChange))}
        for save in self.model.saves.values():
            if died and save.id in flying | self.flying:
                save.deaths += 1  # it comes after all that was told
            document = files.get(save.id)
            if document is None:
                if save.fate is Fate.OPEN:
                    # What is stored comes before what is told; and a published save removes dead letters.
                    assert died or save.slug in done, f"lost: {save}"
                    save.fate = Fate.UNTOLD
                continue
            assert save.fate is Fate.OPEN, f"{save.fate.value}, and it is there: {document}"
            assert document["kept"] == int(save.id.rpartition("-")[2]), "an unknown key was changed"
            if save.until:
                assert document["scheduledFor"] == iso(save.until)
            if save.id in flying:
                continue
            attempts = document.get("attempts") or 0
            if not isinstance(attempts, int):
                continue  # not read yet: it will be put aside
            if died:
                assert attempts in {0, *range(save.attempts, save.attempts + 2 + save.deaths)}
                save.attempts = attempts
            assert attempts == save.attempts, f"attempts counted wrongly: {document}"
            if document.get("status") == "failed":
                assert document["lastError"], f"a dead letter without a reason: {document}"
                assert document["failure"], f"a dead letter without a word: {document}"

    def _git_is_right(self, secrets: set[str]) -> None:
        """Nothing twice, nothing extra, nothing early."""
        for repository in (self.place.site, self.elsewhere.repository):
            is_remote = repository != self.place.site
            # Not `--not`: git goes by dates there, and in these histories the clock goes backwards.
            new = set(self.place.git("rev-list", "--all", cwd=repository).split()) - self.known[is_remote]
            if not new:
                continue
            self.known[is_remote] |= new
            out = self.place.git(
                *("log", "--no-walk", "--stdin", "--no-color", "--unified=0", "--patch", "--no-renames"),
                "--format=%x01%H%x02%P%x02%an%x02%cn%x02%B%x02",
                cwd=repository,
                stdin="\n".join(sorted(new)).encode(),
            )
            on_branch = set(self.place.git("rev-list", "main", cwd=repository).split())
            for entry in out.split("\x01")[1:]:
                sha, parents, _author, committer, message, patch = entry.split("\x02", 5)
                lines = {line[1:] for line in patch.splitlines() if line.startswith("+")}
                early = lines & secrets
                assert not early, f"in git before its time: {early} ({message.strip()})"
                self.model.seen |= lines
                if committer == WORKER[0]:
                    self._is_as_declared(parents, message, patch)
                    if sha in on_branch and is_remote:
                        self.said[message] += 1
                        assert self.said[message] == 1, f"twice on the remote: {message}"
                        self.figures["commits"] += 1
                else:
                    is_known = sha in self.elsewhere.commits or "by hand" in message or message == "x"
                    assert is_known, f"a commit of nobody: {sha} {committer} {message!r}"

    def _is_as_declared(self, parents: str, message: str, patch: str) -> None:
        assert len(parents.split()) == 1, "a commit of the worker's has one parent"
        job_id = message.strip().removeprefix("save ")
        assert message.strip() == f"save {job_id}", f"not the declared message: {message!r}"
        save = self.model.saves[job_id]
        declared = {
            path for each in self.model.saves.values() if each.slug == save.slug for path in each.paths
        }
        for line in patch.splitlines():
            if not line.startswith("diff --git a/"):
                continue
            path = line.removeprefix("diff --git a/").partition(" b/")[0]
            inside = any(path == each or path.startswith(each.rstrip("/") + "/") for each in declared)
            assert inside, f"{message.strip()} touches {path}, of which it said nothing"
            assert path != LINK, "a link was published"

    def _all_is_well(self) -> None:
        there = self.elsewhere.files()
        letters = {
            document["slug"]: document.get("failure")
            for document in self._files().values()
            if document.get("status") == "failed"
        }
        for (slug, path), number in self.model.owed.items():
            if self.model.is_contested(path):
                continue
            line = first_line(self.elsewhere.file(path)) if path in there else None
            assert self.model.is_settled(path, number, line), (
                f"lost: {slug} owes {self.model.versions[path][number:]} in {path}, "
                f"the remote has {line}; dead letters: {letters}"
            )
            if path in self.model.feet and line is not None:
                foot = last_line(self.elsewhere.file(path) or b"")
                assert foot == self.model.feet[path], f"somebody else's edit of {path} was reverted"
        for slug, word in letters.items():
            assert word in REFUSED, f"{slug} is still a dead letter: {word}"
        kept = [file.read_bytes() for file in self.place.quarantine.glob("*")]
        for name, content in self.torn.items():
            assert content in kept, f"what was put aside is gone: {name}"
            assert not (self.place.queue / f"{name}.json").exists() or letters
        history = set(self.place.git("rev-list", "main").split())
        assert history.issuperset(self.human.commits), "a person's commit is not on the branch any more"
        assert self.place.git("rev-parse", "main") == self.elsewhere.tip() or self._unpushed()
        self.figures["saves"] += len(self.model.saves)

    def _unpushed(self) -> bool:
        """Whether a commit of the person's is not on the remote yet."""
        if not self.human.commits:
            return False
        there = set(self.place.git("rev-list", "main", cwd=self.elsewhere.repository).split())
        return any(commit not in there for commit in self.human.commits)

    def _files(self) -> dict[str, dict[str, Any]]:
        """Every job that there is, in the queue's folder or in flight, by its id."""
        found = {}
        for folder in (self.place.queue, self.place.queue / ".claimed"):
            if not folder.is_dir():
                continue
            for file in folder.glob("[!.]*.json"):
                try:
                    document = json.loads(file.read_bytes())
                except ValueError:
                    continue
                if isinstance(document, dict):
                    found[document["id"]] = document
        return found

    def _in_flight(self) -> set[str]:
        claimed = self.place.queue / ".claimed"
        return {json.loads(file.read_bytes())["id"] for file in claimed.glob("[!.]*.json")}
