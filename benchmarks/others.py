"""What is compared with and is none of this project's dependencies, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.lab import PROJECT, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.lab import Lab


def python(lab: Lab) -> str:
    """The Python of that environment, in the bench's folder; made once, and gone with it."""
    place = lab.root / "others"
    path = str(place / "bin" / "python")
    if not place.exists():
        say("installing what it is compared with: benchmarks/peers.txt")
        run([sys.executable, "-m", "venv", str(place)], lab.env)
        wanted = ["--requirement", str(PROJECT / "benchmarks" / "peers.txt")]
        # pip's own settings (an index of one's own) are the user's to have.
        run([path, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], os.environ)
    return path


def script(lab: Lab, name: str, *arguments: object) -> str:
    """What a script of this folder prints, run by that Python."""
    file = PROJECT / "benchmarks" / name
    # Isolated: beside the script lies a `queue.py`, which is not the standard library's.
    return run([python(lab), "-I", str(file), *map(str, arguments)], lab.env)


def run(command: list[str], env: Mapping[str, str]) -> str:
    """What a command prints that must succeed."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
    return done.stdout
