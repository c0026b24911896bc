"""A sample of `scripts/soak cluster`: a Postgres, three nodes, and every kind of incident once."""

from __future__ import annotations

import random

import pytest
from requirements import provide, unavailable
from soak import cluster
from soak.networks import why_no_networks
from soak.report import Options


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_happens_to_the_nodes_of_a_cluster_each_save_is_published_once() -> None:
    provide("setpriv", package="util-linux")
    provide("ip", package="iproute2")
    if reason := why_no_networks():
        unavailable(f"no network namespaces here: {reason}")
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}: scripts/soak cluster --quick --seed {seed}")  # noqa: T201 - to repeat it
    report = cluster.run(Options(full=False, seed=seed), print)
    assert report.failures == []
    assert report.figures["commits of the worker"]
    assert report.figures["SIGSTOP, longer than the silence"]
    assert report.figures["networks cut, longer than the silence"]
    assert report.figures["disks spoilt"]
    assert report.figures["saves that a restore made outdated"]
