"""The publisher: a transaction whose commit point is the push.

Check, stage, build the commits aside, record the plan, push, sync the mirror. Until the push, neither the
branch nor the index nor the work tree changes, so every failure before it leaves the repository as it was.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from briter_worker.allowlist import is_inside
from briter_worker.errors import (
    Failure,
    FailureCode,
    LockLostError,
    PublishError,
    UnavailableError,
)
from briter_worker.git.batch import Item, Tip, advance_base, build_batch, find_receipt
from briter_worker.git.checkout import Checkout
from briter_worker.git.commits import File, read_own_commits
from briter_worker.git.conflicts import ConflictBranches
from briter_worker.git.maintenance import tidy_repository
from briter_worker.git.merge import Base, Edit
from briter_worker.git.plans import FileConflicts, FilePlans
from briter_worker.git.push import PushResult, UncertainPushError, push_branch, push_large_files
from briter_worker.git.repository import FOLDER, Repository
from briter_worker.git.staging import WorkTreeSource
from briter_worker.ports import Outcome, Plan, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.batch import Built
    from briter_worker.git.commits import Person
    from briter_worker.git.repository import Move
    from briter_worker.git.run import Git
    from briter_worker.git.staging import Staged
    from briter_worker.ports import BaseVersions, Change, PlanStore, Request

_MAX_RACES = 5
_LAST_COMMAND_TIMEOUT_S = 10.0
"""After an abort: how long each command may take that asks what became of the push."""


class Source(Protocol):
    """Where the files of the requests come from: the CMS's work tree, or the payloads of the jobs."""

    def stage(
        self,
        requests: Sequence[Request],
        *,
        tip: str,
        scheduled: Mapping[str, float],
        bases: Mapping[str, str | None],
    ) -> Mapping[str, Staged]:
        """Return what each request changes of `tip` with the `bases` in place of its files, by its key."""
        ...


class Mirror(Protocol):
    """What follows the remote: the CMS's checkout, or what the database knows of the authors' copies."""

    def agreed(self, tip: str) -> str:
        """Return the commit whose files the authors' copies started from, as a whole."""
        ...

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Return the versions that the paths were edited from, where these may not be what `tip` has."""
        ...

    def kept(self) -> Mapping[str, str | None]:
        """Return the base version of every file that has not followed the commit of `agreed`."""
        ...

    def read(self, blob: str) -> bytes:
        """Return the content of a base version, or of a blob of the remote. Raises LookupError."""
        ...

    def sync(self, tip: str, blobs: Mapping[str, str | None]) -> None:
        """Follow the remote to `tip`, now or later. `blobs`: by path, the author's version published."""
        ...

    def catch_up(self) -> None:
        """Finish what an earlier sync could not."""
        ...


