"""The publisher: a transaction whose commit point is the push.

Check, stage, build the commits aside, record the plan, push, follow. Until the push, neither the branch nor
the index nor the work tree changes, so every failure before it leaves the repository as it was.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from briter_worker.allowlist import is_inside, normalized
from briter_worker.errors import (
    Failure,
    FailureCode,
    LockLostError,
    PublishError,
    SlowBatchError,
    UnavailableError,
    describe,
)
from briter_worker.events import FileChange
from briter_worker.git.command import CommandTimeoutError
from briter_worker.git.commits import (
    Commit,
    Person,
    read_changes,
    read_commits,
    read_signature,
    write_commits,
)
from briter_worker.git.merge import Base, Conflicts, Edit, Item, Merge
from briter_worker.git.plans import FilePlans
from briter_worker.git.push import UncertainPushError, push, push_large_files
from briter_worker.git.repository import COUNT_LINES, FAST_IMPORT, blob_of
from briter_worker.ports import Change, Outcome, Plan, Remainder, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.git.commits import RemoteCommit
    from briter_worker.git.folders import Staged
    from briter_worker.git.payloads import SubmittedCopies
    from briter_worker.git.refs import Move
    from briter_worker.git.repository import Repository
    from briter_worker.git.staging import WorkTreeCopies
    from briter_worker.ports import BaseVersions, Claim, PlanStore

_MAX_RACES = 5
_UNLANDED_S = 86_400.0
"""A push that a remote has not applied for so long never lands."""
_AT_ONCE_S = 10.0
"""A remote that answers within this time is there: a push that took too long was too large for the line."""
_LAST_COMMAND_TIMEOUT_S = 10.0
"""After an abort: how long each command may take that asks what became of the push."""


class Tip(NamedTuple):
    """The commit that a batch is built on."""

    commit: str
    expect: str | None
    """The remote's tip as last seen; None if the remote has no branch yet."""
    first: str
    """The tip at the first try of this publication: a file without a named base is an edit of this commit."""


class _Built(NamedTuple):
    """Items that were merged into a tip, and their commits."""

    plan: Plan
    merge: Merge
    unchanged: list[Item]
    conflicts: list[tuple[Item, list[str]]]
    """Items that conflict, with the paths."""


