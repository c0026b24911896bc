"""Finds sites that have something to do and were not told: the backstop of every wake-up.

Posts whose hold or backoff ends, writers that died between their commit and the wake-up, drains that were
cut off in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from briter_worker.cluster.engine import Engine

# A retry further away than any backoff was written by a clock that ran ahead, and is due.
# Sites whose word waits or runs already look for themselves when it ends. What is claimed and nobody works
# on was either taken back from the dead, which wakes it at once, or is in doubt, which has no hurry.
_IDLE: LiteralString = """
SELECT s.name FROM sites s
WHERE s.removed IS NOT TRUE
  AND (s.paused IS NULL OR (s.paused->>'until')::float8 <= %(now)s)
  AND s.name <> ALL (%(besides)s::text[])
  AND (
    EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'waiting' AND p.due_at <= %(now)s
    )
    OR EXISTS (
      SELECT FROM publications p
      WHERE p.site = s.name AND p.state = 'waiting' AND p.next_attempt_at > %(never)s
    )
    OR (
      coalesce(s.taken_at, 0) <= %(now)s - %(doubt)s
      AND (
        EXISTS (SELECT FROM publications p WHERE p.site = s.name AND p.state = 'claimed')
        -- What dry runs have tried, the first live run takes.
        OR NOT coalesce((s.settings->>'workerDryRun')::boolean, %(dry_run)s)
          AND EXISTS (SELECT FROM publications p WHERE p.site = s.name AND p.state = 'tried')
      )
    )
  )
  AND NOT EXISTS (
    SELECT FROM procrastinate_jobs j WHERE j.lock = s.name AND j.status IN ('todo', 'doing')
  )
"""
_NEXT: LiteralString = """
SELECT min(due_at) AS at FROM publications WHERE state = 'waiting' AND due_at > %(now)s
"""
_AT_ONCE = 1000
"""Each word takes a fifth of a millisecond, and a statement must not take long."""


@dataclass(frozen=True, slots=True)
class Swept:
    """Whom a sweep has woken, and when the next post of any site becomes due."""

    woken: Sequence[str]
    next_due: float | None


class Sweep:
    """Sweeps over all sites. `doubt` is for how long a site rests whose posts in flight are in doubt."""

    def __init__(self, engine: Engine, *, dry_run: bool, longest_delay: float, doubt: float = 60.0) -> None:
        self._engine = engine
        self._longest_delay = longest_delay
        self._dry_run = dry_run
        self._doubt = doubt

    async def sweep(self, now: float, *, besides: Collection[str] = (), hurry: bool = False) -> Swept:
        """Wake who has something due, but not `besides`; with `hurry` also who is in doubt.

        Raises EngineError.
        """
        idle = await self._engine.ask(
            _IDLE,
            now=now,
            never=now + self._longest_delay,
            besides=list(besides),
            dry_run=self._dry_run,
            doubt=0.0 if hurry else self._doubt,
        )
        names = [row["name"] for row in idle]
        woken: list[str] = []
        for start in range(0, len(names), _AT_ONCE):
            woken += await self._engine.wake(names[start : start + _AT_ONCE])
        (soon,) = await self._engine.ask(_NEXT, now=now)
        return Swept(woken, soon["at"])
