"""What must be true after each step of a history, and at its end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hypothesis.stateful import RuleBasedStateMachine

from briter_worker import events as seen
from soak.repository import git, read_blobs, read_files, read_history
from soak.users import FILLER, post_path
from soak.worker import DELAYS, MAX_ATTEMPTS, WORKER, LocalSite

if TYPE_CHECKING:
    from collections import Counter

    from soak.ledger import Ledger
    from soak.repository import Commit
    from soak.users import RemoteFaults


_OUTCOMES = (seen.Published, seen.NoChange, seen.NoPaths, seen.Failed, seen.DeadLettered)


class CheckedHistory(RuleBasedStateMachine):
    """A history that is held against its model."""

    site: LocalSite
    model: Model
    remote: RemoteFaults
    ledger: Ledger
    """What people have committed."""
    now: float
    events: list[seen.Event]
    torn: dict[str, bytes]
    """Files that are no jobs, by name."""
    flying: set[str]
    """The saves in flight after the last drain."""
    joined: dict[str, set[str]]
    """The paths of saves that stand for older ones, too."""
    known: dict[bool, set[str]]
    """The commits that were looked at, on the remote and here."""
    messages: Counter[str]
    """Commits on the remote's branch, by message."""
    figures: Counter[str]

    def check_events(self, *, died: bool) -> None:
        """Check that each attempt has one outcome, with the right attempts, delays and reasons."""
        started: dict[str, int] = {}
        files = self.files()
        for event in self.events:
            if not isinstance(event, seen.JobEvent):
                continue
            save = self.model.saves.get(event.job_id)
            if save is None:
                assert isinstance(event, seen.Quarantined), f"an event for no save: {event}"
                assert event.job_id.startswith("torn"), f"no save: {event}"
            elif isinstance(event, seen.JobStarted):
                assert save.fate in (Fate.OPEN, Fate.UNKNOWN), f"{save.fate}, and tried again: {event}"
                assert event.job_id not in started, f"started twice at once: {event}"
                assert not (event.dry_run and save.is_tried), f"a dry run tries it again: {event}"
                save.is_tried = False
                started[event.job_id] = event.attempt
                assert save.attempts < event.attempt <= save.attempts + 1 + save.deaths, f"{save}, {event}"
            elif isinstance(event, _OUTCOMES):
                self._check_outcome(save, event, started)
            elif isinstance(event, seen.Superseded):
                save.fate = Fate.SUPERSEDED
                winner = self.model.saves[event.superseded_by]
                assert winner.slug == save.slug, f"superseded by another slug: {event}"
                assert winner.created > save.created, f"the older save won: {save}, {winner}"
                waits = winner.until > self.now
                assert waits or save.id not in started, f"given up for a due save: {save}, {winner}"
                started.pop(save.id, None)
                known = self.joined.setdefault(winner.id, set(winner.paths))
                if not set(save.paths) <= known:
                    winner.is_tried = False  # its paths are more now
                known |= self.joined.get(save.id, {*save.paths})
            elif isinstance(event, seen.Revived):
                save.attempts = 0
            elif isinstance(event, seen.Cancelled):
                started.pop(save.id, None)
                save.fate = Fate.CANCELLED
                self.model.excuse(save.slug)
        assert died or not started, f"no outcome for {sorted(started)}"
        self._check_files(files, died=died)
        self.flying = self.in_flight()

    def _check_outcome(self, save: Save, event: Any, started: dict[str, int]) -> None:  # noqa: ANN401 - one of several
        self.figures[event.name] += 1
        attempt = started.pop(save.id, None)
        if attempt is None:
            assert save.id in self.flying, f"an outcome of nothing that was started: {event}"
        else:
            assert event.attempt == attempt, f"another attempt was started: {event}"
        if isinstance(event, (seen.Published, seen.NoChange)):
            assert not save.refused, f"it should have been refused: {event}"
            if isinstance(event, seen.Published) and event.dry_run:
                save.is_tried, save.attempts = True, event.attempt - 1
            elif isinstance(event, seen.Published) and event.waiting_paths:
                save.attempts, save.deaths = event.attempt - 1, 0  # the rest belongs to a scheduled post
            else:
                save.fate = Fate.DONE
            return
        assert event.error, f"no reason: {event}"
        if isinstance(event, seen.Failed) and event.failure == "unsettled":
            until = max(each.until for each in self.model.saves.values())
            assert until > self.now or "belongs to a scheduled post" not in event.error, (
                f"for nothing: {event}"
            )
            save.attempts, save.deaths = event.attempt - 1, 0  # a deferral counts no attempt
            return
        save.attempts = event.attempt
        code = "nopaths" if isinstance(event, seen.NoPaths) else event.failure
        known = self.model.may_fail_with(save, code) or (code == "nopaths" and self._asks_for_nothing(save))
        known = known or (code == "nopaths" and self._is_published_since(save))
        known = known or (code == "missing" and self._was_never_there(save))
        assert known, f"this cannot be what went wrong: {event}"
        save.deaths = 0
        if isinstance(event, seen.Failed):
            assert event.attempt < MAX_ATTEMPTS
            # A missing path waits for the first two delays, whatever cost attempts before.
            delays = DELAYS[:2] if code == "missing" else (DELAYS[event.attempt - 1],)
            assert any(abs(event.retry_at - (self.now + delay)) < 1 for delay in delays), event
        elif code in REFUSED:
            self.model.excuse(save.slug)
        else:
            assert event.attempt >= MAX_ATTEMPTS, f"dead-lettered too early: {event}"

    def _asks_for_nothing(self, save: Save) -> bool:
        """Return True if the folder has no post, here or in git: a link is left, which is refused."""
        tracked = self.site.git("ls-tree", "-r", "--name-only", "main", "content/posts/").splitlines()
        return save.paths == (str(PurePosixPath(LINK).parent),) and not self.existing_posts() and not tracked

    def _was_never_there(self, save: Save) -> bool:
        """Return True if the remote never had one of the save's files, which is not here either."""
        absent = [path for path in save.paths if not (self.site.worktree / path).exists()]
        had = (git(self.remote.repository, "log", "-1", "--format=%H", "main", "--", path) for path in absent)
        return not all(had)

    def _is_published_since(self, save: Save) -> bool:
        """Return True if a newer save was published: what is left of a dead letter is what was refused."""
        newer = (each for each in self.model.saves.values() if each.slug == save.slug)
        return any(each.created > save.created and each.fate is Fate.DONE for each in newer)

    def existing_posts(self) -> list[str]:
        return [path for path in POSTS if (self.site.worktree / path).exists()]

    def _check_files(self, files: dict[str, dict[str, Any]], *, died: bool) -> None:
        flying = self.in_flight()
        done = {event.slug for event in self.events if isinstance(event, (seen.Published, seen.NoChange))}
        for save in self.model.saves.values():
            if died and save.id in flying | self.flying:
                save.deaths += 1  # it comes after all the events
            document = files.get(save.id)
            if document is None:
                if save.fate is Fate.OPEN:
                    # A change is stored before its event; and a published save removes dead letters.
                    assert died or save.slug in done, f"lost: {save}"
                    save.fate = Fate.UNKNOWN
                continue
            assert save.fate is Fate.OPEN, f"{save.fate.value}, and it is there: {document}"
            assert document["kept"] == int(save.id.rpartition("-")[2]), "an unknown key was changed"
            if save.until:
                assert document["scheduledFor"] == iso(save.until)
            if save.id in flying:
                save.is_tried = save.is_tried and not died  # the event comes before the change of state
                continue
            attempts = document.get("attempts") or 0
            if not isinstance(attempts, int):
                continue  # not read yet: it will be quarantined
            if died:
                save.is_tried = bool(document.get("dryRunAt"))
                assert attempts in {0, *range(save.attempts, save.attempts + 2 + save.deaths)}
                save.attempts = attempts
            assert attempts == save.attempts, f"attempts counted wrongly: {document}, {save}"
            assert save.is_tried == bool(document.get("dryRunAt")), f"a dry run forgotten: {document}, {save}"
            if document.get("status") == "failed":
                assert document["lastError"], f"a dead letter without a reason: {document}"
                assert document["failure"], f"a dead letter without a code: {document}"

    def check_commits(self, secrets: set[str]) -> None:
        """Check that no commit is there twice, with anything extra, or early."""
        for repository in (self.site.worktree, self.remote.repository):
            is_remote = repository != self.site.worktree
            # Not `--not`: git goes by dates there, and in these histories the clock goes backwards.
            new = set(git(repository, "rev-list", "--all").split()) - self.known[is_remote]
            if not new:
                continue
            self.known[is_remote] |= new
            commits = list(
                read_history(repository, "--no-walk", "--stdin", stdin="\n".join(sorted(new)).encode())
            )
            on_branch = set(git(repository, "rev-list", "main").split())
            for commit in commits:
                written = {sha for mode, sha in commit.touched.values() if mode.startswith("100")}
                blobs = read_blobs(repository, written) if written else {}
                lines = {line for content in blobs.values() for line in content.decode().splitlines()}
                early = lines & secrets
                assert not early, f"in git before its time: {early} ({commit.message.strip()})"
                self.model.seen |= lines
                if commit.committer == "{} <{}>".format(*WORKER):
                    self._check_own(commit)
                    if commit.sha in on_branch and is_remote:
                        self.messages[commit.message] += 1
                        assert self.messages[commit.message] == 1, f"twice on the remote: {commit.message}"
                        self.figures["commits"] += 1
                else:
                    is_known = commit.message.strip() in self.ledger.persons
                    assert is_known, f"a commit of nobody: {commit}"

    def _check_own(self, commit: Commit) -> None:
        assert len(commit.parents) == 1, "a commit of the worker has one parent"
        job_id = commit.message.strip().removeprefix("save ")
        assert commit.message.strip() == f"save {job_id}", f"not the declared message: {commit.message!r}"
        save = self.model.saves[job_id]
        declared = {
            path for each in self.model.saves.values() if each.slug == save.slug for path in each.paths
        }
        for path in commit.touched:
            inside = any(path == each or path.startswith(each.rstrip("/") + "/") for each in declared)
            assert inside, f"{commit.message.strip()} touches {path}, which it does not declare"
            assert path != LINK, "a link was published"

    def check_end(self) -> None:
        """Check that everything that was asked for is on the remote."""
        there = read_files(self.remote.repository)
        letters = {
            document["slug"]: document.get("failure")
            for document in self.files().values()
            if document.get("status") == "failed"
        }
        for (slug, path), number in self.model.owed.items():
            if self.model.is_contested(path):
                continue
            line = first_line(there.get(path))
            assert self.model.is_settled(path, number, line), (
                f"lost: {slug} owes {self.model.versions[path][number:]} in {path}, "
                f"the remote has {line}; dead letters: {letters}"
            )
            if path in self.model.feet and line is not None:
                foot = last_line(there[path])
                assert foot == self.model.feet[path], f"somebody else's edit of {path} was reverted"
        for slug, code in letters.items():
            assert code in REFUSED | {"missing"}, f"{slug} is still a dead letter: {code}"
        kept = [file.read_bytes() for file in self.site.quarantine.glob("*")]
        for name, content in self.torn.items():
            assert content in kept, f"a quarantined file is gone: {name}"
            assert not (self.site.queue / f"{name}.json").exists() or letters
        tip = git(self.remote.repository, "rev-parse", "main")
        assert self.site.git("rev-parse", "main") == tip, "the branch is behind for good"
        on_remote = self.site.git("log", "--format=%s", "main").splitlines()
        for message in self.ledger.committed:
            assert on_remote.count(message) == 1, f"{message!r}: {on_remote.count(message)} times"
        self.figures["saves"] += len(self.model.saves)

    def files(self) -> dict[str, dict[str, Any]]:
        """Return every job that there is, in the queue's folder or in flight, by its id."""
        found = {}
        for folder in (self.site.queue, self.site.queue / ".claimed"):
            for file in folder.glob("[!.]*.json") if folder.is_dir() else ():
                try:
                    document = json.loads(file.read_bytes())
                except ValueError:
                    continue
                if isinstance(document, dict):
                    found[document["id"]] = document
        return found

    def in_flight(self) -> set[str]:
        claimed = self.site.queue / ".claimed"
        return {json.loads(file.read_bytes())["id"] for file in claimed.glob("[!.]*.json")}


