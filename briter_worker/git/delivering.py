"""Publishes what jobs brought along, from a cache: what the publisher has to know of that place.

`open_publisher` is all that the cluster's engine needs besides `cache.open_cache`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.cache import REMOTE
from briter_worker.git.following import Following, MovedError
from briter_worker.git.lineage import Lineage
from briter_worker.git.publisher import GitPublisher
from briter_worker.git.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.bases import StoredVersions
    from briter_worker.git.cache import Cache
    from briter_worker.git.commits import Person
    from briter_worker.git.objects import Objects, Tree
    from briter_worker.git.place import Follower
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Site
    from briter_worker.ports import Deliveries, Plan, Request, Staged

_RACES = 5
_BROKEN = frozenset(
    {
        Failure.CORRUPT,
        Failure.NOT_A_REPOSITORY,
        Failure.LOCKED,
        Failure.WRONG_BRANCH,
        Failure.UNFINISHED,
        Failure.OWNERSHIP,
    }
)
"""What only the cache itself may be to blame for."""


class CachePlace:
    """See `place.Place`: posts come with their jobs, and what is pushed is only followed."""

    def __init__(
        self,
        cache: Cache,
        *,
        deliveries: Deliveries,
        versions: StoredVersions,
        allowlist: Allowlist,
        identity: Person,
        max_file_bytes: int,
        dry_run: bool,
        warn: Callable[[str], None],
    ) -> None:
        self.site: Site = cache.site
        self._cache = cache
        self._versions = versions
        self._deliveries = deliveries
        self._scratch = Scratch(
            cache.commands,
            deliveries=deliveries,
            versions=versions,
            allowlist=allowlist,
            max_file_bytes=max_file_bytes,
        )
        self._identity = identity
        self._dry_run = dry_run
        self._warn = warn
        self._moves = 0

    def make_way(self) -> None:
        """See `Place`."""
        self._cache.be_ready()

    def mend(self, objects: Objects) -> None:
        """Nothing: it is never late here."""

    def _kept(self, blob: str) -> bytes | None:
        content = self._versions.content(blob)
        if content is None:
            with suppress(LookupError):
                content = b"".join(self._deliveries.content(blob))
        return content

    def bring(self, requests: Sequence[Request], objects: Objects, tip: str) -> None:
        """See `Place`."""
        self._scratch.bring(requests, objects.tree(tip), objects)

    def based(self, staged: Mapping[str, Staged], objects: Objects, tree: Tree) -> Mapping[str, Staged]:  # noqa: ARG002
        """See `Place`."""
        return self._scratch.based(staged, tree)

    def follower(self, objects: Objects) -> Follower:
        """See `Place`. What a file started from may be in the database alone."""
        objects.elsewhere = self._kept
        lineage = Lineage(self._cache, self._identity)
        return Following(
            self._cache, objects, lineage, versions=self._versions, dry_run=self._dry_run, warn=self._warn
        )

    def landed(self, plan: Plan, remote: Remote) -> bool:
        """See `Place`. What a plan stands on is on the remote: beyond that need nobody look."""
        if plan.dry_run:
            return False  # it left nothing that could be adopted
        theirs = remote.fetch()
        more = iter((50, 1000, 10_000, None))
        while not (found := self.site.is_ancestor(plan.new, theirs)) and not self._ends_within(plan):
            theirs = self._cache.deepen(next(more)) or theirs
        self._cache.move_to(theirs)
        return found

    def _ends_within(self, plan: Plan) -> bool:
        """Whether all that is not here of the history was there before the plan was made."""
        boundary = self._cache.boundary()
        before = plan.remote or plan.old
        status, out, _ = self.site.commands.attempt(
            "rev-list", "--max-count=1", "--stdin", stdin="\n".join([*boundary, f"^{before}", ""]).encode()
        )
        return not boundary or (status == 0 and not out.strip())

    def renewed(self, failure: PublishError | OSError) -> bool:
        """See `Place`: one that is broken is cloned anew, and one that has just followed the remote is up."""
        if isinstance(failure, MovedError):
            self._moves += 1
            return self._moves <= _RACES
        broken = isinstance(failure, PublishError) and failure.failure in _BROKEN
        return (broken or not self._cache.is_there()) and self._cache.renew()

    def tidy(self, now: float, adopt_late: Callable[[], None]) -> None:
        """Nothing: the whole cache is thrown away when it has grown too large."""

    def rest(self) -> None:
        """Nothing, as above."""

    def close(self, stopping: Callable[[], bool], wait: float) -> None:  # noqa: ARG002
        """The posts' files do not lie about."""
        self._scratch.empty()


def open_publisher(
    cache: Cache,
    *,
    deliveries: Deliveries,
    versions: StoredVersions,
    allowlist: Allowlist,
    identity: Person,
    max_file_bytes: int,
    dry_run: bool,
    progress: Callable[[str, int, int], None],
    warn: Callable[[str], None],
    still_ours: Callable[[], bool],
) -> GitPublisher:
    """Publishes one drain's jobs from the cache: contents from `deliveries`, bases from `versions`."""
    place = CachePlace(
        cache,
        deliveries=deliveries,
        versions=versions,
        allowlist=allowlist,
        identity=identity,
        max_file_bytes=max_file_bytes,
        dry_run=dry_run,
        warn=warn,
    )
    return GitPublisher(
        cache.commands,
        branch=cache.site.branch,
        remote=REMOTE,
        allowlist=allowlist,
        identity=identity,
        max_file_bytes=max_file_bytes,
        dry_run=dry_run,
        progress=progress,
        warn=warn,
        still_ours=still_ours,
        place=place,
    )
