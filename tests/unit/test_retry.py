"""The schedule of retries."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from briter_worker.retry import Backoff

DELAYS = st.lists(st.floats(0, 1e9), min_size=1, max_size=8).map(tuple)


def test_each_attempt_has_its_delay_and_the_last_one_repeats() -> None:
    backoff = Backoff((60.0, 300.0, 1800.0))
    assert [backoff.delay(n) for n in (1, 2, 3, 4, 100)] == [60, 300, 1800, 1800, 1800]


def test_an_attempt_that_was_never_counted_waits_as_the_first() -> None:
    assert Backoff((60.0, 300.0)).delay(0) == 60


def test_the_longest_delay_need_not_be_the_last() -> None:
    assert Backoff((5.0, 90.0, 10.0)).longest == 90


def test_a_zero_backoff_retries_at_once() -> None:
    assert Backoff.fixed(0, jitter=0.5).delay(1, lambda: 0.0) == 0


def test_jitter_goes_either_way() -> None:
    backoff = Backoff((100.0, 1000.0), jitter=0.2)
    assert backoff.delay(1, lambda: 0.0) == pytest.approx(80)
    assert backoff.delay(1, lambda: 0.5) == pytest.approx(100)
    assert backoff.delay(1, lambda: 0.9999999) == pytest.approx(120)


def test_jitter_is_drawn_anew_for_each_delay() -> None:
    backoff = Backoff((100.0, 1000.0), jitter=0.5)
    assert len({backoff.delay(1) for _ in range(20)}) > 1


@given(delays=DELAYS, jitter=st.floats(0, 1), attempt=st.integers(-2, 20), drawn=st.floats(0, 1))
def test_a_jittered_delay_is_never_negative_and_never_over_the_longest(
    delays: tuple[float, ...], jitter: float, attempt: int, drawn: float
) -> None:
    backoff = Backoff(delays, jitter)
    assert 0 <= backoff.delay(attempt, lambda: drawn) <= backoff.longest


def test_fixed_linear_and_exponential_schedules() -> None:
    assert Backoff.fixed(7).delays == (7,)
    assert Backoff.linear(10, 35).delays == (10, 20, 30, 35)
    assert Backoff.linear(10, 30).delays == (10, 20, 30)
    assert Backoff.exponential(30, 3600, jitter=0.2) == Backoff(
        (30, 60, 120, 240, 480, 960, 1920, 3600), jitter=0.2
    )
    assert Backoff.exponential(1, 8).delays == (1, 2, 4, 8)
    assert Backoff.exponential(5, 5).delays == Backoff.linear(5, 5).delays == (5,)


@given(first=st.floats(1e-3, 1e3), times=st.floats(1, 1e4))
def test_rising_schedules_rise_to_the_cap_and_no_further(first: float, times: float) -> None:
    cap = first * times
    for backoff in (Backoff.linear(first, cap), Backoff.exponential(first, cap)):
        assert list(backoff.delays) == sorted(backoff.delays)
        assert backoff.delays[-1] == backoff.longest == cap


@pytest.mark.parametrize("delays", [(), (-1.0,), (math.nan,), (math.inf,)])
def test_delays_that_nobody_can_wait_are_refused(delays: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="delay"):
        Backoff(delays)


@pytest.mark.parametrize("jitter", [-0.1, 1.1, math.nan])
def test_a_jitter_that_is_no_fraction_is_refused(jitter: float) -> None:
    with pytest.raises(ValueError, match="jitter"):
        Backoff((1.0,), jitter)


@pytest.mark.parametrize(("first", "cap"), [(0, 10), (-1, 10), (20, 10), (1, math.inf), (math.nan, 1)])
def test_a_rising_schedule_needs_a_positive_start_and_a_cap(first: float, cap: float) -> None:
    with pytest.raises(ValueError, match="rising"):
        Backoff.linear(first, cap)
    with pytest.raises(ValueError, match="rising"):
        Backoff.exponential(first, cap)


def test_a_schedule_has_the_jitter_it_is_given_and_else_none() -> None:
    for plain, jittered in (
        (Backoff.fixed(7), Backoff.fixed(7, jitter=0.3)),
        (Backoff.linear(10, 35), Backoff.linear(10, 35, jitter=0.3)),
        (Backoff.exponential(30, 3600), Backoff.exponential(30, 3600, jitter=0.3)),
    ):
        assert (plain.jitter, jittered.jitter) == (0, 0.3)
        assert plain.delays == jittered.delays


def test_a_schedule_needs_a_delay() -> None:
    with pytest.raises(ValueError, match=r"^a backoff needs at least one delay$"):
        Backoff(())
