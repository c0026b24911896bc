"""What a batch is about to do, on disk before it does it: one file per batch, beside the claimed jobs.

The first line is written with the file, atomically: the claims and their attempts. Later lines are
appended: that the work began, and each push's plan. A line that was torn by a crash or a full disk does
not parse and is passed over: what it would have announced had not begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from briter_worker.ports import Plan
from briter_worker.queues.files import SUFFIX, naming, replace, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PREFIX = ".journal-"
_PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(Plan))


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch as its journal tells it. `claims` maps each claim's key to its running attempt."""

    key: str
    claims: Mapping[str, int]
    started: bool
    plans: tuple[Plan, ...] = ()
    number: int = 0
    """Counts up: where two list a claim (split, or not yet closed), the later has it."""


class Journal:
    """The journals in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number: int | None = None

    def open(self, key: str, claims: Mapping[str, int], *, started: bool) -> None:
        """The batch is remembered durably, and so is every name in the folder."""
        if self._number is None:
            self._number = max((entry.number for entry in self.entries()), default=0)
        self._number += 1
        head = {"key": key, "claims": dict(claims), "started": started, "number": self._number}
        replace(self._path(key), _line(head))
        try:
            sync_folder(self._folder)
        except BaseException:
            # The caller is told that there is no batch: its jobs must not be thought taken care of.
            with contextlib.suppress(OSError):
                self._path(key).unlink()
            raise

    def begin(self, key: str) -> None:
        """A crash from here on may be the doing of one of the claims."""
        self._append(key, {"started": True})

    def record(self, key: str, plan: Plan) -> None:
        """The plan is durable when this returns."""
        self._append(key, {"plan": plan_as_json(plan)})

    def close(self, key: str) -> None:
        """The batch is forgotten."""
        with contextlib.suppress(FileNotFoundError):
            self._path(key).unlink()
            sync_folder(self._folder)

    def entries(self) -> list[Entry]:
        """Every batch that was not closed, in the order in which they were opened."""
        try:
            paths = [path for path in self._folder.iterdir() if path.name.startswith(_PREFIX)]
        except FileNotFoundError:
            return []
        found = [entry for path in paths if (entry := self._read(path)) is not None]
        return sorted(found, key=lambda entry: entry.number)

    def _read(self, path: Path) -> Entry | None:
        try:
            lines = list(_objects(path.read_bytes()))
        except FileNotFoundError:
            return None
        if not lines or "claims" not in lines[0]:
            return None
        head = lines[0]
        return Entry(
            key=head["key"],
            claims=head["claims"],
            started=any(line.get("started") for line in lines),
            plans=tuple(plan_from_json(line["plan"]) for line in lines if "plan" in line),
            number=head.get("number", 0),
        )

    def _append(self, key: str, line: dict[str, Any]) -> None:
        descriptor = os.open(self._path(key), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # The line end before it closes off what a full disk may have left of an earlier line.
            with naming(self._path(key)):
                view = memoryview(b"\n" + _line(line))
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, key: str) -> Path:
        return self._folder / f"{_PREFIX}{key}{SUFFIX}"


def _line(value: dict[str, Any]) -> bytes:
    # ASCII only: file names may have bytes that are no text, and JSON's escapes carry them.
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _objects(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                yield value


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan in JSON's types; its paths may have halves of surrogate pairs, for bytes that are no text."""
    return {name: _plain(getattr(plan, name)) for name in _PLAN_FIELDS}


def plan_from_json(value: dict[str, Any]) -> Plan:
    """The plan again; a field that it was written without has its default."""
    return Plan(**{name: value[name] for name in _PLAN_FIELDS if name in value})


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a plan's field holds
    return dict(value) if hasattr(value, "items") else value
