"""Plans and open conflicts of the disk backend: files below `.git/briter/`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

from briter_worker.errors import FailureCode, PublishError
from briter_worker.ports import BaseVersion, Conflict, Plan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

_OBJECT_ID = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")


def _branch_folder(state_dir: Path, branch: str) -> Path:
    """Return the folder of one branch's state: linked work trees share `state_dir`, but no branch."""
    return state_dir / hashlib.sha256(branch.encode(errors="surrogateescape")).hexdigest()[:16]


class FilePlans:
    """Store each plan in a file of its own. Implements `ports.PlanStore`."""

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._folder = _branch_folder(state_dir, branch) / "plans"

    def record(self, plan: Plan) -> None:
        """Store the plan durably."""
        _write(self._folder / f"{plan.id}.json", plan._asdict())

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first. Raises PublishError for a file that is not a plan."""
        try:
            files = sorted((file.stat().st_mtime_ns, file) for file in self._folder.glob("*.json"))
        except OSError as error:
            raise PublishError.from_os("the plans of earlier pushes cannot be read", error) from error
        return [_read_plan(file) for _, file in files]

    def drop(self, plan: Plan) -> None:
        """Delete the plan durably."""
        try:
            (self._folder / f"{plan.id}.json").unlink(missing_ok=True)
            _sync_folder(self._folder)
        except OSError as error:
            raise PublishError.from_os("the plan of a push cannot be deleted", error) from error


class FileConflicts:
    """Remember the conflicts that are open. Implements `ports.BaseVersions` beside the checkout.

    The checkout remembers every other base version, so a version without a conflict is forgotten here.
    """

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._file = _branch_folder(state_dir, branch) / "conflicts.json"

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return the base versions of those paths that have an open conflict."""
        known = self._read()
        return {path: known[path] for path in paths if path in known} if known else known

    def remember(self, versions: Mapping[str, BaseVersion], contents: Mapping[str, bytes]) -> None:  # noqa: ARG002 - the repository has the contents
        """Store the versions that have a conflict, and forget those of the other paths."""
        before = self._read()
        after = {path: base for path, base in {**before, **versions}.items() if base.conflict is not None}
        if after != before:
            _write(
                self._file,
                {path: _to_json(base) for path, base in after.items()},
            )

    def _read(self) -> Mapping[str, BaseVersion]:
        try:
            found = {
                path: BaseVersion(each["blob"], Conflict(**each["conflict"]))
                for path, each in _read(self._file).items()
            }
            for base in found.values():
                _check_ids((base.blob, base.conflict.ours, base.conflict.theirs) if base.conflict else ())
        except FileNotFoundError:
            return {}
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise _damaged(self._file) from error
        return found


def _to_json(base: BaseVersion) -> dict[str, Any]:
    return {"blob": base.blob, "conflict": base.conflict and base.conflict._asdict()}


def _read_plan(file: Path) -> Plan:
    try:
        plan = Plan(**_read(file))
        _check_ids((plan.tip, plan.base, *plan.commits.values(), *plan.blobs.values()))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(file) from error
    return plan


def _check_ids(values: Iterable[str | None]) -> None:
    for value in values:
        if value is not None and not _OBJECT_ID.fullmatch(value):
            raise ValueError(value)


def _damaged(file: Path) -> PublishError:
    return PublishError(
        FailureCode.CORRUPT,
        f"{file} is damaged",
        f"compare the remote's last commits with the posts that wait, then: rm {file}",
    )


def _read(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises ValueError for anything else, and FileNotFoundError."""
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PublishError.from_os("the state of earlier pushes cannot be read", error) from error
    return dict(document)


def _write(file: Path, document: dict[str, Any]) -> None:
    """Replace the file durably. Raises PublishError."""
    partial = file.with_name("new.tmp")  # one name: what a dead worker left is replaced
    try:
        if not file.parent.is_dir():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (file.parent.parent, file.parent.parent.parent):
                _sync_folder(folder)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:  # noqa: PTH123 - with a mode
            handle.write(json.dumps(document).encode())
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
        _sync_folder(file.parent)
    except OSError as error:
        raise PublishError.from_os("the plan of a push cannot be stored", error) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