FOLDER_SLUG = "all"
POSTS = tuple(post_path(f"p{number}") for number in range(4))
MEDIA = tuple(f"content/media/p{number}.txt" for number in range(4))
LINK = "content/posts/link.md"
REFUSED = frozenset(
    {"nopaths", "malformed", "unreadable", "unknown-type", "too-large", "rejected", "conflict"}
)
ENVIRONMENT = frozenset(
    {
        "network",
        "timeout",
        "remote-missing",
        "remote-refused",
        "protected",
        "wrong-branch",
        "unfinished-operation",
    }
)
"""Failures of what is around these sites; any other failure is a defect, here or there."""


def post_text(first: str, last: str) -> str:
    """Return a post: the CMS writes its first line, a colleague its last one."""
    return "\n".join([first, *FILLER, last, ""])


def first_line(content: bytes | None) -> str | None:
    """Return the CMS's line; None where there is no file."""
    return None if content is None else content.decode().split("\n", 1)[0]


def last_line(content: bytes) -> str:
    """Return the colleague's line."""
    return content.decode().splitlines()[-1]


def iso(moment: float) -> str:
    """Return the time as JavaScript writes it."""
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Fate(Enum):
    """What became of a save, as far as events say."""

    OPEN = "open"
    DONE = "published, or nothing to publish"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    UNKNOWN = "gone while a worker died"


