"""Small packs, rolled up: each publication leaves one, and so does each fetch from a promisor remote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from briter_worker.errors import sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from briter_worker.git.run import Git

_MAX_PACKS = 10
_FACTOR = 2
"""Each pack that stays is at least this many times as large as the next smaller one."""
_BIG_PACK_BYTES = 64 << 20
"""A larger pack stays as it is, where git cannot roll up by itself."""
_LIMITS = ("-c", "pack.threads=1", "-c", "pack.windowMemory=64m", "-c", "pack.packSizeLimit=0")
_PROMISOR = ".promisor"
_ROLLED_UP = frozenset({".pack", ".idx", ".rev", _PROMISOR})
"""Files of a pack that is neither kept, nor has a bitmap, nor holds unreachable objects."""


def roll_up_packs(git: Git) -> None:
    """Roll up the small packs, whether their objects are referred to or not. Raises PublishError.

    `git repack` does that, except in a repository that borrows objects from another one, or has a promisor
    remote. There `git repack` also takes packs of the other repository, or reports promised objects as lost
    (git 2.39). So the worker joins the packs of such a repository itself, each kind apart, and looks for no
    object that is not there.
    """
    objects = git.common_dir / "objects"
    files = [*objects.glob("pack/pack-*")]
    has_alternates = (objects / "info" / "alternates").exists()
    has_promised = any(path.suffix == _PROMISOR for path in files)
    if not has_alternates and not has_promised:
        if sum(path.suffix == ".pack" for path in files) >= _MAX_PACKS:
            _repack(git)
        return
    if (objects / "pack" / "multi-pack-index").exists():
        return  # it names the packs: `git maintenance`, which wrote it, rolls them up
    for packs in _packs_by_kind(files):
        chosen = _choose(packs)
        if len(chosen) >= _MAX_PACKS:
            _join(git, chosen)


def _repack(git: Git) -> None:
    """Have git roll up the small packs."""
    command = ("repack", f"--geometric={_FACTOR}", "-d", "-q", "--no-write-bitmap-index")
    git.run(*_LIMITS, "-c", "gc.bigPackThreshold=0", *command)


def _packs_by_kind(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the packs of this repository's own, and those of a promisor remote's objects."""
    suffixes: dict[str, set[str]] = {}
    for path in files:
        suffixes.setdefault(path.stem, set()).add(path.suffix)
    plain = [path for path in files if path.suffix == ".pack" and suffixes[path.stem] <= _ROLLED_UP]
    yield [path for path in plain if _PROMISOR not in suffixes[path.stem]]
    yield [path for path in plain if _PROMISOR in suffixes[path.stem]]


def _choose(packs: Sequence[Path]) -> list[Path]:
    """Return the packs to roll up, so that the sizes of those that stay are a geometric progression."""
    sized = sorted((path.stat().st_size, path) for path in packs)
    sized = [(size, path) for size, path in sized if size <= _BIG_PACK_BYTES]
    sizes = [size for size, _ in sized]
    count = 0
    for at in range(1, len(sizes)):
        if sizes[at] < _FACTOR * sizes[at - 1]:
            count = at + 1
    while count < len(sizes) and sizes[count] < _FACTOR * sum(sizes[:count]):
        count += 1
    return [path for _, path in sized[:count]]


def _join(git: Git, packs: Sequence[Path]) -> None:
    """Write the objects of the packs into one new pack, durably, then remove the packs."""
    folder = packs[0].parent
    names: set[bytes] = set()
    for pack in packs:
        names |= _object_names(git, pack)
    partial = folder / ".tmp-briter"  # `remove_temporary` knows the name
    command = ("pack-objects", "--quiet", "--delta-base-offset", str(partial))
    written = git.run(*_LIMITS, *command, stdin=b"\n".join(sorted(names))).decode().strip()
    new = folder / f"pack-{written}.pack"
    if packs[0].with_suffix(_PROMISOR).exists():
        new.with_suffix(_PROMISOR).touch()
    for suffix in (".pack", ".rev", ".idx"):  # git looks for the last one first
        source = folder / f"{partial.name}-{written}{suffix}"
        if source.exists():
            source.replace(new.with_suffix(suffix))
    sync_folder(folder)
    for pack in packs:
        if pack != new:
            for suffix in (".idx", ".rev", ".pack", _PROMISOR):
                pack.with_suffix(suffix).unlink(missing_ok=True)


def _object_names(git: Git, pack: Path) -> set[bytes]:
    listed = git.run("show-index", stdin=pack.with_suffix(".idx").read_bytes())
    return {line.split()[1] for line in listed.splitlines()}
