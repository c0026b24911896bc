"""Where a publisher stands: the CMS's own repository, or a cache that may be lost at any time.

One publisher serves both engines; this is all in which they differ. `WorkTree` is the disk engine's: it reads
the files that the CMS has written there, and takes over what was pushed. The cluster's is `cache.CachePlace`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from briter_worker.errors import Failure, PublishError
from briter_worker.git.adopt import Adoption
from briter_worker.git.bases import KeptVersions
from briter_worker.git.objects import Objects
from briter_worker.git.pending import has_late_index
from briter_worker.git.site import Site
from briter_worker.git.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from briter_worker.git.bases import Versions
    from briter_worker.git.building import Building, Item
    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Entry, Tree
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Tips
    from briter_worker.ports import Change, Plan, Request, Staged


class Follower(Protocol):
    """What happens here once the remote has something: within one publication."""

    versions: Versions
    is_lasting: bool
    """Whether commits and refs that are only here can be relied on."""
    here: str
    """What this repository is called to a person."""
    source: str
    """Where a post still is that cannot be kept elsewhere, to a person."""

    @property
    def since(self) -> str | None:
        """Where the branch was when all of this began; None where the branch here still is there."""
        ...

    def adopt(self, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:
        """Bring this side up to `plan.new`. `known`: all that it changes, where nothing came from elsewhere.

        May be done twice. Raises PublishError and OSError when something could not be done; AwayError when
        that has to be done before anything of the plan is settled.
        """
        ...

    def take_over(self, tips: Tips, theirs: str, *, rewritten: bool) -> None:
        """The remote is at `theirs`.

        `rewritten`: it does not contain any more what it had. Raises PublishError where that is a person's to
        mend, or all is to be read anew.
        """
        ...

    def unchanged(self, items: Sequence[Item], tip: str) -> None:
        """The remote's `tip` has these already, as they are or as they were merged."""
        ...

    def landed(self, items: Sequence[Item], tip: str, building: Building) -> Mapping[str, str | None]:
        """What of ours these items turn out to be edits of, by path, as `tip` has it."""
        ...


class Place(Protocol):
    """One site's repository, and how posts come into it."""

    site: Site

    def make_way(self) -> None:
        """Something is to be published: be ready for it."""
        ...

    def mend(self, objects: Objects) -> None:
        """Within a publication, before anything is read: finish what an earlier one could not."""
        ...

    def bring(self, requests: Sequence[Request], objects: Objects, tip: str) -> None:
        """The requests' files are in the work tree."""
        ...

    def based(self, staged: Mapping[str, Staged], objects: Objects, tree: Tree) -> Mapping[str, Staged]:
        """The same, each change as an edit of what its author started from."""
        ...

    def follower(self, objects: Objects) -> Follower:
        """What follows a push."""
        ...

    def landed(self, plan: Plan, remote: Remote) -> bool:
        """Whether the remote has what the plan was pushing. Raises PublishError while that is not certain."""
        ...

    def renewed(self, failure: PublishError | OSError) -> bool:
        """Whether what failed has been replaced, so that it is worth another try at once."""
        ...

    def tidy(self, now: float, adopt_late: Callable[[], None]) -> None:
        """Remove what dead workers and old batches left; finish what is late."""
        ...

    def rest(self) -> None:
        """Nothing is to be published: housekeeping may begin."""
        ...

    def close(self, stopping: Callable[[], bool], wait: float) -> None:
        """Leave nothing running; housekeeping that was begun may take this long to end by itself."""
        ...