def _outcome_without_commit(
    item: Item,
    newly_scheduled: Collection[str],
    check: Callable[[str, Sequence[Change]], Outcome | None],
) -> Outcome | None:
    """Return the outcome of a claim that gets no commit, and why; None if the claim is to be built."""
    if item.staged.failure:
        return item.outcome(Result.FAILED, failure=item.staged.failure)
    released = item.outcome(Result.RELEASED)
    files = item.staged.changes
    for path in files:
        if any(is_inside(folder, path) for folder in newly_scheduled):
            return released
    changes = [Change(path, file.mode if file else "", blob_of(file)) for path, file in files.items()]
    outcome = check(item.claim.key, changes)
    if outcome is None:
        return None
    return outcome._replace(rejected_paths=released.rejected_paths)


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
        self._built: dict[str, list[FileChange]] = {}
        """Changes of the batch that was built last, by commit."""
        self._unfollowed: dict[str, tuple[Plan, str]] = {}
        """Landed plans, each with the remote's tip, whose base versions could not be stored; retried."""
        self._conflicts = Conflicts(self._repository, self.bases, self.identity, self.copies.read)

    @cached_property
    def _unlanded(self) -> FilePlans:
        """Return the plans that the remote did not have when it was asked, and may apply late."""
        repository = self._repository
        return FilePlans(repository.git.state_dir, repository.branch, "unlanded")

    def publish(
        self,
        claims: Sequence[Claim],
        *,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
        withdrawn: Callable[[], Mapping[str, Result]],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Implement `ports.Publisher`: build and push until the remote is where it was last seen."""
        started = time.monotonic()

        def clock() -> float:
            return now + time.monotonic() - started

        with self._repository.working():
            self._repository.git.begin(*FAST_IMPORT, stdin=None)  # starts while the posts are read
            self._repository.check()
            if not self.dry_run:
                self.copies.catch_up()
                self._follow_kept()
            tip = self._first_tip()
            for _ in range(1 + _MAX_RACES):
                late = self._settle_late(claims, tip)
                claims = [claim for claim in claims if claim.key not in late]
                items, outcomes = self._read(claims, tip, scheduled, check)
                if late or outcomes:
                    yield [*late.values(), *outcomes]
                while items:
                    built = self._build(items, tip, now)
                    gone = withdrawn()
                    left_out = [item for item in items if item.claim.key in gone]
                    if not left_out:
                        break
                    self._discard(built.plan, None)
                    yield [item.outcome(gone[item.claim.key]) for item in left_out]
                    items = [item for item in items if item.claim.key not in gone]
                if not items:
                    return
                if landed := self._push(built, items, tip):
                    yield self._settle(built, items, tip, landed, clock)
                    self._discard(built.plan, landed)
                    return
                tip, claims = self._fetch_tip(tip), [item.claim for item in items]
        text = f"others pushed {_MAX_RACES + 1} times while the worker pushed"
        raise PublishError(FailureCode.LOST_RACE, text, "none needed: the worker tries again by itself")

    def resolve(self) -> Iterator[Sequence[Outcome]]:
        """Implement `ports.Publisher`."""
        plans = self.plans.plans()
        if not plans:
            return
        self._repository.git.allow_last_commands(_LAST_COMMAND_TIMEOUT_S)
        with self._repository.working():
            for plan in plans:
                tip = self._find_landed(plan)
                yield self._settle_landed(plan, tip, plan.commits.keys()) if tip else []
                self._discard(plan, tip)

    def ever_had(self, paths: Collection[str]) -> Collection[str]:
        """Implement `ports.Publisher`."""
        return self.copies.ever_had(paths)

    def undecided(self) -> Collection[str]:
        """Implement `ports.Publisher`."""
        return {key for plan in self.plans.plans() for key in plan.commits}

    def tidy(self, now: float) -> None:
        """Implement `ports.Publisher`."""
        repository = self._repository
        with repository.working():
            if not self.dry_run:
                self._guard(self.copies.catch_up)
                self._guard(self._follow_kept)
                seen, pushed = repository.ref(repository.tracking_ref), repository.ref(repository.pushed_ref)
                if seen and pushed and seen != pushed and repository.is_ancestor(seen, pushed):
                    # Git could not move the ref after the push: it was locked, or the disk failed.
                    repository.update_refs((repository.tracking_ref, pushed, seen))
            self._unlanded.drop_before(now - _UNLANDED_S)
            if repository.git.worktree is not None:  # a cluster's clone is thrown away instead
                repository.tidy(now, keep=[self._batch_ref(plan) for plan in self.plans.plans()])

    # Before the push

    def _first_tip(self) -> Tip:
        """Return the remote's tip as the worker saw it last; ask the remote if it never saw it."""
        repository = self._repository
        local = repository.ref(repository.branch_ref)
        pushed, files_of = repository.ref(repository.pushed_ref), local if repository.git.worktree else None
        # If a user has pulled, the files are edits of a newer tip.
        if pushed is not None and (files_of is None or repository.is_ancestor(files_of, pushed)):
            return Tip(pushed, pushed, pushed)
        # A branch that anybody has seen there was deleted since, and is not created again.
        if local and repository.ref(repository.tracking_ref) is None and repository.remote_tip() is None:
            return Tip(local, None, local)
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
            return Tip(fetched, fetched, fetched)
        # The ref moves with the batch: if this push fails, the next one has to find the same commits.
        self.note_moved(read_commits(repository.git, since.commit, fetched, self.identity), fetched)
        return Tip(fetched, fetched, since.first)

    def _read(
        self,
        claims: Sequence[Claim],
        tip: Tip,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
    ) -> tuple[list[Item], list[Outcome]]:
        """Return the claims' changes as edits of their bases, and the outcomes of claims that are not built.

        A claim is released if one of its files was scheduled while the files were read.
        """
        held = scheduled()
        try:
            staged = self.copies.stage(claims, tip=tip.commit, scheduled=held)
        except CommandTimeoutError as error:
            fix = "check the filters of its files (git check-attr filter), or raise BRITER_GIT_TIMEOUT_MS"
            slow = Failure(error.code, f"the files could not be read: {error.message}", fix)
            raise SlowBatchError(slow) from error
        paths = set[str]().union(*(each.changes for each in staged.values()))
        bases = self._find_bases(paths, staged.values(), tip)
        self._conflicts.load(paths, tip.commit)
        self.copies.find_stashed(claims, staged, tip.commit)
        self.copies.find_unresolved(claims, staged)
        newly_scheduled = {normalized(path) for path in scheduled().keys() - held.keys()}
        items: list[Item] = []
        outcomes: list[Outcome] = []
        for claim in claims:
            files = staged[claim.key].changes
            edits = (Edit(path, file, bases.get(path)) for path, file in files.items())
            rebased = tuple(self._conflicts.rebase(edit, claim) for edit in edits)
            item = Item(claim, staged[claim.key], rebased)
            outcome = _outcome_without_commit(item, newly_scheduled, check)
            if outcome is None:
                items.append(item)
            else:
                outcomes.append(outcome)
        self._repository.check_unmoved()
        return items, outcomes

    def _find_bases(self, paths: Collection[str], staged: Collection[Staged], tip: Tip) -> Mapping[str, Base]:
        """Return the versions that the changed files are edits of, as far as they are known."""
        known = self.copies.bases(paths, tip.commit) if paths else {}
        if tip.commit in (tip.first, self._repository.ref(self._repository.branch_ref)):
            return known
        # A file without a base is an edit of the first tip's; but a job may delete what only the new tip has.
        entries = self._repository.entries(tip.first, paths)
        found = {path: Base.of(entry) for path, entry in entries.items()}
        for each in staged:
            for path, file in each.changes.items():
                if file is not None:
                    found.setdefault(path, Base.of(None))
        return found | dict(known)

    def _build(self, items: Sequence[Item], tip: Tip, now: float) -> _Built:
        """Merge the items into the tip, one after another, and write their commits onto a private ref."""
        repository, plan = self._repository, Plan(uuid.uuid4().hex, tip.expect, tip.commit, {}, {})
        paths = {edit.path for item in items for edit in item.edits}
        built = _Built(plan, Merge(repository, tip.commit, paths, self.copies.read), [], [])
        own: dict[str, Commit] = {}
        carriers: dict[str, str] = {}
        """By path: the key of the claim whose commit has it."""
        carried: dict[str, str] = {}
        blobs: dict[str, str | None] = {}
        for item in items:
            files, conflicting = built.merge.place(item.edits)
            if conflicting:
                built.conflicts.append((item, conflicting))
                continue
            blobs |= item.blobs
            if files:
                own[item.claim.key] = item.commit(self.identity, now, files)
                carriers |= dict.fromkeys(files, item.claim.key)
            elif carrier := next((carriers[path] for path in item.blobs if path in carriers), None):
                carried[item.claim.key] = carrier
            else:
                built.unchanged.append(item)
        if not own:
            return built._replace(plan=plan._replace(blobs=blobs))
        ref, commits = self._batch_ref(plan), [*own.values()]
        written = write_commits(repository.git, commits, parent=tip.commit, ref=ref, progress=self.progress)
        repository.refs.note([(ref, written[-1], None)])
        repository.know_built(tip.commit, written[-1], [commit.files for commit in commits])
        self._built = {
            sha: [FileChange(path, None, None, file is None) for path, file in commit.files.items()]
            for sha, commit in zip(written, commits, strict=True)
        }
        names = dict(zip(own, written, strict=True))
        names |= {key: names[carrier] for key, carrier in carried.items()}
        unpublished = {
            item.claim.key: item.remainder
            for item in items
            if item.claim.key in names and any(item.remainder)
        }
        plan = plan._replace(tip=written[-1], commits=names, blobs=blobs, unpublished=unpublished or None)
        return built._replace(plan=plan)

    # The push

    def _push(self, built: _Built, items: Sequence[Item], tip: Tip) -> str | None:
        """Push the plan's commits; return the remote's tip, or None if the remote has moved.

        After an uncertain end the remote is asked. While it does not answer, the plan stays recorded.
        """
        plan = built.plan
        if not plan.commits:  # what is unchanged must be on the remote, and not only have been there
            return tip.commit if self._repository.remote_tip() == tip.expect else None
        if any(item.staged.uses_lfs for item in items):
            self._push_large_files(plan)
        if not self.dry_run:
            self.plans.record(plan)
        self.progress("push", 0, 0)
        if not self.still_ours():
            self._discard(plan, None)
            raise LockLostError
        try:
            has_landed = push(
                self._repository,
                f"{self._batch_ref(plan)}:{self._repository.branch_ref}",
                expect=plan.base,
                dry_run=self.dry_run,
                progress=self.progress,
            )
        except UncertainPushError as error:
            return self._resolve_uncertain(plan, error)
        except PublishError:
            self._discard(plan, None)
            raise
        if not has_landed:
            self._discard(plan, None)
            return None
        return plan.tip

    def _resolve_uncertain(self, plan: Plan, error: UncertainPushError) -> str:
        """Return the remote's tip if it has the plan's commits after all; else raise what the error means."""
        asked_at = time.monotonic()
        landed = self._find_landed(plan)
        if landed is not None:
            return landed
        self._discard(plan, None)
        if error.is_slow and time.monotonic() - asked_at < _AT_ONCE_S:
            raise SlowBatchError(error.failure) from error
        raise error

    def _push_large_files(self, plan: Plan) -> None:
        try:
            push_large_files(self._repository, self._batch_ref(plan), base=plan.base, dry_run=self.dry_run)
        except CommandTimeoutError as error:
            asked_at = time.monotonic()
            self._repository.remote_tip()
            if error.has_moved and time.monotonic() - asked_at < _AT_ONCE_S:
                raise SlowBatchError(error.failure) from error
            raise

    def _find_landed(self, plan: Plan) -> str | None:
        """Ask the remote. Return its tip if that contains the plan's commits, else None."""
        repository = self._repository
        there = repository.remote_tip()
        if there is None and plan.base is not None:
            raise repository.no_branch_error()
        if there in (None, plan.base):
            self._unlanded.record(plan)
            return None
        if there == plan.tip and repository.ref(self._batch_ref(plan)) == plan.tip:
            return plan.tip
        fetched = repository.fetch()
        return fetched if repository.is_ancestor(plan.tip, fetched) else None

    # After the push

    def _settle(
        self, built: _Built, items: Sequence[Item], tip: Tip, landed: str, clock: Callable[[], float]
    ) -> Sequence[Outcome]:
        """Sync the local branch after a push. Return the outcomes of all claims that were built."""
        outcomes = [
            self._conflicts.settle(item, paths, built.merge, clock=clock, dry_run=self.dry_run)
            for item, paths in built.conflicts
        ]
        commits = built.plan.commits
        published = [item for item in items if item.claim.key in commits]
        outcomes += [item.outcome(Result.PUBLISHED, commit=commits[item.claim.key]) for item in published]
        restored = self.copies.find_restored(built.unchanged)
        for item in built.unchanged:
            outcome = item.outcome(Result.UNCHANGED)
            outcomes.append(outcome._replace(restored=restored.get(item.claim.key, "")))
        if built.plan.commits and self._repository.git.worktree:  # while the local branch follows
            self._repository.git.begin(*COUNT_LINES, tip.commit, built.plan.tip)
        self._follow(built.plan, landed)
        return self._described(outcomes, built.plan, tip.commit)

    def _settle_late(self, claims: Sequence[Claim], tip: Tip) -> Mapping[str, Outcome]:
        """Follow pushes that have landed late; return the outcomes of the claims that they have published."""
        is_ancestor, seen = self._repository.is_ancestor, self._repository.ref(self._repository.pushed_ref)
        outcomes: dict[str, Outcome] = {}
        for plan in self._unlanded.plans():
            keys = plan.commits.keys() & {claim.key for claim in claims}
            is_new = seen is None or not is_ancestor(plan.tip, seen)
            if (keys or is_new) and is_ancestor(plan.tip, tip.commit):
                outcomes |= {each.key: each for each in self._settle_landed(plan, tip.commit, keys)}
        return outcomes

    def _settle_landed(self, plan: Plan, tip: str, keys: Collection[str]) -> Sequence[Outcome]:
        """Have this side follow an earlier push that the remote's tip contains; return its outcomes."""
        repository = self._repository
        self._conflicts.load(plan.blobs, tip)
        self._follow(
            plan, tip, local=repository.ref(repository.branch_ref) if repository.git.worktree else None
        )
        outcomes = []
        for key in keys:
            left = Remainder(*(plan.unpublished or {}).get(key, ()))
            outcomes.append(
                Outcome(
                    key,
                    Result.PUBLISHED,
                    plan.commits[key],
                    rejected_paths=tuple(left.rejected_paths),
                    missing=tuple(left.missing),
                    withheld=left.withheld,
                    stashed=left.stashed,
                )
            )
        return self._described(outcomes, plan, plan.base)

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
            if not self._guard(lambda: self.copies.sync(tip, self._published_blobs(plan, tip, local))):
                self._unfollowed[plan.id] = plan, tip

    def _follow_kept(self) -> None:
        """Follow the earlier pushes that could not be remembered. Raises PublishError and OSError."""
        for plan, tip in [*self._unfollowed.values()]:
            self._repository.update_refs((self._repository.pushed_ref, tip, None))
            self.copies.sync(tip, self._published_blobs(plan, tip, None))
            del self._unfollowed[plan.id]
            self._discard(plan, tip)

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

    def _guard(self, action: Callable[[], object]) -> bool:
        """Run the action; warn of a local failure, and return False. Only a database that is away raises."""
        try:
            action()
        except UnavailableError:
            raise
        except (PublishError, OSError) as error:
            self.warn(*describe(error))
            return False
        return True

    def _discard(self, plan: Plan, landed: str | None) -> None:
        """Delete a plan and its private ref. `landed`: the remote's tip if that has the plan's commits.

        A landed plan stays until its base versions are stored: nothing else knows them.
        """
        repository, ref = self._repository, self._batch_ref(plan)
        moves: list[Move] = [(ref, None, None)] if repository.ref(ref) else []
        if landed and not self.dry_run and repository.ref(repository.pushed_ref) != landed:
            moves.append((repository.pushed_ref, landed, None))
        if moves and not self._guard(lambda: repository.update_refs(*moves)) and landed:
            self._unfollowed[plan.id] = plan, landed
        if plan.commits and not self.dry_run and plan.id not in self._unfollowed:
            self._guard(lambda: self.plans.drop(plan))

    def _batch_ref(self, plan: Plan) -> str:
        return f"{self._repository.own_refs}/batch/{plan.id}"
