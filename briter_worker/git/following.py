"""After the push, in a cache: its branch follows the remote's, and nothing else moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.errors import AwayError, Failure, PublishError
from briter_worker.git.bases import Base

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.git.bases import Versions
    from briter_worker.git.building import Building, Item
    from briter_worker.git.cache import Cache
    from briter_worker.git.lineage import Lineage
    from briter_worker.git.objects import Entry, Objects
    from briter_worker.git.site import Tips
    from briter_worker.ports import Plan


class MovedError(PublishError):
    """The remote has moved, and the cache with it: what waits is to be read and built anew."""

    def __init__(self) -> None:
        super().__init__(
            Failure.LOST_RACE, "others pushed again and again while this was being pushed; it is tried again"
        )


class Following:
    """See `place.Follower`. A dry run moves nothing."""

    is_lasting = False
    here = "the remote"
    source = "with its job"

    @property
    def since(self) -> str | None:
        """See `Follower`."""
        return self._cache.since

    def __init__(
        self,
        cache: Cache,
        objects: Objects,
        lineage: Lineage,
        *,
        versions: Versions,
        dry_run: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.versions = versions
        self._cache = cache
        self._dry_run = dry_run
        self._site = cache.site
        self._objects = objects
        self._lineage = lineage
        self._warn = warn

    def adopt(self, plan: Plan, known: Mapping[str, Entry | None] | None) -> None:  # noqa: ARG002
        """See `Follower`. What was published is from now on what the CMS's copy of it started from."""
        site = self._site
        moves: list[tuple[str, str | None, str | None]] = []
        if not plan.dry_run:
            if site.ref(site.branch_ref) == plan.old != plan.new:
                moves.append((site.branch_ref, plan.new, None))
            if site.ref(site.branch_ref) == plan.old and site.ref(site.tracking_ref) != plan.new:
                moves.append((site.tracking_ref, plan.new, None))
        if site.ref(plan.ref) is not None:
            moves.append((plan.ref, None, None))
        try:
            if moves:
                site.update(*moves)
        finally:
            if plan.staged and not plan.dry_run:
                self._remember(plan.staged, plan.new)

    def _remember(self, staged: Mapping[str, str | None], tip: str) -> None:
        """What was merged on its way is not on the remote as its author has it: that is kept, too.

        Raises AwayError: then nothing of it may be settled yet.
        """
        contents: dict[str, bytes] = {}
        for path, blob in staged.items():
            if blob is not None and not self._is_there(blob, path, tip):
                try:
                    contents[blob] = self._objects.version(blob)
                except AwayError:
                    raise
                except (PublishError, OSError):
                    continue  # it is nowhere
        self.versions.remember({path: Base(blob) for path, blob in staged.items()}, contents)

    def _is_there(self, blob: str, path: str, tip: str) -> bool:
        """Whether the remote has this version. A cache that was lost since the push cannot tell."""
        try:
            entry = self._objects.tree(tip).entry(path)
        except (PublishError, OSError):
            return False
        return entry is not None and entry.sha == blob

    def take_over(self, tips: Tips, theirs: str, *, rewritten: bool) -> None:
        """See `Follower`. Nothing is here alone: the branch is where the remote's is, whatever that did.

        Raises MovedError: what was declared may stand for something else in what the branch has now.
        """
        if rewritten:
            self._warn(
                f"the remote's {self._site.branch} was rewritten: it no longer contains what it had "
                f"({str(tips.remote)[:10]}). Posts that were published may be missing there; the next ones "
                "are published upon what it has now"
            )
        self._cache.move_to(theirs)
        raise MovedError

    def unchanged(self, items: Sequence[Item], tip: str) -> None:
        """See `Follower`. What the CMS's copy of them is, is known from now on."""
        staged = {change.path: change.blob for item in items for change in item.changes}
        if staged and not self._dry_run:
            self._remember(staged, tip)

    def landed(self, items: Sequence[Item], tip: str, building: Building) -> Mapping[str, str | None]:
        """See `Follower`. It may have been another host that pushed it, and died before it could say so."""
        wanted: dict[str, str | None] = {}
        for item in items:
            for change in item.changes:
                there = building.blob(tip, change.path)
                if there not in (change.base, change.blob):
                    wanted[change.path] = change.base
        return self._lineage.versions_of_ours(wanted, tip) if wanted else {}
