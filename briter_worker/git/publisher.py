"""The publisher: a transaction whose commit point is the push.

Check, stage, build the commits aside, record the plan, push, follow. Until the push, neither the branch nor
the index nor the work tree changes, so every failure before it leaves the repository as it was.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.allowlist import is_inside, normalized
from briter_worker.errors import Failure, FailureCode, LockLostError, PublishError, UnavailableError, describe
from briter_worker.events import FileChange
from briter_worker.git.commits import (
    Commit,
    Person,
    read_changes,
    read_commits,
    read_signature,
    write_commits,
)
from briter_worker.git.merge import Base, Conflicts, Edit, Item, Merge
from briter_worker.git.push import UncertainPushError, find_late, note_unlanded, push, push_large_files
from briter_worker.git.repository import COUNT_LINES, FAST_IMPORT
from briter_worker.ports import Change, Outcome, Plan, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.git.commits import RemoteCommit
    from briter_worker.git.payloads import SubmittedCopies
    from briter_worker.git.repository import Move, Repository
    from briter_worker.git.staging import WorkTreeCopies
    from briter_worker.ports import BaseVersions, Claim, PlanStore

_MAX_RACES = 5
_LAST_COMMAND_TIMEOUT_S = 10.0
"""After an abort: how long each command may take that asks what became of the push."""


class Tip(NamedTuple):
    """The commit that a batch is built on."""

    commit: str
    expect: str | None
    """The remote's tip as last seen; None if the remote has no branch yet."""
    own_commits: tuple[RemoteCommit, ...] = ()
    """Commits of the worker's that turned out to be on the remote: pushes whose answers were lost."""

    def unchanged(self, item: Item) -> Outcome:
        """Return the outcome of a claim that changes nothing here."""
        if item.staged.withheld:
            path, until = min(item.staged.withheld.items(), key=lambda each: each[1])
            text, fix = f"a job that cannot be read declares {path}", "save its post again, or cancel the job"
            if until:
                text = f"{path} belongs to a scheduled post and is not published before its time"
                fix = "publish the scheduled post now, or cancel it"
            failure = Failure(FailureCode.UNSETTLED, text, fix)
            return item.outcome(Result.FAILED, failure=failure)._replace(retry_at=until)
        message = item.claim.job.full_message.encode().strip()
        for own in reversed(self.own_commits):
            if own.message == message and not own.blobs.keys().isdisjoint(item.blobs):
                return item.outcome(Result.PUBLISHED, commit=own.sha)
        return item.outcome(Result.UNCHANGED)


