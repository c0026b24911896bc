"""Refs are read without git: what is there, or that it is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from briter_worker.git import refs
from briter_worker.git.pending import has_dry_run_commits, has_late_adoption

if TYPE_CHECKING:
    from pathlib import Path

SHA = "1" * 40
ZERO = "0" * 40


def write(common: Path, name: str, text: str) -> None:
    file = common / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_ref_that_stands_for_another_is_followed_to_its_end(tmp_path: Path) -> None:
    write(tmp_path, "refs/heads/alias", "ref: refs/heads/main\n")
    write(tmp_path, "refs/heads/main", f"{SHA}\n")
    assert refs.read(tmp_path, "refs/heads/alias") == SHA


def test_refs_that_stand_for_one_another_are_damage_not_an_endless_search(tmp_path: Path) -> None:
    write(tmp_path, "refs/heads/a", "ref: refs/heads/b\n")
    write(tmp_path, "refs/heads/b", "ref: refs/heads/a\n")
    with pytest.raises(refs.BrokenRefError):
        refs.read(tmp_path, "refs/heads/a")


def test_what_a_ref_last_pointed_to_is_what_its_log_says_if_it_says_anything(tmp_path: Path) -> None:
    name = "refs/heads/main"
    assert refs.last_logged(tmp_path, name) is None
    write(tmp_path, f"logs/{name}", f"{SHA} {ZERO} A <a@example.org> 1 +0000\tdeleted\n")
    assert refs.last_logged(tmp_path, name) is None
    write(tmp_path, f"logs/{name}", f"{ZERO} {SHA} A <a@example.org> 1 +0000\tmade\n{SHA} rubbish\n")
    assert refs.last_logged(tmp_path, name) == SHA


def test_a_remote_that_is_ahead_by_nobodys_push_of_ours_leaves_nothing_to_adopt(tmp_path: Path) -> None:
    write(tmp_path, ".git/refs/heads/main", f"{SHA}\n")
    write(tmp_path, ".git/refs/remotes/origin/main", f"{'2' * 40}\n")
    assert not has_late_adoption(tmp_path, "main", "origin")
    write(tmp_path, f".git/{refs.PRIVATE}/{'3' * 32}", f"{'2' * 40}\n")
    assert has_late_adoption(tmp_path, "main", "origin")
    write(tmp_path, ".git/refs/heads/main", "spoilt\n")
    assert not has_late_adoption(tmp_path, "main", "origin")


def test_a_name_that_no_file_can_have_is_no_ref(tmp_path: Path) -> None:
    (tmp_path / ".git" / refs.PRIVATE / "branches").mkdir(parents=True)
    assert not has_dry_run_commits(tmp_path, "x" * 300)
