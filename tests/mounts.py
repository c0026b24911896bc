"""File systems for tests: small ones, ones that cannot be written, all gone when the test is over."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from requirements import unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _mount(*args: str) -> None:
    if os.geteuid() != 0:
        unavailable("only root may mount")
    done = subprocess.run(["mount", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        unavailable(f"mount {' '.join(args)}: {done.stderr.strip()}")


@contextmanager
def _mounted(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=True)


@contextmanager
def small(place: Path, *, size: str) -> Iterator[Path]:
    """An empty file system of this size at `place`."""
    place.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    with _mounted(place):
        yield place


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """What is at `place` cannot be changed, not even by root."""
    _mount("--bind", str(place), str(place))
    with _mounted(place):
        _mount("-o", "remount,bind,ro", str(place))
        yield


@contextmanager
def over(place: Path, source: Path) -> Iterator[None]:
    """Reading `place` reads `source`."""
    _mount("--bind", str(source), str(place))
    with _mounted(place):
        yield


@contextmanager
def full(place: Path, *, left: int = 0) -> Iterator[None]:
    """The file system at `place` has only `left` bytes to give."""
    filler = place / ".filler"
    with filler.open("wb", buffering=0) as file:
        chunk = 1 << 20
        while chunk >= 1 << 10:
            try:
                file.write(b"\0" * chunk)
            except OSError:
                chunk //= 2
        file.truncate(max(0, file.tell() - left))
    try:
        yield
    finally:
        filler.unlink()
