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
_LINE_ENDS = frozenset({"text", "eol"})
_SAID = _LINE_ENDS | {"crlf"}
_NOTHING = ("unspecified", "unset")
_SYSTEM = ("/etc/gitattributes", "/usr/local/etc/gitattributes")


class Attributes:
    """What `.gitattributes` and the configuration say of a batch's files."""

    def __init__(self, commands: Commands, tree: Tree) -> None:
        self._commands = commands
        self._tree = tree
        self._folders: dict[str, bool] = {}
        self._absent: dict[str, bool] = {}
        self.guessed: set[str] = set()
        """Those whose line ends git guesses at, whatever else it does: it spares what has CRLF committed."""
        self.automatic: set[str] = set()
        """Those of them that have no other filter."""
        self.uses_lfs = False
        """Whether any of them is stored by git-lfs."""

    def filtered(self, paths: Iterable[str]) -> frozenset[str]:
        """Those of the paths whose contents git has to read itself."""
        config = self._commands.config
        always = str(config.get_value("core", "autocrlf", default="false")).lower() in ("true", "input", "1")
        everywhere = always or self._anywhere(config)
        asked = [path for path in paths if everywhere or self._below(path.rpartition("/")[0])]
        filters = self._ask(asked) if asked else {}
        self.uses_lfs = self.uses_lfs or any(each.get("filter") == "lfs" for each in filters.values())
        found = {path for path, each in filters.items() if each} | set(asked if always else ())
        guessed = {path for path in found if _is_guess(filters[path], always=always)}
        self.guessed |= guessed
        self.automatic |= {path for path in guessed if filters[path].keys() <= _LINE_ENDS}
        return frozenset(found)

    def _ask(self, paths: list[str]) -> dict[str, dict[str, str]]:
        out = self._commands.run(
            "check-attr",
            "-z",
            "--stdin",
            *_ASKED,
            stdin=b"".join(os.fsencode(path) + b"\0" for path in paths),
            doing=".gitattributes could not be read",
        )
        fields = os.fsdecode(out).split("\0")[:-1]
        found: dict[str, dict[str, str]] = {path: {} for path in paths}
        for path, attribute, value in zip(fields[::3], fields[1::3], fields[2::3], strict=True):
            if value not in _NOTHING:
                found[path][attribute] = value
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

    def is_unseen(self, path: str) -> bool:
        """Whether a `.gitattributes` that may concern it is committed, and not in the work tree."""
        return any(self._is_absent(each) for each in self.above([path]))

    def above(self, paths: Iterable[str]) -> set[str]:
        """Where a `.gitattributes` may be that concerns any of the paths."""
        folders = {"", *(path[:i] for path in paths for i, c in enumerate(path) if c == "/")}
        return {f"{each}/.gitattributes" if each else ".gitattributes" for each in folders}

    def _is_absent(self, path: str) -> bool:
        known = self._absent.get(path)
        if known is None:
            known = self._absent[path] = (
                self._tree.entry(path) is not None and not (self._commands.worktree / path).exists()
            )
        return known


def _is_guess(attributes: dict[str, str], *, always: bool) -> bool:
    """Whether git decides by the content alone if a file is text; `always`: if nothing says otherwise."""
    return attributes.get("text") == "auto" or (always and attributes.keys().isdisjoint(_SAID))
