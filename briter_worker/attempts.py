"""The attempts of one batch, as plugins see them: what they enter, refuse, put off, handle and are told.

A plugin's mistake is a failure of the job at hand, never of its neighbours, and never the worker's end.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self

from briter_worker.errors import Failure, LockLostError, PublishError, SnoozedError, Stopped, for_people
from briter_worker.events import Warned
from briter_worker.job import GIT_SYNC
from briter_worker.ports import Outcome, Publication
from briter_worker.strictjson import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from briter_worker.ports import Change, Claim, EventSink, Extensions


class Attempts:
    """Everything that is entered is left, whatever becomes of the batch."""

    def __init__(self, extensions: Extensions, emit: EventSink, *, dry_run: bool = False) -> None:
        self._extensions = extensions
        self._emit = emit
        self._dry_run = dry_run
        self._claims: dict[str, Claim] = {}
        self._entered: dict[str, ExitStack] = {}

    def __enter__(self) -> Self:
        """Nothing is entered yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave what is still entered: attempts that were given up, or whose end only the remote knows."""
        for key in list(self._entered):
            self._leave(key)

    def begin(self, claims: Iterable[Claim]) -> list[Outcome]:
        """Enter what surrounds each attempt; the outcomes of those that a plugin does not let begin."""
        ended = []
        for claim in claims:
            self._claims[claim.key] = claim
            stack = self._entered[claim.key] = ExitStack()
            around = self._extensions.around_attempt(claim.job, claim.attempt)
            outcome = _outcome(claim.key, partial(stack.enter_context, around))
            if outcome is not None:
                ended.append(outcome)
                self._leave(claim.key)
        return ended

    def examine(self, key: str, changes: Sequence[Change]) -> Outcome | None:
        """The outcome of a job that a plugin does not let through."""
        job = self._claims[key].job
        return _outcome(key, lambda: self._extensions.before_publish(job, changes))

    def handle(self, claim: Claim) -> Outcome:
        """Have a job of a plugin's own type done."""
        kind = self._extensions.kind(claim.job.type)
        if kind is None:
            text = f"no plugin handles the type {quoted(claim.job.type)} any more"
            return Outcome(claim.key, failure=Failure.UNKNOWN_TYPE, text=text)
        return _outcome(claim.key, lambda: kind.handle(claim.job)) or Outcome(claim.key)

    def end(self, outcomes: Sequence[Outcome]) -> None:
        """These are settled: leave what surrounds them, and tell of those that are on the remote."""
        for outcome in outcomes:
            claim = self._claims.get(outcome.key)
            self._leave(outcome.key)
            if claim is None or outcome.commit is None or claim.job.type != GIT_SYNC:
                continue
            publication = Publication(
                claim.job, outcome.commit, claim.attempt, self._dry_run, outcome.rejected_paths
            )
            self._safely(claim, partial(self._extensions.after_publish, publication))

    def _leave(self, key: str) -> None:
        stack = self._entered.pop(key, None)
        if stack is not None:
            self._safely(self._claims[key], stack.close)

    def _safely(self, claim: Claim, step: Callable[[], object]) -> None:
        """The job is settled: what a plugin gets wrong now is told, and changes nothing."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - a plugin's
            self._emit(Warned(error=f"after {claim.job.slug}: {_mistake(error)}"))


def _outcome(key: str, step: Callable[[], object]) -> Outcome | None:
    """What a plugin's step means for the job; None when it has nothing against it."""
    try:
        step()
    except SnoozedError as wish:
        until = wish.until if math.isfinite(wish.until) else 0.0
        return Outcome(key, snooze_until=until, text=wish.text)
    except PublishError as failure:
        return Outcome(key, failure=failure.failure, text=failure.text)
    except (Stopped, LockLostError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is this job's failure
        return Outcome(key, failure=Failure.INTERNAL, text=for_people(_mistake(error)))
    return None


def _mistake(error: Exception) -> str:
    return f"a plugin failed: {type(error).__name__}: {error}. Fix: correct the plugin, or uninstall it"
