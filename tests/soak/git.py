"""Publish with other gits than the one that is installed, and with refs kept in tables (reftable)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from soak.report import ROOT, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from soak.report import Options

_QUICK = ("commands/test_publishing.py", "promises/test_states.py")
_FULL = (
    *_QUICK,
    *("promises/test_branch_switched.py", "promises/test_crashes.py", "unit/test_mirror.py"),
    *("commands/test_remote_moved.py", "commands/test_remote_edits.py", "commands/test_undo.py"),
    *("commands/test_signing.py", "commands/test_cluster_publishing.py"),
)
_OF_FILES = (
    "heads",
    "remotes",
    "refs_are_read",
    "damaged_branch",
    "damaged_ref",
    "lost_object",
    "dead_workers",
)
"""Parts of the names of tests that write into files of refs: a reftable has none."""
_FIRST_REFTABLE = (2, 45)
_COUNT = re.compile(r"(\d+) (passed|failed|error|skipped)")


def run(options: Options, tell: Callable[[str], None]) -> Report:
    """Run tests with each git in the folders of BRITER_SOAK_GITS, which has the form of PATH."""
    folders = [each for each in os.environ.get("BRITER_SOAK_GITS", "").split(os.pathsep) if each]
    folders = folders or [str(Path(shutil.which("git") or "git").parent)]
    figures: dict[str, float | int | str] = {}
    failures: list[str] = []
    for folder in folders:
        version = _output(f"{folder}/git", "version").removeprefix("git version ")
        formats = ["files"]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _FIRST_REFTABLE:
            formats.append("reftable")
        for refs in formats:
            said = _run_tests(folder, refs, options)
            for count, what in _COUNT.findall(said.splitlines()[-1]):
                figures[f"git {version}, {refs}: {what}"] = int(count)
            failures += [
                f"git {version}, {refs}: {line}" for line in re.findall("^FAILED (.*)", said, re.MULTILINE)
            ]
            tell(f"git {version}, {refs}: {said.splitlines()[-1]}")
    return Report("git", figures, failures)


def _run_tests(folder: str, refs: str, options: Options) -> str:
    files = [str(ROOT / "tests" / name) for name in (_FULL if options.full else _QUICK)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(options.processes), *files]
    if refs == "reftable":
        command += ["-k", " and ".join(f"not {part}" for part in _OF_FILES)]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "BRITER_SOAK_REF_FORMAT": refs}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
