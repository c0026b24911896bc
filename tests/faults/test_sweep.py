"""A sample of the sweep: faults at the system calls of a publication. `scripts/soak sweep` takes them all."""

from __future__ import annotations

import random

import pytest
from machine import provide, unavailable
from soak import sweep
from soak.report import Options
from soak.tracing import may_trace

FIXED = 20_260_130


@pytest.fixture(autouse=True)
def _strace() -> None:
    provide("strace", package="strace")
    if not may_trace():
        unavailable("strace may not follow processes here: a container needs --cap-add SYS_PTRACE")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dice", ["fixed", "fresh"])
def test_whatever_call_a_kill_or_a_failing_disk_comes_over_the_next_runs_make_up_for_it(dice: str) -> None:
    seed = FIXED if dice == "fixed" else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}: scripts/soak sweep --quick --seed {seed}")  # noqa: T201 - to repeat it
    report = sweep.run(Options(full=False, seed=seed), print)
    assert report.failures == []
    assert report.figures["recovered"]
