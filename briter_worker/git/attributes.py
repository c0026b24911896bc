"""Which files git changes on their way into the repository: line ends, LFS and other filters.

Where nothing can change them, which is the usual case, their contents are hashed without asking git.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from git.config import GitConfigParser

    from briter_worker.git.command import Commands
    from briter_worker.git.objects import Tree

_ASKED = ("filter", "text", "eol", "crlf", "ident", "working-tree-encoding")
_NOTHING = ("unspecified", "unset")
_SYSTEM = ("/etc/gitattributes", "/usr/local/etc/gitattributes")


class Attributes:
    """What `.gitattributes` and the configuration say of a batch's files."""

    def __init__(self, commands: Commands, tree: Tree) -> None:
        self._commands = commands
        self._tree = tree
        self._folders: dict[str, bool] = {}
        self.known_filtered: frozenset[str] = frozenset()
        """What `filtered` answered last."""
        self.uses_lfs = False
        """Whether any of them is stored by git-lfs."""

    def filtered(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the paths whose contents git has to read itself."""
        config = self._commands.repo.config_reader()
        always = str(config.get_value("core", "autocrlf", default="false")).lower() in ("true", "input", "1")
        everywhere = always or self._anywhere(config)
        asked = [path for path in paths if everywhere or self._below(path.rpartition("/")[0])]
        if asked:
            filters = self._ask(asked)
            self.uses_lfs = "lfs" in filters.values()
            self.known_filtered = frozenset(asked if always else filters)
        return self.known_filtered

    def _ask(self, paths: list[str]) -> dict[str, str]:
        out = self._commands.run(
            "check-attr",
            "-z",
            "--stdin",
            *_ASKED,
            stdin=b"".join(os.fsencode(path) + b"\0" for path in paths),
            doing=".gitattributes could not be read",
        )
        fields = os.fsdecode(out).split("\0")[:-1]
        found: dict[str, str] = {}
        for path, attribute, value in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
            if value not in _NOTHING:
                found[path] = value if attribute == "filter" else found.get(path, "")
        return found

    def _anywhere(self, config: GitConfigParser) -> bool:
        home = Path(os.environ.get("HOME") or "/")
        configured = str(config.get_value("core", "attributesFile", default=""))
        places = [
            Path(self._commands.repo.common_dir, "info", "attributes"),
            Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "git", "attributes"),
            *map(Path, _SYSTEM),
            *([Path(configured).expanduser()] if configured else []),
        ]
        return any(place.exists() for place in places)

    def _below(self, folder: str) -> bool:
        """Whether the folder or one above it has a `.gitattributes`, in the work tree or committed."""
        known = self._folders.get(folder)
        if known is None:
            path = f"{folder}/.gitattributes" if folder else ".gitattributes"
            known = (
                (self._commands.worktree / path).exists()
                or self._tree.entry(path) is not None
                or (bool(folder) and self._below(folder.rpartition("/")[0]))
            )
            self._folders[folder] = known
        return known
