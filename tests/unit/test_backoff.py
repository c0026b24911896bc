"""The schedule of retries."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from briter_worker.ports import Backoff
from briter_worker.worker import loop_backoff

DELAYS = st.lists(st.floats(0, 1e9), min_size=1, max_size=8).map(tuple)


def test_each_attempt_has_its_delay_and_the_last_one_repeats() -> None:
    backoff = Backoff((60.0, 300.0, 1800.0))
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 100)] == [60, 300, 1800, 1800, 1800]


def test_jitter_goes_either_way() -> None:
    backoff = Backoff((100.0, 1000.0), jitter=0.2)
    assert backoff.delay(1, lambda: 0.0) == pytest.approx(80)
    assert backoff.delay(1, lambda: 0.5) == pytest.approx(100)
    assert backoff.delay(1, lambda: 0.9999999) == pytest.approx(120)


@given(delays=DELAYS, jitter=st.floats(0, 1), attempt=st.integers(-2, 20), drawn=st.floats(0, 1))
def test_a_jittered_delay_is_never_negative_and_never_over_the_longest(
    delays: tuple[float, ...], jitter: float, attempt: int, drawn: float
) -> None:
    backoff = Backoff(delays, jitter)
    assert 0 <= backoff.delay(attempt, lambda: drawn) <= backoff.longest


@pytest.mark.parametrize("delays", [(), (-1.0,), (math.nan,), (math.inf,)])
def test_delays_that_nobody_can_wait_are_refused(delays: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="delay"):
        Backoff(delays)


@pytest.mark.parametrize("jitter", [-0.1, 1.1, math.nan])
def test_a_jitter_that_is_no_fraction_is_refused(jitter: float) -> None:
    with pytest.raises(ValueError, match="jitter"):
        Backoff((1.0,), jitter)


def test_the_loops_backoff_doubles_up_to_a_minute() -> None:
    assert [loop_backoff(n, 5.0) for n in range(1, 6)] == [10, 20, 40, 60, 60]
    assert loop_backoff(10**9, 5.0) == 60
    assert loop_backoff(3, 600.0) == 600
    assert all(math.isfinite(loop_backoff(n, 0.001)) for n in (1, 1100, 10**6))
