"""What dry runs have committed and the live remote rejects: left out, one by one, and kept.

There is no job any more that could fail for it, and it must not hold up the posts that come after it.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.differences import between
from briter_worker.git.refs import PRIVATE
from briter_worker.git.remote import Pushed
from briter_worker.git.site import Tips
from briter_worker.ports import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.git.building import Building, Item
    from briter_worker.git.objects import Entry, Objects
    from briter_worker.git.site import Site

REJECTED = f"{PRIVATE}/rejected"
"""Below, by its commit, what was left out."""


class Rejection:
    """Finds the first commit of dry runs that the remote rejects, and takes it off the local branch."""

    def __init__(
        self,
        site: Site,
        objects: Objects,
        building: Building,
        *,
        push: Callable[[Plan], Pushed],
        adopt: Callable[[Plan, dict[str, Entry | None]], None],
        warn: Callable[[str], None],
    ) -> None:
        self._site = site
        self._objects = objects
        self._building = building
        self._push = push
        self._adopt = adopt
        self._warn = warn

    def leave_out_first(self, tips: Tips, failure: PublishError) -> Tips:
        """The tips without it: those before it are on the remote, those after it are the branch's.

        `tips.local` is the dry runs' last commit, and stands on `tips.remote`. The files in the work tree
        stay as they are. Raises PublishError where commits of a person's are among them: only that person may
        rewrite those.
        """
        mine = self._building.dry_runs_between(tips)
        if not mine or tips.remote is None:
            raise blocked(self._site, tips.local, failure)
        pushed, rejected, at = 0, len(mine), tips.remote
        while rejected - pushed > 1:
            middle = (pushed + rejected) // 2
            sha = mine[middle - 1][0]
            try:
                self._put(sha, at)
            except PublishError as refusal:
                if refusal.failure is not Failure.REJECTED:
                    raise
                rejected, failure = middle, refusal
            else:
                pushed, at = middle, sha
        sha, item = mine[rejected - 1]
        kept = f"{REJECTED}/{sha}"
        self._site.update((kept, sha, None))
        left = self._without(item, [each for _, each in mine[rejected:]], tips.local, at)
        title = item.message.partition(b"\n")[0].decode(errors="replace")
        self._warn(
            f"what a dry run committed as {title!r} is left out, as the remote does not take it. Its files "
            f"stay in the work tree, the commit at {kept}. {failure.text}"
        )
        return Tips(left, at)

    def _put(self, sha: str, at: str) -> None:
        """The remote has everything up to this commit."""
        ref = f"{PRIVATE}/{uuid.uuid4().hex}"
        self._site.update((ref, sha, None))
        if self._push(Plan(sha, sha, ref, {}, {}, dry_run=False, remote=at)) is Pushed.MOVED:
            raise PublishError(Failure.LOST_RACE, "somebody else pushed meanwhile; it is tried again")
        self._site.update((self._site.tracking_ref, sha, None), (ref, None, None))

    def _without(self, rejected: Item, later: Sequence[Item], local: str, at: str) -> str:
        """The local branch, with the later commits on `at`."""
        # A later save of the same post is all of the post: it is no edit of what is left out.
        before = {each.path: self._building.blob(at, each.path) for each in rejected.changes}
        ref = f"{PRIVATE}/{uuid.uuid4().hex}"
        built = self._building.build([item.based_on(before) for item in later], at, ref)
        if built.conflicts:
            paths = ", ".join(built.conflicts[0][1])
            raise PublishError(
                Failure.REMOTE_REFUSED,
                f"what dry runs committed stands on what the remote rejects: {paths}. "
                f"Fix: git reset --keep {self._site.remote}/{self._site.branch}, and save those posts again",
            )
        if built.tip == at:
            self._site.update((ref, at, None))
        plan = Plan(local, built.tip, ref, {}, {}, dry_run=True, remote=at)
        differences = between(self._site.commands, local, built.tip)
        # All known: nothing came from the remote, so that no file is touched.
        self._adopt(plan, {path: each.new for path, each in differences.items()})
        return built.tip


def blocked(site: Site, commit: str, failure: PublishError) -> PublishError:
    """The remote rejects what only a person may take back."""
    return PublishError(
        Failure.REMOTE_REFUSED,
        f"the remote does not take what was committed here ({commit[:10]} or below), and commits of a "
        f"person's are among it. Fix: briter-worker pause; commit or put aside what is changed here; "
        f"git rebase -i {site.remote}/{site.branch}, and drop what it rejects; briter-worker resume, "
        f"and save that post again. {failure.text}",
    )
