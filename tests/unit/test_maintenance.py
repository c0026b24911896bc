"""Packs stay few, leftovers go, and nothing that anybody may need is dropped."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest

from briter_worker.git import repository as repository_module
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from sites import Site


def packs(site: Site) -> list[Path]:
    return sorted((site.worktree / ".git" / "objects" / "pack").glob("*.pack"))


def objects(site: Site) -> set[str]:
    return set(site.git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())


def fill(site: Site, number: int) -> None:
    """So many small packs, as publications leave them, and a loose object that nothing refers to."""
    for i in range(number):
        site.write_post("content/posts/a.md", f"{i}\n")
        site.git("add", ".")
        site.git("commit", "--quiet", "--allow-empty", f"--message={i}")
        site.git("-c", "repack.writeBitmaps=false", "repack", "-d", "-q")
    (site.worktree / "draft").write_text("what a person wrote, staged once and not committed\n")
    site.git("hash-object", "-w", "draft")
    (site.worktree / "draft").unlink()


def tidy(site: Site, now: float | None = None, keep: Collection[str] = ()) -> Git:
    git = Git(site.worktree, remote="origin", timeout=60)
    repository = Repository(git, branch="main", remote="origin")
    with repository.working():
        repository.tidy(time.time() if now is None else now, keep)
    return git


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository_module, "_MAX_PACKS", 4)


def test_many_small_packs_become_one_and_no_object_is_dropped(site: Site) -> None:
    fill(site, 6)
    site.git("reset", "--quiet", "--hard", "HEAD~2")  # what nothing refers to any more is a person's to drop
    before, many = objects(site), len(packs(site))
    tidy(site)
    assert len(packs(site)) <= 2 < many
    assert objects(site) == before
    site.git("fsck", "--strict")


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_refs_of_dead_workers_are_removed_and_no_others(site: Site, *, packed: bool) -> None:
    commit = site.git("rev-parse", "HEAD")
    prefix = "refs/briter/branches/main"
    swept, planned, pushed, theirs = (
        *(f"{prefix}/batch/{name}" for name in ("one", "two")),
        f"{prefix}/pushed",
        "refs/briter/branches/other/batch/one",
    )
    for name in (swept, planned, pushed, theirs):
        site.git("update-ref", name, commit)
    if packed:
        site.git("pack-refs", "--all", "--prune")

    tidy(site, time.time(), [planned])
    assert site.git("for-each-ref", "--format=%(refname)", "refs/briter").split() == [planned, pushed, theirs]


def test_old_temporary_files_are_removed_and_new_ones_are_not(site: Site) -> None:
    git_dir = site.worktree / ".git"
    names = ["fast_import_crash_1", "objects/pack/tmp_pack_1", "objects/17/tmp_obj_1", "briter/index-1"]
    for name in names:
        (git_dir / name).parent.mkdir(exist_ok=True)
        (git_dir / name).touch()
    tidy(site)
    assert all((git_dir / name).exists() for name in names)
    tidy(site, time.time() + 1000)
    assert not any((git_dir / name).exists() for name in names)


def test_a_run_of_cron_leaves_few_packs(site: Site) -> None:
    fill(site, 1)
    for number in range(32):
        for file in packs(site)[0], packs(site)[0].with_suffix(".idx"):
            shutil.copy(file, file.with_stem(f"pack-{number:040}"))
    many = len(packs(site))
    site.save_post("b", "b\n")
    assert site.run_once().of("published")
    assert len(packs(site)) < 5 < many
