"""Every test runs with an empty home, no configuration of git but its own, and no inherited settings."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from queue_backends import Disk
from sites import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest_plugins = ["postgres"]

# A deadline by the wall clock fails on a busy machine and says nothing there; pytest-timeout ends what hangs.
settings.register_profile("worker", deadline=None)
settings.load_profile("worker")
_HERMETIC = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"}
_GIT_CONFIG = """[safe]
\tbareRepository = all
[init]
\tdefaultRefFormat = {refs}
"""
"""Of people's git, in every version: tests work in bare repositories, which git 3 asks for by name."""


def pytest_configure(config: pytest.Config) -> None:
    """Seal the environment in every process of the run."""
    home = tempfile.mkdtemp(prefix="briter-home-")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
    for name in [n for n in os.environ if n.startswith(("GIT_", "BRITER_", "XDG_", "SSH_"))]:
        if not name.startswith("BRITER_SOAK_"):  # how much a proof repeats
            del os.environ[name]
    importlib.import_module("briter_worker.git.run")  # this deletes git's variables, and later would these
    for name in [n for n in os.environ if n.startswith("GIT_")]:
        del os.environ[name]
    config_file = Path(home, "gitconfig")
    config_file.write_text(_GIT_CONFIG.format(refs=os.environ.get("BRITER_SOAK_REF_FORMAT", "files")))
    os.environ |= {**_HERMETIC, "GIT_CONFIG_GLOBAL": str(config_file)}
    os.environ |= {"HOME": home, "LC_ALL": "C.UTF-8", "TZ": "UTC"}


@pytest.fixture(autouse=True)
def _surroundings_are_left_as_found() -> Iterator[None]:
    """A test that leaks settings or a folder into the next one fails by itself."""
    before, folder = dict(os.environ), os.getcwd()  # noqa: PTH109 - may be gone afterwards
    yield
    after = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    before.pop("PYTEST_CURRENT_TEST", None)
    assert after == before, "the test changed os.environ: use monkeypatch"
    assert os.getcwd() == folder, "the test changed the folder: use monkeypatch.chdir"  # noqa: PTH109


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A bare remote, a clone of it with `content/posts`, and an empty queue."""
    return Site.make(tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)
