"""A post that conflicts with the remote: both versions are kept, and the post fails alone."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.bases import Base, Conflict
from briter_worker.git.refs import PRIVATE
from briter_worker.ports import Change, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.git.building import Building, Item
    from briter_worker.git.place import Follower
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Site


_LONGEST = 100
"""Bytes of a slug in a branch's name: a file's name, here and on the remote, has at most 255."""


class Conflicts:
    """Keeps the versions of posts that conflict, within one batch."""

    def __init__(
        self, site: Site, remote: Remote, follower: Follower, building: Building, *, dry_run: bool
    ) -> None:
        self._site = site
        self._remote = remote
        self._follower = follower
        self._building = building
        self._dry_run = dry_run

    def settle(self, item: Item, paths: Sequence[str], *, local: str, theirs: str) -> Outcome:
        """The post's failure, once its version is on a branch of its own and both are remembered."""
        try:
            where = self._keep(item, local)
        except PublishError as failure:  # what cannot be kept elsewhere is still in the work tree
            where = f"{self._follower.source} alone ({failure.text})"
        self._remember(item, paths, theirs)
        return Outcome(
            item.key,
            failure=Failure.CONFLICT,
            text=f"the remote changed {', '.join(paths)} in the same lines. Both versions are kept, "
            f"the post's {where}. Fix: take the remote's changes over into the post, and save it again",
            rejected_paths=item.rejected,
        )

    def _keep(self, item: Item, local: str) -> str:
        """Where the post's version is, as one commit on the version it started from."""
        name = f"conflict/{_branch_name(item.slug)}"
        ref = f"{PRIVATE}/{name}-{uuid.uuid4().hex[:8]}"
        alone = tuple(
            Change(each.path, each.mode, each.blob, self._building.blob(local, each.path))
            for each in item.changes
        )
        built = self._building.build([replace(item, changes=alone)], local, ref)
        if not built.commits:
            return f"on the branch {self._site.branch} of {self._follower.here}"
        for branch in (name, f"{name}-{built.tip[:8]}"):
            if self._remote.keep(ref, branch, dry_run=self._dry_run):
                if self._dry_run:
                    break
                self._site.update((ref, None, None))
                return f"on the branch {branch} of the remote"
        if self._follower.is_lasting:
            return f"on the local ref {ref}"
        self._site.update((ref, None, None))
        return self._follower.source

    def _remember(self, item: Item, paths: Sequence[str], theirs: str) -> None:
        known = self._follower.versions.bases(paths)
        changes = {change.path: change for change in item.changes}
        found: dict[str, Base] = {}
        for path in paths:
            start = known[path].start if path in known else changes[path].base
            found[path] = Base(start, Conflict(changes[path].blob, self._building.blob(theirs, path)))
        self._follower.versions.remember(found, {})


def _branch_name(slug: str) -> str:
    """A slug as part of a branch's name: what git does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/\.+|//+|@\{", "-", slug).strip("/.-")
    name = re.sub(r"\.lock(?=/|$)", "-lock", name).encode()[:_LONGEST].decode(errors="ignore")
    return name.rstrip("/.-") or "post"