class GitPublisher:
    """Publishes to one branch of one remote. The worker holds the site meanwhile."""

    def __init__(
        self,
        repository: Repository,
        *,
        source: Source,
        mirror: Mirror,
        plans: PlanStore,
        bases: BaseVersions,
        identity: Person,
        dry_run: bool,
        progress: Callable[[str, int, int], None],
        warn: Callable[[str], None],
        still_ours: Callable[[], bool],
    ) -> None:
        self._repository = repository
        self._source = source
        self._mirror = mirror
        self._plans = plans
        self._identity = identity
        self._dry_run = dry_run
        self._progress = progress
        self._warn = warn
        self._still_ours = still_ours
        self._scheduled: Mapping[str, float] = {}
        self._conflicts = ConflictBranches(repository, bases, identity, mirror.read)

    def publish(
        self,
        requests: Sequence[Request],
        *,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
        cancelled: Callable[[], Collection[str]],
        now: float,
    ) -> Iterator[Sequence[Outcome]]:
        """Implement `ports.Publisher`."""
        with self._repository.working():
            self._repository.check()
            if not self._dry_run:
                self._mirror.catch_up()
            tip = self._first_tip()
            items, outcomes = self._stage(requests, tip, scheduled, check)
            self._repository.check_unmoved()
            if outcomes:
                yield outcomes
            yield from self._build_and_push(items, tip, cancelled, now)

    def resolve(self) -> Iterator[Mapping[str, str]]:
        """Implement `ports.Publisher`."""
        plans = self._plans.plans()
        if not plans:
            return
        self._repository.git.allow_last_commands(_LAST_COMMAND_TIMEOUT_S)
        with self._repository.working():
            for plan in plans:
                tip = self._find_landed(plan)
                if tip is not None:
                    self._conflicts.load(plan.blobs, tip)
                    self._complete(plan, tip, {})
                yield plan.commits if tip is not None else {}
                self._discard(plan)

    def undecided(self) -> Collection[str]:
        """Implement `ports.Publisher`."""
        return {key for plan in self._plans.plans() for key in plan.commits}

    def tidy(self, now: float) -> None:
        """Implement `ports.Publisher`."""
        repository = self._repository
        with repository.working():
            if not self._dry_run:
                self._guard(self._mirror.catch_up)
            if repository.git.worktree is not None:  # a cluster's clone is thrown away instead
                keep = [self._batch_ref(plan.id) for plan in self._plans.plans()]
                tidy_repository(repository, now, keep)

    # Before the push

    def _first_tip(self) -> Tip:
        """Return the remote's tip as the worker saw it last; ask the remote if it never saw it."""
        repository = self._repository
        pushed = repository.ref(repository.pushed_ref)
        if pushed is not None:
            return Tip(pushed, pushed, is_fresh=False)
        local = repository.ref(repository.branch_ref)
        # A branch that anybody has seen there was deleted since, and is not created again.
        if local and repository.ref(repository.tracking_ref) is None and repository.remote_tip() is None:
            return Tip(local, None, is_fresh=True)
        return self._fetch(None)

    def _fetch(self, since: Tip | None) -> Tip:
        """Fetch the remote's tip, and find what of the worker's own has landed since."""
        repository = self._repository
        fetched = repository.fetch()
        try:
            repository.check_not_rewritten(fetched)
        except PublishError as error:
            if repository.git.worktree is not None or error.code is not FailureCode.REMOTE_REWRITTEN:
                raise
            self._warn(f"{error.message}. The next posts are published on what the remote has now")
        repository.update_refs((repository.pushed_ref, fetched, None))
        if since is None:
            return Tip(fetched, fetched, is_fresh=True)
        own = read_own_commits(repository.git, since.commit, fetched, self._identity)
        paths = {path for commit in own for path in commit.blobs}
        bases = self._bases(paths, since.commit)
        landed = {path: advance_base(path, bases[path], own).blob for path in paths}
        own_blobs = {path: blob for path, blob in landed.items() if blob != bases[path].blob}
        return Tip(
            fetched,
            fetched,
            is_fresh=True,
            own_commits=[*since.own_commits, *own],
            own_blobs={**since.own_blobs, **own_blobs},
        )

    def _bases(self, paths: Collection[str], tip: str) -> dict[str, Base]:
        """Return the version that each path was edited from, as far as it is known, else what `tip` has."""
        if not paths:
            return {}
        known = self._mirror.bases(paths, tip)
        entries = self._repository.entries(tip, paths - known.keys())
        there = {path: Base(entry.blob, entry.mode) for path, entry in entries.items()}
        return {path: known.get(path) or there.get(path, Base(None)) for path in paths}

    def _stage(
        self,
        requests: Sequence[Request],
        tip: Tip,
        scheduled: Callable[[], Mapping[str, float]],
        check: Callable[[str, Sequence[Change]], Outcome | None],
    ) -> tuple[list[Item], list[Outcome]]:
        """Read the requests' files; return what can be built, and the outcomes of the other requests."""
        self._scheduled = scheduled()
        read, outcomes = self._read(requests, tip)
        # A post that was scheduled meanwhile may have been read, and its time has not come.
        newly_scheduled = {path.strip("/") for path in scheduled().keys() - self._scheduled.keys()}
        items: list[Item] = []
        for item in read:
            if any(_is_at_or_below(change.path, newly_scheduled) for change in item.changes):
                outcomes.append(self._outcome(item, Result.RELEASED))
            elif outcome := check(item.key, item.changes):
                outcomes.append(replace(outcome, rejected_paths=item.rejected))
            else:
                items.append(item)
        return items, outcomes

    def _read(self, requests: Sequence[Request], tip: Tip) -> tuple[list[Item], list[Outcome]]:
        """Return the requests' changes as edits of their bases; and the failures of single requests."""
        agreed, kept = self._mirror.agreed(tip.commit), self._mirror.kept()
        staged = self._source.stage(requests, tip=agreed, scheduled=self._scheduled, bases=kept)
        paths = {change.path for each in staged.values() for change in each.changes}
        bases = self._mirror.bases(paths, tip.commit) if paths else {}
        self._conflicts.load(paths, tip.commit)
        items: list[Item] = []
        outcomes: list[Outcome] = []
        for request in requests:
            each = staged[request.key]
            edits = tuple(self._edit(change, each, bases.get(change.path)) for change in each.changes)
            item = Item(
                request,
                each.changes,
                edits,
                each.unchanged,
                rejected=(*each.rejected, *each.missing),
                withheld=each.withheld,
                uses_lfs=each.uses_lfs,
            )
            if each.failure is None:
                items.append(item)
            else:
                outcomes.append(self._outcome(item, Result.FAILED, failure=each.failure))
        return items, outcomes

    def _edit(self, change: Change, staged: Staged, base: Base | None) -> Edit:
        file = None
        if change.blob is not None:
            file = File(change.mode, change.blob, staged.contents.get(change.path))
        return Edit(change.path, file, self._conflicts.base_of(change.path, change.blob) or base)

    # The push

    def _build_and_push(
        self, items: Sequence[Item], tip: Tip, cancelled: Callable[[], Collection[str]], now: float
    ) -> Iterator[Sequence[Outcome]]:
        """Build and push until the remote is where it was last seen; yield the outcomes."""
        waiting, settled, races = list(items), list[Outcome](), 0
        while waiting := self._without_cancelled(waiting, cancelled(), settled):
            plan_id = uuid.uuid4().hex
            built = build_batch(
                self._repository,
                waiting,
                tip,
                ref=self._batch_ref(plan_id),
                identity=self._identity,
                now=now,
                read=self._mirror.read,
                progress=self._progress,
            )
            if not built.commits.keys().isdisjoint(cancelled()):
                self._delete_ref(self._batch_ref(plan_id))
                continue
            plan = Plan(plan_id, tip.expect, built.tip, built.commits, built.blobs(waiting))
            try:
                landed = self._push(plan, waiting) if built.commits else self._confirm(tip)
            except PublishError as error:
                if error.code is not FailureCode.REJECTED or len(built.commits) != 1:
                    raise
                (rejected,) = [item for item in waiting if item.key in built.commits]
                settled.append(self._outcome(rejected, Result.FAILED, failure=error.failure))
                waiting.remove(rejected)
                continue
            if landed is None:
                if races == _MAX_RACES:
                    raise _lost_race()
                races += 1
                waiting, tip = self._follow(waiting, tip, settled)
                continue
            settled += [
                self._conflicts.settle(item, paths, built.merge, now=now, dry_run=self._dry_run)
                for item, paths in built.conflicts
            ]
            settled += self._outcomes(waiting, built, tip)
            self._complete(plan, landed, tip.own_blobs)
            yield settled
            if built.commits:
                self._drop_plan(plan)
            return
        if settled:
            yield settled

    def _without_cancelled(
        self, items: Sequence[Item], cancelled: Collection[str], settled: list[Outcome]
    ) -> list[Item]:
        settled += [Outcome(item.key, Result.CANCELLED) for item in items if item.key in cancelled]
        return [item for item in items if item.key not in cancelled]

    def _push(self, plan: Plan, items: Sequence[Item]) -> str | None:
        """Push the plan's commits; return the remote's tip, or None if the remote has moved.

        After an uncertain end the remote is asked. While it does not answer, the plan stays recorded.
        """
        ref = self._batch_ref(plan.id)
        if any(item.uses_lfs for item in items):
            push_large_files(self._repository, ref, dry_run=self._dry_run)
        if not self._dry_run:
            self._plans.record(plan)
        try:
            self._check_still_ours()
            self._progress("push", 0, 0)
            result = push_branch(
                self._repository, ref, expect=plan.base, dry_run=self._dry_run, progress=self._progress
            )
        except UncertainPushError as error:
            return self._ask_about(plan, error)
        except (PublishError, LockLostError):
            self._discard(plan)
            raise
        if result is PushResult.MOVED:
            self._discard(plan)
            return None
        return plan.tip

    def _check_still_ours(self) -> None:
        if not self._still_ours():
            raise LockLostError

    def _ask_about(self, plan: Plan, error: PublishError) -> str:
        """Return the remote's tip if the plan has landed; else raise the error of its push."""
        try:
            landed = self._find_landed(plan)
        except PublishError:
            raise error from None
        if landed is None:
            self._discard(plan)
            raise error
        return landed

    def _find_landed(self, plan: Plan) -> str | None:
        """Ask the remote. Return its tip if that contains the plan's commits, else None."""
        repository = self._repository
        there = repository.remote_tip()
        if there is None and plan.base is not None:
            raise repository.no_branch_error()
        if there in (None, plan.base):
            return None
        if there == plan.tip and repository.ref(self._batch_ref(plan.id)) == plan.tip:
            return plan.tip
        fetched = repository.fetch()
        return fetched if repository.is_ancestor(plan.tip, fetched) else None

    def _confirm(self, tip: Tip) -> str | None:
        """Return the tip if it is the remote's: what is unchanged must be there, and not only have been."""
        if tip.is_fresh or self._repository.remote_tip() == tip.expect:
            return tip.commit
        return None

    def _follow(self, items: Sequence[Item], tip: Tip, settled: list[Outcome]) -> tuple[list[Item], Tip]:
        """Return the remote's new tip, and the items as edits of what they started from."""
        moved = self._fetch(tip)
        own = moved.own_commits[len(tip.own_commits) :]
        known = {edit.path: edit.base for item in items for edit in item.edits}
        entries = self._repository.entries(tip.commit, known.keys())
        if self._mirror.agreed(moved.commit) != self._mirror.agreed(tip.commit):
            items, failed = self._read([item.request for item in items], moved)
            settled += failed
        followed = []
        for item in items:
            edits = []
            for edit in item.edits:
                entry = entries.get(edit.path)
                base = edit.base or known.get(edit.path)
                if base is None and edit.path in known:
                    base = Base(entry.blob, entry.mode) if entry else Base(None)
                edits.append(replace(edit, base=base and advance_base(edit.path, base, own)))
            followed.append(replace(item, edits=tuple(edits)))
        return followed, moved

    # After the push

    def _outcomes(self, items: Sequence[Item], built: Built, tip: Tip) -> Iterator[Outcome]:
        for item in items:
            if commit := built.commits.get(item.key):
                yield self._outcome(item, Result.PUBLISHED, commit=commit)
        for item in built.unchanged:
            if item.withheld:
                yield self._snoozed(item)
            elif receipt := find_receipt(item, tip.own_commits):
                yield self._outcome(item, Result.PUBLISHED, commit=receipt)
            else:
                yield self._outcome(item, Result.UNCHANGED)

    def _snoozed(self, item: Item) -> Outcome:
        path, until = min(item.withheld.items(), key=lambda each: each[1])
        failure = Failure(
            FailureCode.UNSETTLED,
            f"{path} belongs to a scheduled post and is not published before its time",
            "publish the scheduled post now, or cancel it",
        )
        return self._outcome(item, Result.SNOOZED, failure=failure, retry_at=until)

    def _outcome(
        self,
        item: Item,
        result: Result,
        *,
        commit: str | None = None,
        failure: Failure | None = None,
        retry_at: float | None = None,
    ) -> Outcome:
        return Outcome(item.key, result, commit, failure, retry_at, item.rejected)

    def _complete(self, plan: Plan, landed: str, own_blobs: Mapping[str, str | None]) -> None:
        """Have this side follow the remote. Nothing local fails a post that is on the remote."""
        repository, batch = self._repository, self._batch_ref(plan.id)
        moves: list[Move] = [(batch, None, None)] if repository.ref(batch) else []
        if not self._dry_run and repository.ref(repository.pushed_ref) != landed:
            moves.append((repository.pushed_ref, landed, None))
        if moves:
            self._guard(lambda: repository.update_refs(*moves))
        if not self._dry_run:
            self._guard(lambda: self._conflicts.close(plan.blobs))
            self._guard(lambda: self._mirror.sync(landed, {**own_blobs, **plan.blobs}))

    def _guard(self, action: Callable[[], object]) -> None:
        """Run the action; warn of a local failure. Only a database that is away stops what follows."""
        try:
            action()
        except UnavailableError:
            raise
        except (PublishError, OSError) as error:
            self._warn(str(error))

    def _discard(self, plan: Plan) -> None:
        """Forget a plan that did not land, or is complete."""
        self._drop_plan(plan)
        self._delete_ref(self._batch_ref(plan.id))

    def _drop_plan(self, plan: Plan) -> None:
        if not self._dry_run:
            self._guard(lambda: self._plans.drop(plan))

    def _delete_ref(self, ref: str) -> None:
        if self._repository.ref(ref) is not None:
            self._guard(lambda: self._repository.update_refs((ref, None, None)))

    def _batch_ref(self, plan_id: str) -> str:
        return f"{self._repository.own_refs}/batch/{plan_id}"


