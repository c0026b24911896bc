"""The versions that files in the work tree started from, where the branch has another version.

They lie below a ref of the worker's: they move together with the branch, and git keeps the blobs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from briter_worker.errors import FailureCode, PublishError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from briter_worker.git.repository import Move, Repository

_RECORD = "record.json"


@dataclass(frozen=True, slots=True)
class FileBase:
    """The version that a file in the work tree is an edit of. None stands for no file."""

    blob: str | None
    committed: str | None = None
    """The local branch's version at that time; valid if `is_unstaged`."""
    is_unstaged: bool = False
    """The index had no other version either: whatever is committed later is an edit of `blob`."""


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What the mirror has to remember between two drains."""

    late: str | None = None
    """The commit that the local branch could not be moved to."""
    reason: str = ""
    rebased: tuple[str, str] | None = None
    """A local commit that may be left for its rebased version, which is on the remote."""
    bases: Mapping[str, FileBase] = field(default_factory=dict)


class StateRef:
    """Stores the mirror's state below one ref."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._git = repository.git
        self.name = f"{repository.own_refs}/mirror"

    def read(self) -> MirrorState:
        """Return the stored state. Raises PublishError if the state is damaged."""
        tree = self._repository.ref(self.name)
        if tree is None:
            return MirrorState()
        try:
            document = json.loads(self._repository.blob(f"{tree}:{_RECORD}"))
            bases = {path: FileBase(*values) for path, values in document.pop("bases").items()}
            rebased = document.pop("rebased")
            return MirrorState(bases=bases, rebased=rebased and tuple(rebased), **document)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PublishError(
                FailureCode.CORRUPT, f"{self.name} is damaged: {error}", f"git update-ref -d {self.name}"
            ) from error

    def move_to(self, state: MirrorState) -> Move | None:
        """Store the state, and return the move of the ref that makes it count; None if it counts already."""
        now = self._repository.ref(self.name)
        new = None if state == MirrorState() else self._write(state)
        return None if new == now else (self.name, new, now or "")

    def save(self, state: MirrorState) -> None:
        """Store the state."""
        if move := self.move_to(state):
            self._repository.update_refs(move)

    def _write(self, state: MirrorState) -> str:
        document: dict[str, Any] = {
            "late": state.late,
            "reason": state.reason,
            "rebased": state.rebased,
            "bases": {path: [b.blob, b.committed, b.is_unstaged] for path, b in state.bases.items()},
        }
        content = json.dumps(document, sort_keys=True).encode()
        record = self._git.run("hash-object", "-w", "--stdin", "--no-filters", stdin=content).decode().strip()
        blobs = sorted({base.blob for base in state.bases.values() if base.blob})
        lines = [f"100644 blob {record}\t{_RECORD}\0"]
        lines += [f"100644 blob {blob}\t{blob}\0" for blob in self._existing(blobs)]
        return self._git.run("mktree", "-z", stdin="".join(lines).encode()).decode().strip()

    def _existing(self, blobs: list[str]) -> list[str]:
        if not blobs:
            return []
        stdin = "".join(f"{blob}\n" for blob in blobs).encode()
        out = self._git.run("cat-file", "--batch-check=%(objectname)", stdin=stdin).decode()
        return [line for line in out.splitlines() if " " not in line]
