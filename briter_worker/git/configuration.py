"""Git's configuration, as the files of it are: whether they can be read, and whether they have changed."""

from __future__ import annotations

import configparser
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.errors import Failure, PublishError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import git
    from git.config import GitConfigParser

    from briter_worker.git.environment import Setting

BELIEVED = 30.0
"""Seconds for which a configuration is believed to be unchanged whose files are; they may include others."""

Signature = list[tuple[int, int, int] | None]


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


def signature(repo: git.Repo) -> Signature:
    """What changes with git's configuration; but for files that it includes."""
    own = (os.path.join(repo.common_dir, "config"), os.path.join(repo.git_dir, "config.worktree"))  # noqa: PTH118 - asked often
    return _stamps(own) + _of_the_host()


def _of_the_host() -> Signature:
    home = os.environ.get("HOME") or str(Path.home())
    xdg = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    return _stamps((f"{home}/.gitconfig", f"{xdg}/git/config", "/etc/gitconfig"))


def _stamps(paths: Sequence[str]) -> Signature:
    found: Signature = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116 - as above
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


class Shared:
    """What is configured for every cache of this process: all but their addresses they have in common.

    Asked of one of them, it holds for the others, as long as the host's files are as they were. Not where a
    file says that it concerns some repositories only.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known: tuple[GitConfigParser, list[Setting] | None] | None = None
        self._signature: Signature = []
        self._until = 0.0

    def reader(self, repo: git.Repo) -> GitConfigParser:
        """As `read`."""
        found = _of_the_host()
        with self._guard:
            if self._known is not None and self._signature == found and time.monotonic() < self._until:
                return self._known[0]
        reader = read(repo)
        with self._guard:
            self._known, self._signature, self._until = None, found, time.monotonic() + BELIEVED
            if not any(section.lower().startswith("includeif") for section in reader.sections()):
                self._known = (reader, None)
        return reader

    def listed(self, reader: GitConfigParser, ask: Callable[[], list[Setting]]) -> list[Setting]:
        """What `ask` said when it was asked last, after this reader had been read."""
        with self._guard:
            known = self._known
        if known is not None and known[0] is reader and known[1] is not None:
            return known[1]
        listed = ask()
        with self._guard:
            if self._known is not None and self._known[0] is reader:
                self._known = (reader, listed)
        return listed
