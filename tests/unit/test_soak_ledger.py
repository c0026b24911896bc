"""What the soak counts as published before its time, and as lost."""

from __future__ import annotations

import pytest
from soak.ledger import Ledger, Save, _judge_ours, judge
from soak.repository import Commit, blob_of

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


@pytest.mark.parametrize(
    ("there", "lost"), [(b"theirs\nours m2\n", 0), (b"theirs\nours m1\n", 2)], ids=["merged", "gone"]
)
def test_what_an_older_saves_commit_has_carried_merged_is_not_lost(there: bytes, lost: int) -> None:
    path = "content/a.md"
    older, newer = (
        Save(marker, "a", (path,), {path: f"title\nours {marker}\n".encode()}, f"{marker}: save a")
        for marker in ("m1", "m2")
    )
    touched = {path: ("100644", blob_of(there))}
    commits = [
        Commit("1" * 40, ("0" * 40,), "Briter Worker", "Briter Worker", 50, older.message, touched),
        Commit("0" * 40, (), "", "", 1, "first", {}),
    ]
    assert len(judge(Ledger(saves=[older, newer]), commits, {path: there}, ()).lost) == lost
