"""What a push stands on: where the branch is here and there, and what of ours has to come along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.building import Item
    from briter_worker.git.site import Tips


@dataclass(frozen=True, slots=True)
class Ground:
    """What the next push stands on."""

    tips: Tips
    base: str
    """The commit to build on."""
    along: tuple[Item, ...] = ()
    """Dry runs' commits that have to be put on it first."""
    landed: Mapping[str, str | None] = field(default_factory=dict)
    """What of ours turned out to be on the remote: the versions that later saves are edits of."""
    since: str = ""
    """Where the local branch was before that; empty where it has not moved."""
