"""What a test needs of the machine: skipped with a reason where it is missing, a failure in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


_IN_CI = os.environ.get("CI") == "true"


def unavailable(reason: str) -> NoReturn:
    """This test cannot run here."""
    if _IN_CI:
        pytest.fail(reason)
    pytest.skip(reason)


def provide(program: str, *, package: str) -> None:
    """Have `program` on this machine; CI installs it from Debian's `package`."""
    if shutil.which(program):
        return
    if _IN_CI and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "--yes", package]):
            # Another process of this test run may be installing too.
            subprocess.run(
                [*command, "-o", "DPkg::Lock::Timeout=100"],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                capture_output=True,
                check=False,
            )
    if not shutil.which(program):
        unavailable(f"{program} is not on this machine: apt-get install {package}")


def python_for_everybody(as_user: list[str]) -> tuple[str, dict[str, str]]:
    """A Python that runs behind the command `as_user`, and the environment in which it finds the worker."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"):
        env = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{packages}", "PYTHONDONTWRITEBYTECODE": "1"}
        tried = subprocess.run(
            [*as_user, python, "-c", "import briter_worker, pydantic, git, psutil"],
            env={**os.environ, **env},
            cwd="/",
            capture_output=True,
            check=False,
        )
        if tried.returncode == 0:
            return python, env
    return unavailable(f"another user can run no Python {version} with the worker in it here")


# File systems: small ones, ones that cannot be written, all gone when the test is over


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
