"""A sample of `scripts/soak cluster`: a Postgres, three hosts, and all that befalls them."""

from __future__ import annotations

import random

import pytest
from machine import provide
from soak import cluster
from soak.report import Options

FIXED = 20_260_206


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dice", ["fixed", "fresh"])
def test_whatever_befalls_the_hosts_of_a_cluster_each_save_is_published_once(dice: str) -> None:
    provide("setpriv", package="util-linux")
    seed = FIXED if dice == "fixed" else random.SystemRandom().randrange(2**32)
    print(f"seed {seed}: scripts/soak cluster --quick --seed {seed}")  # noqa: T201 - to repeat it
    report = cluster.run(Options(full=False, seed=seed), print)
    assert report.failures == []
    assert report.figures["commits of the worker's"]
    assert report.figures["SIGSTOP, longer than the silence"]
    assert report.figures["networks cut, longer than the silence"]
