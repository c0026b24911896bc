"""What a test needs of the machine: skipped with a reason where it is missing, a failure in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

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
