"""What a part of the soak is asked for, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Options:
    """How much, and with which dice."""

    full: bool
    seed: int
    processes: int = 2
    """How many things may run at once; a part that needs only one ignores it."""
    scale: float | None = None
    """A fraction of the full run, in place of what `full` says."""

    def of(self, full: int, quick: int) -> int:
        """How often: the full count, the quick one, or the fraction of the full one that was asked for."""
        if self.scale is not None:
            return max(1, round(full * self.scale))
        return full if self.full else quick


@dataclass(frozen=True, slots=True)
class Report:
    """One part's figures, and one line for each thing that must not be."""

    name: str
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    failures: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was promised held."""
        return not self.failures
