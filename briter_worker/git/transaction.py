"""One drain's way to the remote: build, push, and where others pushed meanwhile, build again on that."""

from __future__ import annotations

import uuid
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from briter_worker.errors import AwayError, Failure, LockLostError, PublishError
from briter_worker.git.conflicts import Conflicts
from briter_worker.git.ground import Ground
from briter_worker.git.refs import PRIVATE
from briter_worker.git.rejection import Rejection, blocked
from briter_worker.git.remote import UNCERTAIN, Pushed
from briter_worker.git.site import Tips
from briter_worker.ports import Outcome, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from briter_worker.git.building import Building, Built, Item
    from briter_worker.git.objects import Entry, Objects
    from briter_worker.git.place import Follower
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Site

_RACES = 5
_FOR_A_PERSON = frozenset({Failure.DIVERGED, Failure.WRONG_BRANCH})
"""Why an adoption could not be done that only a person can make up for."""


class Transaction:
    """Pushes one drain's posts. `record` makes each plan durable before its push.

    To `late` is added what is on the remote and could not be adopted, but may be soon.
    """

    def __init__(  # noqa: PLR0913 - all that a push stands between
        self,
        site: Site,
        remote: Remote,
        objects: Objects,
        building: Building,
        follower: Follower,
        *,
        record: Callable[[Plan], None],
        dry_run: bool,
        progress: Callable[[str, int, int], None],
        warn: Callable[[str], None],
        still_ours: Callable[[], bool],
        late: list[Plan],
        large_files: bool = False,
    ) -> None:
        self._site = site
        self._remote = remote
        self._objects = objects
        self._building = building
        self._follower = follower
        self._record = record
        self._dry_run = dry_run
        self._progress = progress
        self._warn = warn
        self._still_ours = still_ours
        self._late = late
        self._large_files = large_files
        self._conflicts = Conflicts(site, remote, follower, building, dry_run=dry_run)
        self._cancelled: Callable[[], Collection[str]] = tuple
        self._checked = False
        self._lacked: str | None = None

    def settle(
        self,
        items: Sequence[Item],
        tips: Tips,
        *,
        lacked: str | None,
        cancelled: Callable[[], Collection[str]],
    ) -> Iterator[list[Outcome]]:
        """Put the items on the remote; what it rejects is halved until the post at fault stands alone.

        What is cancelled before a push is left out of it. `lacked` is where the remote was before this
        drain: what it lacked then, this drain has published.
        """
        self._lacked = lacked
        self._cancelled = cancelled
        todo = deque([list(items)] if items else [])
        while todo:
            part = todo.popleft()
            try:
                outcomes, tips = self._publish(part, tips)
            except PublishError as failure:
                if failure.failure is not Failure.REJECTED:
                    raise
                if len(part) > 1:
                    middle = len(part) // 2
                    todo.extendleft([part[middle:], part[:middle]])
                    continue
                if tips.remote not in (None, tips.local) and not self._dry_run:
                    raise PublishError(
                        Failure.REMOTE_REFUSED,
                        "this post goes along with commits of a person's that the remote lacks, and "
                        f"{failure.text} Fix first: git push {self._site.remote} {self._site.branch}",
                    ) from failure
                outcomes = [
                    Outcome(
                        part[0].key,
                        failure=failure.failure,
                        text=failure.text,
                        rejected_paths=part[0].rejected,
                    )
                ]
            yield outcomes

    def flush(self, tips: Tips, dry: str) -> str:
        """Push the commits of dry runs, up to `dry`, and nothing of a person's that came after."""
        ground = Ground(tips, dry)
        if tips.remote is not None and not self._site.is_ancestor(tips.remote, dry):
            ground = self._under(dry, tips)  # somebody has fetched: what the remote has must not be lost
        races = 0
        while races <= _RACES:
            if ground.base == tips.remote == dry:
                self._site.update((self._site.dry_run_ref, None, None))
                return dry  # all that the remote takes of it was pushed one by one
            ref = _private_ref()
            built = self._building.build(ground.along, ground.base, ref)
            if built.conflicts:
                self._cannot_go_along(built.conflicts[0][1])
            if built.tip == ground.base:
                self._site.update((ref, built.tip, None))
            plan = Plan(tips.local, built.tip, ref, {}, {}, dry_run=False, remote=ground.tips.remote)
            try:
                pushed = self._push(plan)
            except PublishError as failure:
                if failure.failure is not Failure.REJECTED:
                    raise
                tips = self._without_rejected(plan, dry, failure)
                dry = tips.local
                ground = Ground(tips, dry)
                continue
            if pushed is Pushed.DONE:
                self._adopt_flushed(plan, dry)
                return plan.new
            ground = self._under(dry, ground.tips)
            races += 1
        raise _lost_race()

    def _without_rejected(self, plan: Plan, dry: str, failure: PublishError) -> Tips:
        """The dry runs' commits without the first that the remote rejects."""
        if plan.old != dry:
            raise blocked(self._site, plan.new, failure) from failure
        if plan.new != dry:
            # They were put on a remote that moved: so they are here, from now on.
            self.adopt(replace(plan, dry_run=True), None)
        rejection = Rejection(
            self._site,
            self._objects,
            self._building,
            push=self._push,
            adopt=self.adopt,
            warn=self._warn,
        )
        return rejection.leave_out_first(Tips(plan.new, plan.remote), failure)

    def _under(self, dry: str, tips: Tips) -> Ground:
        """What to push the commits of dry runs on, now that the remote has others."""
        ground = self._catch_up(tips)
        if ground.base != ground.tips.local:
            return ground
        if not self._site.is_ancestor(str(ground.tips.remote), dry):
            remote, branch = self._site.remote, self._site.branch
            raise PublishError(
                Failure.DIVERGED,
                f"{branch} has what dry runs committed, merged with what the remote had. The merge is a "
                f"person's: it goes out with the next post, or by hand. Fix: git push {remote} {branch}",
            )
        return Ground(ground.tips, dry)

    def _publish(self, items: Sequence[Item], tips: Tips) -> tuple[list[Outcome], Tips]:
        """One push, if nobody else pushes; the outcomes, and the tips after it."""
        settled: list[Outcome] = []
        waiting = list(items)
        ground = Ground(tips, tips.local)
        if tips.remote not in (None, tips.local) and not self._site.is_ancestor(str(tips.remote), tips.local):
            ground = self._catch_up(tips)
        races = 0
        while races <= _RACES:
            tips = ground.tips
            waiting = self._still_wanted([item.based_on(ground.landed) for item in waiting], settled)
            landed = self._follower.landed(waiting, ground.base, self._building)
            waiting = [item.based_on(landed) for item in waiting]
            ref = _private_ref()
            self._progress("commit", 0, len(waiting))
            built = self._building.build([*ground.along, *waiting], ground.base, ref)
            self._progress("commit", len(waiting), len(waiting))
            self._check_ground(built, tips, ref)
            for item, paths in built.conflicts:
                if not item.key:
                    self._cannot_go_along(paths)
                settled.append(self._conflicts.settle(item, paths, local=tips.local, theirs=ground.base))
                waiting.remove(item)
            carried, same = self._unchanged(built)
            if not built.commits and not carried and built.tip == ground.base:
                if self._checked or not same or self._remote.tip() == tips.remote:
                    return settled + self._nothing_to_do(same, ground, built), self._take_over(ground)
                ground = self._catch_up(tips)
                races += 1
                continue
            if built.tip == ground.base:
                self._site.update((ref, built.tip, None))
            commits = built.commits | {item.key: built.carrier(item) for item in carried}
            staged = {change.path: change.blob for item in waiting for change in item.changes}
            plan = Plan(tips.local, built.tip, ref, commits, staged, self._dry_run, tips.remote)
            if not plan.commits.keys().isdisjoint(self._cancelled()):
                self._forget(ref)
                continue  # the last moment: it is built anew without them
            if self._push(plan) is Pushed.MOVED:
                ground = self._catch_up(tips)
                races += 1
                continue
            self.adopt(plan, built.entries if _is_plain(plan, built) else None)
            rejected = {item.key: item.rejected for item in waiting}
            settled += [Outcome(key, sha, rejected_paths=rejected[key]) for key, sha in commits.items()]
            settled += self._nothing_to_do(same, ground, built)
            return settled, Tips(plan.new, tips.remote if self._dry_run else plan.new)
        raise _lost_race()

    def _check_ground(self, built: Built, tips: Tips, ref: str) -> None:
        """Raises a cache's MovedError when what conflicts was not held against what the remote has.

        Another host may have pushed what conflicts, for the same author, and died before it could say so.
        """
        if not built.conflicts or self._follower.is_lasting or self._checked:
            return
        if self._remote.tip() != tips.remote:
            self._forget(ref)
            self._catch_up(tips)

    def _still_wanted(self, items: Sequence[Item], settled: list[Outcome]) -> list[Item]:
        """Those that nobody has cancelled; the others are settled."""
        unwanted = self._cancelled()
        settled += [Outcome(item.key, cancelled=True) for item in items if item.key in unwanted]
        return [item for item in items if item.key not in unwanted]

    def _push(self, plan: Plan) -> Pushed:
        self._record(plan)
        if not self._still_ours():
            raise LockLostError
        # Git tells nothing before it sends the first object: it looks for the remote, and compares.
        self._progress("push", 0, 0)
        try:
            if self._large_files:
                self._remote.push_large_files(plan.ref, dry_run=plan.dry_run)
            pushed = self._remote.push(plan.ref, new=plan.new, expect=plan.remote, dry_run=plan.dry_run)
        except PublishError as failure:
            if failure.failure not in UNCERTAIN:
                self._forget(plan.ref)
            raise
        if pushed is Pushed.MOVED:
            self._forget(plan.ref)
        if pushed is Pushed.DONE:
            self._checked = True
            self._progress("settle", 0, len(plan.commits))
        return pushed

    def _forget(self, ref: str) -> None:
        """What was not pushed is built anew; `tidy` removes what this cannot."""
        with suppress(PublishError):
            self._site.update((ref, None, None))

    def adopt(self, plan: Plan, known: dict[str, Entry | None] | None) -> None:
        """Bring the local side up to what was pushed. Never fails once the posts are on the remote.

        But for AwayError: what their next saves start from has to be kept before they are settled.
        What a dry run commits is nowhere but on the local branch: raises PublishError where it is not.
        """
        try:
            self._follower.adopt(plan, known)
        except AwayError:
            raise
        except (PublishError, OSError) as error:
            if plan.dry_run and not self._site.is_ancestor(plan.new, self._site.tips().local):
                self._forget(plan.ref)
                text = f"{self._site.branch} was changed by somebody during a dry run; it is tried again"
                raise PublishError(Failure.LOST_RACE, text) from error
            # The posts are on the remote. The next adoption brings the local side up to it.
            if isinstance(error, OSError) or error.failure not in _FOR_A_PERSON:
                self._late.append(plan)
            self._warn(str(error))

    def _take_over(self, ground: Ground) -> Tips:
        """Nothing to push; but what came from the remote is here now, too."""
        if ground.base == ground.tips.local:
            return ground.tips
        ref = self._site.fetched_ref
        plan = Plan(ground.tips.local, ground.base, ref, {}, {}, dry_run=False, remote=ground.base)
        self.adopt(plan, None)
        return Tips(ground.base, ground.base)

    def _adopt_flushed(self, plan: Plan, dry: str) -> None:
        if plan.new != dry or plan.old == dry:
            self.adopt(plan, {} if plan.new == plan.old else None)
            return
        # A person has committed on top of it: the branch is ahead, and stays where it is.
        self._site.update(
            (self._site.tracking_ref, plan.new, None),
            (self._site.dry_run_ref, None, None),
            (plan.ref, None, None),
        )

    def _unchanged(self, built: Built) -> tuple[list[Item], list[Item]]:
        """Unchanged items whose content this push carries to the remote, and those that it has already."""
        items = [item for item in built.unchanged if item.key]
        if not items or self._lacked == built.tip:
            return [], items
        lacked = None if self._lacked is None else self._objects.tree(self._lacked)
        now = self._objects.tree(built.tip)
        carried: list[Item] = []
        same: list[Item] = []
        for item in items:
            new = any(
                (lacked.entry(each.path) if lacked else None) != now.entry(each.path) for each in item.changes
            )
            (carried if new else same).append(item)
        return carried, same

    def _nothing_to_do(self, items: Sequence[Item], ground: Ground, built: Built) -> list[Outcome]:
        """Unchanged; but it may have been our own push, whose answer was lost, that brought it there."""
        self._follower.unchanged(items, built.tip)
        since = self._follower.since or ground.since or ground.tips.local
        return [
            Outcome(
                item.key,
                self._building.landed_as(item, since, built.base) if built.base != since else None,
                rejected_paths=item.rejected,
            )
            for item in items
        ]

    def _catch_up(self, tips: Tips) -> Ground:
        """The remote is not where we thought: fetch it, and see what to build on."""
        theirs = self._remote.fetch()
        rewritten = tips.remote is not None and not self._site.is_ancestor(tips.remote, theirs)
        self._follower.take_over(tips, theirs, rewritten=rewritten)
        self._lacked = theirs
        self._checked = True
        since = tips.local
        tips, landed = self.adopt_landed(tips, theirs)
        moved = Tips(tips.local, theirs)
        if self._site.is_ancestor(theirs, tips.local):
            return Ground(moved, tips.local, landed=landed, since=since)
        if self._site.is_ancestor(tips.local, theirs):
            return Ground(moved, theirs, landed=landed, since=since)
        along = tuple(self._building.of_dry_runs(tips.local, theirs))
        return Ground(moved, theirs, along, landed, since)

    def adopt_landed(self, tips: Tips, theirs: str) -> tuple[Tips, Mapping[str, str | None]]:
        """Pushes of ours whose answers were lost have left private refs: adopt those that the remote has.

        Else the author's next edit would be held against our own commit, as if somebody else had made it.
        """
        landed: dict[str, str | None] = {}
        for ref, sha in self._site.batches_within(theirs):
            if sha == tips.local or not self._site.is_ancestor(tips.local, sha):
                continue
            staged = self._building.landed_versions(tips.local, sha)
            self.adopt(Plan(tips.local, sha, ref, {}, staged, dry_run=False, remote=sha), None)
            landed |= staged
            tips = Tips(sha, tips.remote)
        return tips, landed

    def _cannot_go_along(self, paths: Sequence[str]) -> None:
        raise PublishError(
            Failure.DIVERGED,
            f"the remote changed {', '.join(paths)} in the same lines as a dry run's commit. Fix: git reset "
            f"--keep {self._site.remote}/{self._site.branch} drops what dry runs committed; save them again",
        )


def _private_ref() -> str:
    return f"{PRIVATE}/{uuid.uuid4().hex}"


def _lost_race() -> PublishError:
    return PublishError(
        Failure.LOST_RACE, f"others pushed {_RACES} times while this was being pushed; it is tried again"
    )


def _is_plain(plan: Plan, built: Built) -> bool:
    """Whether all that the plan changes is what the work tree has already: nothing came from elsewhere."""
    return built.base == plan.old and all(
        plan.staged.get(path) == (entry.sha if entry else None) for path, entry in built.entries.items()
    )