class WorkTree:
    """The CMS's own repository."""

    def __init__(self, commands: Commands, *, branch: str, remote: str) -> None:
        self.site = Site(commands, branch=branch, remote=remote)
        self._commands = commands
        self._upkeep = Upkeep(commands)

    def make_way(self) -> None:
        """See `Place`."""
        self._upkeep.make_way()

    def mend(self, objects: Objects) -> None:
        """See `Place`."""
        with suppress(PublishError):  # whoever holds the index still does; this publication needs none
            adoption = Adoption(self.site, objects)
            adoption.heal()
            adoption.forget_given_up()

    def bring(self, requests: Sequence[Request], objects: Objects, tip: str) -> None:
        """Nothing: the CMS has written them."""

    def based(self, staged: Mapping[str, Staged], objects: Objects, tree: Tree) -> Mapping[str, Staged]:  # noqa: ARG002
        """See `Place`."""
        bases = KeptVersions(self.site, objects).bases(changed_paths(staged))

        def based(change: Change) -> Change:
            base = bases.get(change.path)
            return change if base is None else replace(change, base=base.of(change.blob), base_mode="")

        if not bases:
            return staged
        return {key: replace(each, changes=tuple(map(based, each.changes))) for key, each in staged.items()}

    def follower(self, objects: Objects) -> Follower:
        """See `Place`."""
        return Taking(self.site, objects)

    def landed(self, plan: Plan, remote: Remote) -> bool:
        """See `Place`."""
        if plan.dry_run:
            # A person may have committed on top of it meanwhile.
            return self.site.is_ancestor(plan.new, self.site.tips().local)
        if plan.commits and plan.old != plan.new == self.site.tips().local:
            # The branch moves here only after the push. The index has to follow, whether the remote is there
            # or not: it is held no longer than this.
            return True
        with suppress(PublishError), Objects(self._commands) as objects:
            # Another of the dead worker's plans may have moved it, and the remote may not be there for long.
            Adoption(self.site, objects).heal()
        tip = remote.tip()
        if tip is None or tip == plan.new:
            return tip is not None
        return self.site.is_ancestor(plan.new, remote.fetch())

    def renewed(self, failure: PublishError | OSError) -> bool:  # noqa: ARG002
        """Never: what is broken here is a person's to mend."""
        return False

    def tidy(self, now: float, adopt_late: Callable[[], None]) -> None:
        """See `Place`."""
        self.site.tidy(now)
        adopt_late()
        if has_late_index(self._commands.worktree, self.site.branch):
            # Marked as at work: the lock of the index, if we die here, is known for ours by that.
            with self.site.finishing(), Objects(self._commands) as objects:
                Adoption(self.site, objects).heal()

    def rest(self) -> None:
        """See `Place`."""
        self._upkeep.begin()

    def close(self, stopping: Callable[[], bool], wait: float) -> None:
        """See `Place`."""
        self._upkeep.finish(stopping, wait)


class Taking(Adoption):
    """Brings the CMS's repository up to what was pushed: branch, index and files."""

    is_lasting = True
    here = "this repository"
    source = "in the work tree"
    since: str | None = None

    def __init__(self, site: Site, objects: Objects) -> None:
        super().__init__(site, objects)
        self.versions: Versions = KeptVersions(site, objects)

    def take_over(self, tips: Tips, theirs: str, *, rewritten: bool) -> None:  # noqa: ARG002
        """See `Follower`. Commits of a person's may be on the branch: they are to be looked at."""
        if rewritten:
            branch = self._site.branch
            raise PublishError(
                Failure.REMOTE_REWRITTEN,
                f"the remote's {branch} no longer contains what it had ({str(tips.remote)[:10]}). Fix: git "
                f"push it again; or git fetch && git reset --keep {self._site.remote}/{branch}",
            )

    def unchanged(self, items: Sequence[Item], tip: str) -> None:
        """Nothing: the branch has them, too."""

    def landed(
        self,
        items: Sequence[Item],  # noqa: ARG002
        tip: str,  # noqa: ARG002
        building: Building,  # noqa: ARG002
    ) -> Mapping[str, str | None]:
        """Nothing more than what the push's own ref tells, which is here."""
        return {}


def changed_paths(staged: Mapping[str, Staged]) -> Collection[str]:
    """Every path that these change."""
    return {change.path for each in staged.values() for change in each.changes}
