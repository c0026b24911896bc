"""How long a job waits before it is tried again."""

from __future__ import annotations

import math
import random as rng
from dataclasses import dataclass
from itertools import chain, count, takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Backoff:
    """A schedule of waits, in seconds: one for each attempt, the last one repeats.

    `jitter` is the fraction by which a wait may be shorter or longer, so that jobs that failed together
    do not all come back together.
    """

    delays: tuple[float, ...]
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if not self.delays:
            raise ValueError("a backoff needs at least one delay")
        if not all(math.isfinite(delay) and delay >= 0 for delay in self.delays):
            raise ValueError(f"delays are finite and not negative: {self.delays}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is a fraction from 0 to 1: {self.jitter}")

    @classmethod
    def fixed(cls, delay: float, jitter: float = 0.0) -> Backoff:
        """The same wait each time."""
        return cls((delay,), jitter)

    @classmethod
    def linear(cls, step: float, cap: float, jitter: float = 0.0) -> Backoff:
        """`step`, twice `step`, … up to `cap`."""
        return cls(_rising((step * n for n in count(1)), cap), jitter)

    @classmethod
    def exponential(cls, first: float, cap: float, jitter: float = 0.0) -> Backoff:
        """`first`, doubled each time, up to `cap`."""
        return cls(_rising((first * 2.0**n for n in count()), cap), jitter)

    @property
    def longest(self) -> float:
        """No wait is longer than this: a retry further away was written by a clock that ran ahead."""
        return max(self.delays)

    def delay(self, attempt: int, random: Callable[[], float] = rng.random) -> float:
        """The wait after the given attempt (counted from 1): never negative, never over `longest`."""
        planned = self.delays[min(max(attempt, 1), len(self.delays)) - 1]
        return min(planned * (1 + self.jitter * (2 * random() - 1)), self.longest)


def _rising(delays: Iterator[float], cap: float) -> tuple[float, ...]:
    first = next(delays)
    if not 0 < first <= cap < math.inf:
        raise ValueError(f"a rising backoff needs 0 < first <= cap, both finite: {first}, {cap}")
    return (*takewhile(lambda delay: delay < cap, chain((first,), delays)), cap)
