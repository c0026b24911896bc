"""A small part of each proof that `scripts/soak` makes at full scale, with a fresh seed."""

from __future__ import annotations

import random

import pytest
from requirements import unavailable
from soak import fuzz, machine, oracle

SEED = random.SystemRandom().randrange(2**31)


@pytest.mark.slow
def test_random_histories_lose_nothing_and_publish_nothing_twice_extra_or_early() -> None:
    figures, trouble = machine.histories(5, SEED)
    assert not trouble, trouble
    assert figures["published"], f"nothing was published in {dict(figures)}"


@pytest.mark.slow
def test_of_random_path_lists_what_git_itself_would_record_is_published() -> None:
    figures, trouble = oracle.trials(oracle.LISTS * oracle.DRAINS, SEED)
    assert not trouble, trouble
    assert figures["commits"]
    assert figures["nopaths"]


@pytest.mark.slow
def test_random_bytes_are_accepted_or_refused_and_nothing_else() -> None:
    if not fuzz.is_installed():
        unavailable("atheris is not installed: it has no wheel for this Python")
    runs, trouble = fuzz.fuzz(8_000, SEED)
    assert not trouble, trouble
    assert runs
