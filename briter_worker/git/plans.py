"""The disk backend's memory between two drains, below `.git/briter/`: plans of pushes, open conflicts."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from briter_worker.errors import FailureCode, PublishError, sync_folder
from briter_worker.ports import BaseVersion, Conflict, Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path


class FilePlans:
    """Store each plan of the disk backend in a file below `.git/briter/`. Implements `ports.PlanStore`."""

    def __init__(self, state_dir: Path, branch: str, folder: str = "plans") -> None:
        self._folder = _branch_folder(state_dir, branch) / folder

    def record(self, plan: Plan) -> None:
        """Store the plan durably."""
        _write(self._folder / f"{plan.id}.json", plan)

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first. Raises OSError, and PublishError for a damaged file."""
        files = sorted((file.stat().st_mtime_ns, file) for file in self._folder.glob("*.json"))
        return [Plan(*_read(file)) for _, file in files]

    def drop(self, plan: Plan) -> None:
        """Delete the plan durably. Raises OSError."""
        with suppress(FileNotFoundError):
            (self._folder / f"{plan.id}.json").unlink()
            sync_folder(self._folder)

    def drop_before(self, at: float) -> None:
        """Delete the plans that were recorded before."""
        for file in self._folder.glob("*.json"):
            if file.stat().st_mtime < at:
                file.unlink()


class FileConflicts:
    """Remember the conflicts that are open. Implements `ports.BaseVersions` beside the checkout.

    The checkout remembers every other base version, so a version without a conflict is forgotten here.
    """

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._file = _branch_folder(state_dir, branch) / "conflicts.json"

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return the base versions of those paths that have an open conflict."""
        known = _read(self._file) if self._file.exists() else {}
        return {
            path: BaseVersion(blob, {slug: Conflict(*each) for slug, each in conflicts.items()})
            for path, (blob, conflicts) in known.items()
            if path in paths
        }

    def remember(
        self,
        versions: Mapping[str, BaseVersion],
        contents: Mapping[str, bytes],  # noqa: ARG002 - the repository has them
        tip: str | None = None,  # noqa: ARG002 - as the contents
    ) -> None:
        """Store the versions that have a conflict, and forget those of the other paths."""
        known = _read(self._file) if self._file.exists() else {}
        both = {**known, **{path: (base.blob, dict(base.conflicts)) for path, base in versions.items()}}
        _write(self._file, {path: each for path, each in both.items() if each[1]})


def _branch_folder(state_dir: Path, branch: str) -> Path:
    """Return the folder of one branch's state: linked work trees share `state_dir`, but no branch."""
    return state_dir / hashlib.sha256(branch.encode(errors="surrogateescape")).hexdigest()[:16]


def _read(file: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise PublishError.from_os("the state of earlier pushes cannot be read", error) from error
    except ValueError as error:
        raise PublishError(
            FailureCode.CORRUPT,
            f"{file} is damaged",
            f"compare the remote's last commits with the posts that wait, then: rm {file}",
        ) from error


def _write(file: Path, document: object) -> None:
    """Replace the file durably. Raises PublishError."""
    partial = file.with_name("new.tmp")  # one name: what a dead worker left is replaced
    try:
        if not file.parent.is_dir():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (file.parent.parent, file.parent.parent.parent):
                sync_folder(folder)
        with partial.open("w") as handle:
            handle.write(json.dumps(document))
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        raise PublishError.from_os("the plan of a push cannot be stored", error) from error
