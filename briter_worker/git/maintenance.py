"""Keep the repository small while nothing is published, and remove what dead workers left in it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.git.stale_locks import OLD_S

if TYPE_CHECKING:
    from collections.abc import Collection

    from briter_worker.git.repository import Repository

_MAX_PACKS = 30
_MAX_LOOSE = 3000
_ROLL_UP = (
    *("-c", "pack.threads=1", "-c", "pack.windowMemory=64m", "-c", "gc.bigPackThreshold=0"),
    *("repack", "--geometric=2", "-d", "-q", "--no-write-bitmap-index"),
)


def tidy_repository(
    repository: Repository, now: float, keep: Collection[str] = (), *, follow: bool = True
) -> None:
    """Remove old temporary files and unused private refs, and roll up small packs.

    `keep` has the refs that recorded plans name. `follow` also updates the tracking ref. Call it inside
    `working`. Raises PublishError.
    """
    _remove_files(repository, now)
    prefix = f"{repository.own_refs}/batch/"
    out = repository.git.run("for-each-ref", "--format=%(refname)", prefix)
    for name in set(out.decode().splitlines()) - set(keep):  # of a worker that died before it had a plan
        repository.update_refs((name, None, None))
    seen, pushed = repository.ref(repository.tracking_ref), repository.ref(repository.pushed_ref)
    if follow and seen and pushed and seen != pushed and repository.is_ancestor(seen, pushed):
        repository.update_refs((repository.tracking_ref, pushed, seen))  # it was locked after the push
    _roll_up_packs(repository)


def _remove_files(repository: Repository, now: float) -> None:
    git_dir, common = repository.git.git_dir, repository.git.common_dir
    for path in (
        *git_dir.glob("fast_import_crash_*"),
        *(common / "objects" / "pack").glob("tmp_*"),
        *(common / "objects" / "pack").glob(".tmp-*"),
        *(common / "objects").glob("[0-9a-f][0-9a-f]/tmp_obj_*"),
        *repository.git.state_dir.glob("index-*"),
    ):
        with suppress(OSError):
            if now - path.stat().st_mtime > OLD_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _roll_up_packs(repository: Repository) -> None:
    """Merge small packs and loose objects into one pack. Every object stays, whether referred to or not.

    The cost is that of the small packs alone. Objects shared with another repository, or still on the
    remote, are left to `git gc`.
    """
    objects = repository.git.common_dir / "objects"
    packs = sum(not pack.with_suffix(".keep").exists() for pack in (objects / "pack").glob("*.pack"))
    # One folder of 256 stands for all.
    is_due = packs >= _MAX_PACKS or 256 * sum(1 for _ in (objects / "17").glob("*")) >= _MAX_LOOSE
    shared = (objects / "info" / "alternates").exists() or any((objects / "pack").glob("*.promisor"))
    if is_due and not shared:
        repository.git.run(*_ROLL_UP, what="the small packs could not be merged")