def _is_at_or_below(path: str, declared: Collection[str]) -> bool:
    return path in declared or any(path[:i] in declared for i, c in enumerate(path) if c == "/")


def _lost_race() -> PublishError:
    return PublishError(
        FailureCode.LOST_RACE,
        f"others pushed {_MAX_RACES + 1} times while the worker pushed",
        "none needed: the worker tries again by itself",
    )


class CheckoutMirror:
    """The CMS's checkout as the publisher's mirror."""

    def __init__(self, repository: Repository, checkout: Checkout) -> None:
        self._repository = repository
        self._checkout = checkout

    def agreed(self, tip: str) -> str:
        """Implement `Mirror`."""
        return self._checkout.agreed(tip) or tip

    def bases(self, paths: Collection[str], tip: str) -> Mapping[str, Base]:
        """Implement `Mirror`."""
        found = {path: Base(blob) for path, blob in self._checkout.bases(paths).items()}
        agreed = self.agreed(tip)
        if agreed != tip:
            entries = self._repository.entries(agreed, paths)
            for path in paths - found.keys():
                entry = entries.get(path)
                is_file = entry is not None and entry.mode != FOLDER
                found[path] = Base(entry.blob, entry.mode) if entry and is_file else Base(None)
        return found

    def kept(self) -> Mapping[str, str | None]:
        """Implement `Mirror`."""
        return {path: base.blob for path, base in self._checkout.state().bases.items()}

    def read(self, blob: str) -> bytes:
        """Implement `Mirror`. A version that the repository has lost is damage, and no conflict."""
        return self._repository.blob(blob)

    def sync(self, tip: str, blobs: Mapping[str, str | None]) -> None:
        """Implement `Mirror`."""
        self._checkout.sync(tip, blobs)

    def catch_up(self) -> None:
        """Implement `Mirror`."""
        self._checkout.catch_up()


def open_disk_publisher(
    git: Git,
    *,
    branch: str,
    remote: str,
    allowlist: Allowlist,
    identity: Person,
    max_file_bytes: int,
    dry_run: bool,
    progress: Callable[[str, int, int], None],
    warn: Callable[[str], None],
    still_ours: Callable[[], bool],
) -> GitPublisher:
    """Return the publisher of the CMS's own repository."""
    repository = Repository(git, branch=branch, remote=remote)
    checkout = Checkout(
        repository,
        warn,
        is_cms_path=lambda path: any(is_inside(folder, path) for folder in allowlist.folders),
    )
    return GitPublisher(
        repository,
        source=WorkTreeSource(
            repository, allowlist=allowlist, max_file_bytes=max_file_bytes, progress=progress
        ),
        mirror=CheckoutMirror(repository, checkout),
        plans=FilePlans(git.state_dir, branch),
        bases=FileConflicts(git.state_dir, branch),
        identity=identity,
        dry_run=dry_run,
        progress=progress,
        warn=warn,
        still_ours=still_ours,
    )
