"""A sample of the sweep: faults at the system calls of a publication. `scripts/soak sweep` takes them all."""

from __future__ import annotations

import pytest
from machine import provide, unavailable
from soak import sweep
from soak.report import Options
from soak.tracing import may_trace

_SEED = 7
"""The same calls in each run; `scripts/soak sweep` takes others. Open: `--seed 2968369131` leaves a lock."""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whatever_call_a_kill_or_a_failing_disk_hits_the_next_runs_recover() -> None:
    provide("strace", package="strace")
    if not may_trace():
        unavailable("strace may not follow processes here: a container needs --cap-add SYS_PTRACE")
    report = sweep.run(Options(full=False, seed=_SEED), print)
    # The number of system calls varies from run to run: a call may not be reached the second time.
    assert [failure for failure in report.failures if not failure.startswith("not reached")] == []
    assert report.figures["recovered"]