@dataclass(eq=False, repr=False)
class GitPublisher:
    """Publishes to one branch of one remote. The worker holds the site meanwhile."""

    _repository: Repository
    _: KW_ONLY
    copies: WorkTreeCopies | SubmittedCopies
    plans: PlanStore
    bases: BaseVersions
    identity: Person
    dry_run: bool
    progress: Callable[[str, int, int], None]
    warn: Callable[[str, str], None]
    still_ours: Callable[[], bool]
    note_moved: Callable[[Sequence[RemoteCommit], str], None] = lambda *_: None
    """Called in a lost race, with the remote's new commits and its tip."""

    def __post_init__(self) -> None:
        self._scheduled: Mapping[str, float] = {}
        self._built: dict[str, list[FileChange]] = {}
        """What the commits changed that were built last."""
        self._conflicts = Conflicts(self._repository, self.bases, self.identity, self.copies.read)

    def publish(
        self,
        claims: Sequence[Claim],
        *,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Implement `ports.Publisher`."""
        started = time.monotonic()
        with self._repository.working():
            self._repository.check()
            self._repository.git.begin(*FAST_IMPORT, stdin=None)  # starts while the posts are read
            if not self.dry_run:
                self.copies.catch_up()
            tip = self._first_tip()
            self._scheduled = scheduled()
            read, outcomes = self._read(claims, tip)
            # A post that was scheduled meanwhile may have been read, and its time has not come.
            newly_scheduled = {normalized(path) for path in scheduled().keys() - self._scheduled.keys()}
            items: list[Item] = []
            for item in read:
                changes = [
                    Change(each.path, each.file.mode if each.file else "", each.blob) for each in item.edits
                ]
                released = item.outcome(Result.RELEASED)
                if any(is_inside(folder, change.path) for change in changes for folder in newly_scheduled):
                    outcomes.append(released)
                elif outcome := check(item.claim.key, changes):
                    outcomes.append(outcome._replace(rejected_paths=released.rejected_paths))
                else:
                    items.append(item)
            self._repository.check_unmoved()
            if outcomes:
                yield outcomes
            yield from self._build_and_push(items, tip, cancelled, now, started)

    def resolve(self) -> Iterator[Sequence[Outcome]]:
        """Implement `ports.Publisher`."""
        plans = self.plans.plans()
        if not plans:
            return
        self._repository.git.allow_last_commands(_LAST_COMMAND_TIMEOUT_S)
        with self._repository.working():
            for plan in plans:
                tip = self._find_landed(plan)
                if tip is not None:
                    self._conflicts.load(plan.blobs, tip)
                    self._follow(plan, tip, local=self._local())
                commits = plan.commits if tip is not None else {}
                landed = [Outcome(key, Result.PUBLISHED, sha) for key, sha in commits.items()]
                yield self._described(landed, plan, plan.base)
                self._discard(plan, tip)

    def _local(self) -> str | None:
        """Return the site's own commit; None for a cluster's clone, which has no files to follow it."""
        repository = self._repository
        return repository.ref(repository.branch_ref) if repository.git.worktree else None

    def undecided(self) -> Collection[str]:
        """Implement `ports.Publisher`."""
        return {key for plan in self.plans.plans() for key in plan.commits}

    def tidy(self, now: float) -> None:
        """Implement `ports.Publisher`."""
        repository = self._repository
        with repository.working():
            if not self.dry_run:
                self._guard(self.copies.catch_up)
                seen, pushed = repository.ref(repository.tracking_ref), repository.ref(repository.pushed_ref)
                if seen and pushed and seen != pushed and repository.is_ancestor(seen, pushed):
                    # Git could not move the ref after the push: it was locked, or the disk failed.
                    repository.update_refs((repository.tracking_ref, pushed, seen))
            if repository.git.worktree is not None:  # a cluster's clone is thrown away instead
                repository.tidy(now, keep=[self._batch_ref(plan) for plan in self.plans.plans()])

    # Before the push

    def _first_tip(self) -> Tip:
        """Return the remote's tip as the worker saw it last; ask the remote if it never saw it."""
        repository = self._repository
        pushed, files_of = repository.ref(repository.pushed_ref), self._local()
        # If a user has pulled, the files are edits of a newer tip.
        if pushed is not None and (files_of is None or repository.is_ancestor(files_of, pushed)):
            return Tip(pushed, pushed)
        local = repository.ref(repository.branch_ref)
        # A branch that anybody has seen there was deleted since, and is not created again.
        if local and repository.ref(repository.tracking_ref) is None and repository.remote_tip() is None:
            return Tip(local, None)
        return self._fetch_tip(None)

    def _fetch_tip(self, since: Tip | None) -> Tip:
        """Fetch the remote's tip, and find what of the worker's own has landed since."""
        repository = self._repository
        fetched = repository.fetch()
        try:
            repository.check_not_rewritten(fetched)
        except PublishError as error:
            if repository.git.worktree is not None or error.code is not FailureCode.REMOTE_REWRITTEN:
                raise
            self.warn(f"{error.message}. The next posts are published on what the remote has now", error.fix)
        if since is None:
            repository.update_refs((repository.pushed_ref, fetched, None))
            return Tip(fetched, fetched)
        # The ref moves with the batch: if this push fails, the next one has to find the same commits.
        commits = read_commits(repository.git, since.commit, fetched, self.identity)
        self.note_moved(commits, fetched)
        own = (each for each in commits if each.is_own)
        return Tip(fetched, fetched, (*since.own_commits, *own))

    def _read(self, claims: Sequence[Claim], tip: Tip) -> tuple[list[Item], list[Outcome]]:
        """Return the claims' changes as edits of their bases; and the failures of single claims."""
        staged = self.copies.stage(claims, tip=tip.commit, scheduled=self._scheduled)
        paths = {path for each in staged.values() for path in each.changes}
        bases = self.copies.bases(paths, tip.commit) if paths else {}
        self._conflicts.load(paths, tip.commit)
        items: list[Item] = []
        outcomes: list[Outcome] = []
        for claim in claims:
            each = staged[claim.key]
            edits = (Edit(path, file, bases.get(path)) for path, file in each.changes.items())
            item = Item(claim, each, tuple(self._conflicts.rebase(edit, claim) for edit in edits))
            if each.failure is None:
                items.append(item)
            else:
                outcomes.append(item.outcome(Result.FAILED, failure=each.failure))
        return items, outcomes

    # The push

    def _build_and_push(
        self,
        waiting: list[Item],
        tip: Tip,
        cancelled: Callable[[], Collection[str]],
        now: float,
        started: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Build and push until the remote is where it was last seen; yield the outcomes."""
        settled, races = list[Outcome](), 0

        def clock() -> float:
            return now + time.monotonic() - started

        while waiting:
            if late := find_late(self._repository, (item.claim.key for item in waiting), tip.commit):
                found = [(item, late[item.claim.key]) for item in waiting if item.claim.key in late]
                settled += [self._settle_late(item, commit, tip) for item, commit in found]
                waiting = [item for item in waiting if item.claim.key not in late]
                continue
            plan, merge, unchanged, conflicts = self._build(waiting, tip, now)
            if gone := {item.claim.key for item in waiting} & set(cancelled()):
                settled += [item.outcome(Result.CANCELLED) for item in waiting if item.claim.key in gone]
                waiting = [item for item in waiting if item.claim.key not in gone]
                self._discard(plan, None)
                continue
            if plan.commits:
                landed = self._push(plan, waiting)
            else:  # what is unchanged must be on the remote, and not only have been there
                landed = tip.commit if self._repository.remote_tip() == tip.expect else None
            if landed is None:
                races += 1
                if races > _MAX_RACES:
                    text = f"others pushed {races} times while the worker pushed"
                    fix = "none needed: the worker tries again by itself"
                    raise PublishError(FailureCode.LOST_RACE, text, fix)
                waiting, tip = self._move_on(waiting, tip, settled)
                continue
            settled += [
                self._conflicts.settle(item, paths, merge, clock=clock, dry_run=self.dry_run)
                for item, paths in conflicts
            ]
            published = ((item, plan.commits.get(item.claim.key)) for item in waiting)
            settled += [item.outcome(Result.PUBLISHED, commit=commit) for item, commit in published if commit]
            settled += [tip.unchanged(item) for item in unchanged]
            if plan.commits and self._repository.git.worktree:  # while the local branch follows
                self._repository.git.begin(*COUNT_LINES, tip.commit, plan.tip)
            self._follow(plan, landed)
            yield self._described(settled, plan, tip.commit)
            self._discard(plan, landed)
            return
        if settled:
            yield settled

    def _settle_late(self, item: Item, commit: str, tip: Tip) -> Outcome:
        """Return the outcome of a save that an earlier push has published; its file is an edit of that."""
        entries = self._repository.entries(commit, item.blobs)
        blobs = {path: entries[path].blob if path in entries else None for path in item.blobs}
        plan = Plan("", tip.expect, commit, {item.claim.key: commit}, blobs)
        self._follow(plan, tip.commit)
        return self._described([item.outcome(Result.PUBLISHED, commit=commit)], plan, f"{commit}^")[0]

    def _build(
        self, items: Sequence[Item], tip: Tip, now: float
    ) -> tuple[Plan, Merge, list[Item], list[tuple[Item, list[str]]]]:
        """Merge the items into the tip, one after another, and write their commits onto a private ref.

        Return the plan, what it is built on, the items that change nothing, and those that conflict, with
        the paths.
        """
        repository, plan = self._repository, Plan(uuid.uuid4().hex, tip.expect, tip.commit, {}, {})
        paths = {edit.path for item in items for edit in item.edits}
        merge = Merge(repository, tip.commit, paths, self.copies.read)
        unchanged: list[Item] = []
        conflicts: list[tuple[Item, list[str]]] = []
        own: dict[str, Commit] = {}
        carriers: dict[str, str] = {}
        """By path: the key of the claim whose commit has it."""
        carried: dict[str, str] = {}
        blobs: dict[str, str | None] = {}
        for item in items:
            files, conflicting = merge.place(item.edits)
            if conflicting:
                conflicts.append((item, conflicting))
                continue
            blobs |= item.blobs
            if files:
                own[item.claim.key] = item.commit(self.identity, now, files)
                carriers |= dict.fromkeys(files, item.claim.key)
            elif carrier := next((carriers[path] for path in item.blobs if path in carriers), None):
                carried[item.claim.key] = carrier
            else:
                unchanged.append(item)
        names: dict[str, str] = {}
        if own:
            ref, commits = self._batch_ref(plan), [*own.values()]
            written = write_commits(
                repository.git, commits, parent=tip.commit, ref=ref, progress=self.progress
            )
            names = dict(zip(own, written, strict=True))
            repository.know_built(tip.commit, written[-1], [commit.files for commit in commits])
            self._built = {
                sha: [FileChange(path, None, None, file is None) for path, file in commit.files.items()]
                for sha, commit in zip(written, commits, strict=True)
            }
            plan = plan._replace(tip=written[-1])
        names |= {key: names[carrier] for key, carrier in carried.items()}
        return plan._replace(commits=names, blobs=blobs), merge, unchanged, conflicts

    def _push(self, plan: Plan, items: Sequence[Item]) -> str | None:
        """Push the plan's commits; return the remote's tip, or None if the remote has moved.

        After an uncertain end the remote is asked. While it does not answer, the plan stays recorded.
        """
        ref = self._batch_ref(plan)
        if any(item.staged.uses_lfs for item in items):
            push_large_files(self._repository, ref, base=plan.base, dry_run=self.dry_run)
        if not self.dry_run:
            self.plans.record(plan)
        self.progress("push", 0, 0)
        if not self.still_ours():
            self._discard(plan, None)
            raise LockLostError
        try:
            is_done = push(
                self._repository,
                f"{ref}:{self._repository.branch_ref}",
                expect=plan.base,
                dry_run=self.dry_run,
                progress=self.progress,
            )
            landed = plan.tip if is_done else None
        except UncertainPushError:
            landed = self._find_landed(plan)
            if landed is None:
                self._discard(plan, None)
                raise
        except PublishError:
            self._discard(plan, None)
            raise
        if landed is None:
            self._discard(plan, None)
        return landed

    def _find_landed(self, plan: Plan) -> str | None:
        """Ask the remote. Return its tip if that contains the plan's commits, else None."""
        repository = self._repository
        there = repository.remote_tip()
        if there is None and plan.base is not None:
            raise repository.no_branch_error()
        if there in (None, plan.base):
            if repository.git.worktree is not None:  # what a cluster submitted does not change
                note_unlanded(repository, plan.commits)
            return None
        if there == plan.tip and repository.ref(self._batch_ref(plan)) == plan.tip:
            return plan.tip
        fetched = repository.fetch()
        return fetched if repository.is_ancestor(plan.tip, fetched) else None

    def _move_on(self, items: list[Item], tip: Tip, settled: list[Outcome]) -> tuple[list[Item], Tip]:
        """Return the items as edits of what they started from, and the remote's new tip."""
        moved = self._fetch_tip(tip)
        known = {edit.path: edit.base for item in items for edit in item.edits}
        entries = self._repository.entries(tip.commit, known.keys())
        bases = {path: base or Base.of(entries.get(path)) for path, base in known.items()}
        if self._repository.git.worktree is None:  # a job may delete what only the new tip has
            items, failed = self._read([item.claim for item in items], moved)
            settled += failed
        self._conflicts.load(known.keys(), moved.commit)  # a user may have merged a branch
        for number, item in enumerate(items):
            edits = (self._conflicts.rebase(edit, item.claim) for edit in item.edits)
            items[number] = item._replace(edits=tuple(edits))
        return [item.rebased(bases, moved.own_commits) for item in items], moved

    # After the push

    def _described(self, outcomes: Sequence[Outcome], plan: Plan, parent: str | None) -> Sequence[Outcome]:
        """Return the outcomes with what their commits changed, and how the commits are signed.

        The plan's commits are built on `parent`.
        """
        git, facts = self._repository.git, dict[str | None, dict[str, Any]]()
        commits = {each.commit for each in outcomes if each.commit}

        def read() -> None:
            changes = read_changes(git, self._built, commits, parent, plan.tip)
            signed = read_signature(git, git.signer, next(iter(commits))) if git.signer else None
            facts.update({sha: {"changes": changes.get(sha, ()), "signed_with": signed} for sha in commits})

        if commits:
            self._guard(read)
        return [each._replace(**facts.get(each.commit, {})) for each in outcomes]

    def _follow(self, plan: Plan, tip: str, *, local: str | None = None) -> None:
        """Have this side follow the remote. Nothing local fails a post that is on the remote."""
        if not self.dry_run:
            self._guard(lambda: self._conflicts.close(plan.blobs))
            self._guard(lambda: self.copies.sync(tip, self._published_blobs(plan, tip, local)))

    def _published_blobs(self, plan: Plan, tip: str, local: str | None) -> Mapping[str, str | None]:
        """Return the blobs of this plan, and of plans that have landed too and wait to be resolved.

        A plan that the branch at `local` contains counts no more: a worker that died has synced the files to
        that branch, perhaps with later edits of the remote's.
        """
        is_ancestor, blobs = self._repository.is_ancestor, dict[str, str | None]()
        others = (each for each in self.plans.plans() if each.id != plan.id and is_ancestor(each.tip, tip))
        for each in (*others, plan):
            if not (local and is_ancestor(each.tip, local)):
                blobs |= each.blobs
        return blobs

    def _guard(self, action: Callable[[], object]) -> None:
        """Run the action; warn of a local failure. Only a database that is away stops what follows."""
        try:
            action()
        except UnavailableError:
            raise
        except (PublishError, OSError) as error:
            self.warn(*describe(error))

    def _discard(self, plan: Plan, landed: str | None) -> None:
        """Forget a plan that is complete, or did not land; the receipts did not wait for this."""
        repository, ref = self._repository, self._batch_ref(plan)
        moves: list[Move] = [(ref, None, None)] if repository.ref(ref) else []
        if landed and not self.dry_run and repository.ref(repository.pushed_ref) != landed:
            moves.append((repository.pushed_ref, landed, None))
        if moves:
            self._guard(lambda: repository.update_refs(*moves))
        if plan.commits and not self.dry_run:
            self._guard(lambda: self.plans.drop(plan))

    def _batch_ref(self, plan: Plan) -> str:
        return f"{self._repository.own_refs}/batch/{plan.id}"
