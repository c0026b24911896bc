"""One post, published by the commands that everybody would type."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def push(clone: Path, path: str, content: bytes, message: str) -> None:
    """Write it, add it, commit it, push it."""
    (clone / path).write_bytes(content)
    for command in (
        ["git", "add", "--", path],
        ["git", "commit", "--quiet", f"--message={message}"],
        ["git", "push", "--quiet", "origin", "main"],
    ):
        subprocess.run(command, cwd=clone, check=True, stdout=subprocess.DEVNULL)
