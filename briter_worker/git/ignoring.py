"""Whether git could ignore anything in a cache's work tree: where nothing says so, it need not be asked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from briter_worker.git.command import Commands

_RULES = ".gitignore"


def can_ignore(commands: Commands, paths: Iterable[str]) -> bool:
    """Whether the configuration, or a `.gitignore` in the work tree, may concern one of the paths."""
    configured = str(commands.config.get_value("core", "excludesFile", default=""))
    home = Path(os.environ.get("HOME") or "/")
    folders = {"", *(path[:i] for path in paths for i, c in enumerate(path) if c == "/")}
    places = (
        Path(configured).expanduser() if configured else None,
        Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "git", "ignore"),
        Path(commands.repo.common_dir, "info", "exclude"),
        *(commands.worktree / folder / _RULES for folder in folders),
    )
    return any(place is not None and os.path.lexists(place) for place in places)
