"""Git's configuration, as the files of it are: whether they can be read, and whether they have changed."""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError

if TYPE_CHECKING:
    import git
    from git.config import GitConfigParser


def read(repo: git.Repo) -> GitConfigParser:
    """All that is configured here. Raises PublishError when a file of it is not as it should be."""
    reader = repo.config_reader()
    try:
        reader.read()  # at once: the parser would do it when it is first asked, somewhere else
    except configparser.Error as error:
        raise unreadable(error) from None
    return reader


def unreadable(error: configparser.Error) -> PublishError:
    """Without its own words: they are the line that is wrong, and an address may stand there."""
    return PublishError(
        Failure.CORRUPT,
        f"git's configuration cannot be read ({type(error).__name__}). Fix: in the site's repository, "
        "git config --list says which line of which file is wrong",
    )


def signature(repo: git.Repo) -> list[tuple[int, int, int] | None]:
    """What changes with git's configuration; but for files that it includes."""
    home = Path.home()
    xdg = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    found: list[tuple[int, int, int] | None] = []
    for path in (
        Path(repo.common_dir, "config"),
        Path(repo.git_dir, "config.worktree"),
        home / ".gitconfig",
        xdg / "git" / "config",
        Path("/etc/gitconfig"),
    ):
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found
