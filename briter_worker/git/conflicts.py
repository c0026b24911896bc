"""A post that conflicts with the remote: both versions are kept, and the post fails alone."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError
from briter_worker.git.bases import Base, Conflict, read_bases, write_bases
from briter_worker.git.refs import PRIVATE
from briter_worker.ports import Change, Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.git.building import Building, Item
    from briter_worker.git.objects import Objects
    from briter_worker.git.remote import Remote
    from briter_worker.git.site import Site


_LONGEST = 100
"""Bytes of a slug in a branch's name: a file's name, here and on the remote, has at most 255."""


class Conflicts:
    """Keeps the versions of posts that conflict, within one batch."""

    def __init__(
        self, site: Site, remote: Remote, objects: Objects, building: Building, *, dry_run: bool
    ) -> None:
        self._site = site
        self._remote = remote
        self._objects = objects
        self._building = building
        self._dry_run = dry_run

    def settle(self, item: Item, paths: Sequence[str], *, local: str, theirs: str) -> Outcome:
        """The post's failure, once its version is on a branch of its own and both are remembered."""
        try:
            where = self._keep(item, local)
        except PublishError as failure:  # what cannot be kept elsewhere is still in the work tree
            where = f"in the work tree alone ({failure.text})"
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
            return f"on the branch {self._site.branch} of this repository"
        for branch in (name, f"{name}-{built.tip[:8]}"):
            if self._remote.keep(ref, branch, dry_run=self._dry_run):
                if self._dry_run:
                    break
                self._site.update((ref, None, None))
                return f"on the branch {branch} of the remote"
        return f"on the local ref {ref}"

    def _remember(self, item: Item, paths: Sequence[str], theirs: str) -> None:
        bases = read_bases(self._site, self._objects)
        changes = {change.path: change for change in item.changes}
        for path in paths:
            known = bases.get(path)
            start = known.start if known else changes[path].base
            bases[path] = Base(start, Conflict(changes[path].blob, self._building.blob(theirs, path)))
        self._site.update((self._site.bases_ref, write_bases(self._site.commands, bases), None))


def _branch_name(slug: str) -> str:
    """A slug as part of a branch's name: what git does not take becomes a dash."""
    name = re.sub(r"[^\w/.-]+|\.\.+|/\.+|//+|@\{", "-", slug).strip("/.-")
    name = re.sub(r"\.lock(?=/|$)", "-lock", name).encode()[:_LONGEST].decode(errors="ignore")
    return name.rstrip("/.-") or "post"
