"""What the soak counts as published before its time."""

from __future__ import annotations

import pytest
from soak.ledger import Commit, Ledger, Save, _judge_ours, blob_of

FOLDER = "content/bundles/one"
HELD = Save("m1", "one", (FOLDER,), {f"{FOLDER}/a.md": b"a\n"}, "m1: save one", held_until=100.0)


def early(*saves: Save, by: Save) -> list[str]:
    touched = {path: ("100644", blob_of(data)) for path, data in HELD.files.items() if data is not None}
    commit = Commit("0" * 40, (), "", "Briter Worker", 50, by.message, touched)
    ledger = Ledger()
    ledger.saves += saves
    return [complaint for complaint in _judge_ours(commit, by, ledger) if "before its time" in complaint]


@pytest.mark.parametrize("slug", ["one", "two"])
def test_an_older_save_and_another_post_may_not_carry_what_is_on_hold(slug: str) -> None:
    other = Save("m0", slug, (FOLDER,), {f"{FOLDER}/b.md": b"b\n"}, f"m0: save {slug}")
    assert early(other, HELD, by=other)
    if slug != HELD.slug:
        assert early(HELD, other, by=other)


def test_a_newer_save_of_the_post_takes_the_place_of_what_was_on_hold() -> None:
    newer = Save("m2", "one", (FOLDER,), {f"{FOLDER}/b.md": b"b\n"}, "m2: save one")
    assert not early(HELD, newer, by=newer)


def test_what_is_on_hold_may_not_go_out_by_itself_before_its_time() -> None:
    assert early(HELD, by=HELD)