@dataclass(slots=True)
class Save:
    """One job that the CMS wrote."""

    id: str
    slug: str
    paths: tuple[str, ...]
    created: float
    until: float
    refused: str = ""
    """The failure code with which it must be refused."""
    fate: Fate = Fate.OPEN
    attempts: int = 0
    deaths: int = 0
    is_tried: bool = False
    """A dry run has built it."""


@dataclass(slots=True)
class Model:
    """Everything that the site was asked for."""

    saves: dict[str, Save] = field(default_factory=dict)
    versions: dict[str, list[str | None]] = field(default_factory=dict)
    """What the CMS wrote into each file's first line, in order; None where it deleted the file."""
    owed: dict[tuple[str, str], int] = field(default_factory=dict)
    """For a slug and a path: the number of the version that the remote must have in the end, or a later."""
    feet: dict[str, str] = field(default_factory=dict)
    """What somebody else wrote last into each file's last line, on the remote."""
    touched: set[str] = field(default_factory=set)
    """Paths that somebody else changed in any way."""
    disputed: set[str] = field(default_factory=set)
    """Paths in which somebody else changed what the CMS writes, too."""
    seen: set[str] = field(default_factory=set)
    """Versions that were in git once: they are no secret any more."""
    refusing: bool = False
    """Whether the remote has ever refused what it was sent."""

    def write(self, path: str, version: str | None) -> None:
        """Note that the CMS wrote this version."""
        self.versions.setdefault(path, []).append(version)

    def save(self, save: Save, now: float, existing: list[str]) -> None:
        """Note the save; `existing` are the posts that a folder stands for."""
        self.saves[save.id] = save
        if save.refused:
            return
        scheduled_paths = self.scheduled_paths(now)
        for path in existing if save.slug == FOLDER_SLUG else save.paths:
            if path in self.versions and path not in scheduled_paths:
                self.owed[save.slug, path] = len(self.versions[path]) - 1
        if save.slug != FOLDER_SLUG:
            for path in save.paths:
                if path in self.versions:
                    self.owed[save.slug, path] = len(self.versions[path]) - 1
                if save.until > now:
                    self.owed.pop((FOLDER_SLUG, path), None)  # no folder may carry it now

    def excuse(self, slug: str) -> None:
        """Expect nothing of this slug any more: it was cancelled, or refused with a reason."""
        for key in [key for key in self.owed if key[0] == slug]:
            del self.owed[key]

    def open(self, slug: str) -> list[Save]:
        """Return the slug's saves of which no event told the end, newest first."""
        found = [save for save in self.saves.values() if save.slug == slug and save.fate is Fate.OPEN]
        return sorted(found, key=lambda save: save.created, reverse=True)

    def scheduled_paths(self, now: float, waiting: set[str] | None = None) -> set[str]:
        """Return the paths of scheduled saves: the newest save of a slug counts for all of them."""
        paths: set[str] = set()
        for slug in {save.slug for save in self.saves.values()} - {FOLDER_SLUG}:
            saves = [save for save in self.open(slug) if waiting is None or save.id in waiting]
            if saves and saves[0].until > now:
                paths.update(path for save in saves for path in save.paths)
        return paths

    def secrets(self, now: float, waiting: set[str]) -> set[str]:
        """Return the versions that may not be in git before their time."""
        latest = {
            self.versions[path][-1] for path in self.scheduled_paths(now, waiting) if path in self.versions
        }
        return {version for version in latest if version is not None} - self.seen

    def is_contested(self, path: str) -> bool:
        """Return True if a conflict over this file would be a true one."""
        return path in self.disputed or (path in self.touched and None in self.versions.get(path, ()))

    def may_fail_with(self, save: Save, code: str) -> bool:
        """Return True if this failure code can be right for this save."""
        match code:
            case "conflict":
                return save.slug == FOLDER_SLUG or any(self.is_contested(path) for path in save.paths)
            case "rejected":
                return self.refusing
            case "killed-worker":
                return save.deaths > 0  # with failures before it, the first may be one too many
            case _:
                return code == save.refused or code in ENVIRONMENT

    def is_settled(self, path: str, number: int, first_line: str | None) -> bool:
        """Return True if the remote's first line is that version of the CMS's, or a later one."""
        return first_line in self.versions[path][number:]
