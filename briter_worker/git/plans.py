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
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from briter_worker.job import Document

_OBJECT_ID = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_PLAN_ID = re.compile(r"[0-9a-f]{32}")
_PLANS = "plans"
_CONFLICTS = "conflicts.json"


def branch_folder(state_dir: Path, branch: str) -> Path:
    """Return the folder of one branch's state: linked work trees share `state_dir`, but no branch."""
    return state_dir / hashlib.sha256(branch.encode(errors="surrogateescape")).hexdigest()[:16]


class FilePlans:
    """Store each plan in a file of its own. Implements `ports.PlanStore`."""

    def __init__(self, state_dir: Path, branch: str) -> None:
        self._folder = branch_folder(state_dir, branch) / _PLANS

    def record(self, plan: Plan) -> None:
        """Store the plan durably."""
        document = {
            "base": plan.base,
            "tip": plan.tip,
            "commits": dict(plan.commits),
            "blobs": dict(plan.blobs),
        }
        _write(self._folder / f"{plan.id}.json", document)

    def plans(self) -> Sequence[Plan]:
        """Return the recorded plans, oldest first. Raises PublishError for a file that is not a plan."""
        try:
            files = [(file.stat().st_mtime_ns, file) for file in self._folder.glob("*.json")]
        except OSError as error:
            raise PublishError.from_os("the plans of earlier pushes cannot be read", error) from error
        return [_read_plan(file) for _, file in sorted(files)]

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
        self._file = branch_folder(state_dir, branch) / _CONFLICTS

    def bases(self, paths: Collection[str]) -> Mapping[str, BaseVersion]:
        """Return the base versions of those paths that have an open conflict."""
        known = self._read()
        return {path: known[path] for path in paths if path in known} if known else known

    def remember(self, versions: Mapping[str, BaseVersion], contents: Mapping[str, bytes]) -> None:  # noqa: ARG002 - the repository has the contents
        """Store the versions that have a conflict, and forget those of the other paths."""
        before = self._read()
        after = {path: base for path, base in {**before, **versions}.items() if base.conflict is not None}
        if after != before:
            _write(self._file, {path: _encode_base(base) for path, base in after.items()})

    def _read(self) -> Mapping[str, BaseVersion]:
        document = _read(self._file)
        try:
            return {path: _decode_base(each) for path, each in document.items()} if document else {}
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(self._file) from error


def _encode_base(base: BaseVersion) -> Document:
    conflict = base.conflict
    if conflict is None:
        return {"blob": base.blob}
    return {
        "blob": base.blob,
        "ours": conflict.ours,
        "theirs": conflict.theirs,
        "branch": conflict.branch,
        "commit": conflict.commit,
    }


def _decode_base(document: Any) -> BaseVersion:  # noqa: ANN401 - any JSON value
    conflict = Conflict(
        ours=_optional_id(document["ours"]),
        theirs=_optional_id(document["theirs"]),
        branch=str(document["branch"]),
        commit=_optional_id(document["commit"]),
    )
    return BaseVersion(_optional_id(document["blob"]), conflict)


def _read_plan(file: Path) -> Plan:
    document = _read(file) or {}
    try:
        return Plan(
            id=_matching(_PLAN_ID, file.stem),
            base=_optional_id(document["base"]),
            tip=_object_id(document["tip"]),
            commits={key: _object_id(commit) for key, commit in document["commits"].items()},
            blobs={path: _optional_id(blob) for path, blob in document["blobs"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(file) from error


def _matching(pattern: re.Pattern[str], value: Any) -> str:  # noqa: ANN401 - any JSON value
    if not pattern.fullmatch(value):
        raise ValueError(value)
    return str(value)


def _object_id(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return _matching(_OBJECT_ID, value)


def _optional_id(value: Any) -> str | None:  # noqa: ANN401 - any JSON value
    return None if value is None else _object_id(value)


def _damaged(file: Path) -> PublishError:
    return PublishError(
        FailureCode.CORRUPT,
        f"{file} is damaged",
        f"compare the remote's last commits with the posts that wait, then: rm {file}",
    )


def _read(file: Path) -> Document | None:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PublishError.from_os("the state of earlier pushes cannot be read", error) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file) from error
    if not isinstance(document, dict):
        raise _damaged(file)
    return document


def _write(file: Path, document: Document) -> None:
    """Replace the file durably. Raises PublishError."""
    partial = file.with_suffix(".tmp")
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
