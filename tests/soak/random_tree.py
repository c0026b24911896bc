"""Random work trees with all that a file system can hold and no job should publish."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from soak.repository import git

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

FOLDERS = ("content", "public/uploads")
LARGE = 5_001


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


GOOD = _names(
    "a|b|x.txt|y.dos|z.bin|i.id|b c|-x|--all|*.md|q?|[z]|UPPER|..a|caf\u00e9|cafe\u0301|:(glob)q|~t|a&b;c"
    "|$HOME|'q'|\"r\"|.hidden|git|gitx~1|A|X.txt|upper|\U0001f389|x.log|keep.log|ignored|.gitignore|HEAD|a:b"
    "|#c|!d|e | f"
)
"""Names of all kinds that may be published; git ignores some of them."""
BAD = _names(
    ".GIT|.Git |git~1|GIT~2|.g\u200cit|.gitmodules|.GITMODULES|.gitattributes|GITATT~1|gi7eba~1"
    "|.git::$INDEX_ALLOCATION|...|. .|a\\b|new\nline|tab\there|\x7f|\u0085"
)
"""Names that no job may publish."""
ODD = _names("|/|/content/a|../a|content/../a|content/./a|content//a|.|content/a/../../b|content\\a")
"""No relative paths."""
IGNORE = "*.log\n!keep.log\n/content/ignored\nignored/\n"
RULES = (b"*\n", b"a\n", b"!x.log\n", b"/b/\n", b"*.txt\n", b"!*/\n", b"[A-Z]\n", b"sub/**\n")
ATTRIBUTE_RULES = (b"* text=auto\n", b"*.txt -text\n", b"*.md ident\n", b"* text eol=crlf\n", b"*.dos !eol\n")
"""What a folder of its own says; the site's own rules are below."""
ATTRIBUTES = "*.txt text=auto\n*.dos text eol=crlf\n*.bin -text\n*.id ident\n"


class RandomTree:
    """One site's work tree, changed at random; everything that it decides comes from the dice."""

    def __init__(self, worktree: Path, dice: random.Random) -> None:
        self._dice = dice
        self._root = worktree

    def grow(self, many: int) -> None:
        """New things: files mostly."""
        for _ in range(many):
            parent = self._dice.choice([*self._folders(), *(self._root / folder for folder in FOLDERS)])
            if len(parent.relative_to(self._root).parts) > 5:
                continue
            path = parent / (self._dice.choice(GOOD) if self._dice.random() < 0.9 else self._dice.choice(BAD))
            if os.path.lexists(path):
                continue
            self._put(path)

    def _put(self, path: Path) -> None:
        match self._dice.randrange(20):
            case 0:
                path.symlink_to(self._dice.choice(["a", "../../other/secret", ".", "/etc/passwd", "nowhere"]))
            case 1 if not path.name.startswith(".git"):  # git itself would wait for ever to read its rules
                os.mkfifo(path)
            case 2:
                self._nest(path)
            case 3:
                odd = path.with_name("\udcff")
                if not os.path.lexists(odd):
                    odd.write_bytes(b"x")
            case 4 | 5 | 6 | 7:
                path.mkdir()
                (path / self._dice.choice(GOOD[:6])).write_bytes(self._content())
            case _:
                path.write_bytes(self._content(path.name))
                if self._dice.random() < 0.2:
                    path.chmod(0o755)

    def _nest(self, path: Path) -> None:
        """A repository within: by its `.git` folder, by a `.git` file, or a bare one."""
        path.mkdir()
        (path / "inside").write_bytes(b"of another repository\n")
        match self._dice.randrange(3):
            case 0:
                git(path, "init", "--quiet", "--template=")
            case 1:
                (path / ".git").write_text("gitdir: /nowhere\n")
            case _:
                git(path, "init", "--quiet", "--template=", "--bare")

    def _content(self, name: str = "") -> bytes:
        rules = {".gitignore": RULES, ".gitattributes": ATTRIBUTE_RULES}.get(name)
        if rules is not None:
            return b"".join(self._dice.sample(rules, self._dice.randrange(3)))
        if self._dice.random() < 0.01:
            return b"x" * LARGE
        end = self._dice.choice([b"\n", b"\n", b"\r\n"])
        words = (b"%d $Id$" % self._dice.randrange(1000) for _ in range(self._dice.randrange(4)))
        return b"".join(word + end for word in words)

    def change(self, many: int) -> None:
        """Edit, delete, replace and touch what is there."""
        for _ in range(many):
            found = list(self.everything())
            if not found:
                return
            path = self._dice.choice(found)
            kind = os.lstat(path).st_mode
            match self._dice.randrange(9):
                case 0 | 1:
                    _remove(path)
                case 8:
                    renamed = path.with_name(path.name.swapcase())
                    if path.name not in BAD and not os.path.lexists(renamed):
                        path.rename(renamed)
                case 2:
                    _remove(path)
                    self._put(path)
                case 3 if stat.S_ISREG(kind):
                    path.chmod(0o644 if kind & stat.S_IXUSR else 0o755)
                case _ if stat.S_ISREG(kind):
                    path.write_bytes(self._content(path.name))
                case _:
                    pass

    def swap_for_links(self, secrets: str) -> None:
        """Every file becomes a link to a secret, or the folder that it is in to the folder of secrets."""
        for path in list(self.everything()):
            if not os.path.lexists(path):
                continue
            if path.is_file() and not path.is_symlink():
                path.unlink()
                path.symlink_to(f"{secrets}/secret")
            elif path.is_dir() and not path.is_symlink() and self._dice.random() < 0.3:
                _remove(path)
                path.symlink_to(secrets)

    def everything(self) -> Iterator[Path]:
        """All that lies in the allowed folders, but for what repositories within keep to themselves."""
        for folder in FOLDERS:
            for current, folders, files in os.walk(self._root / folder):
                folders[:] = [name for name in folders if name != ".git"]
                for name in (*folders, *files):
                    yield Path(current, name)

    def _folders(self) -> list[Path]:
        return [path for path in self.everything() if path.is_dir() and not path.is_symlink()]

    def declared(self, tracked: list[str]) -> list[str]:
        """What a job may ask for, sense or nonsense."""
        here = [os.fspath(path.relative_to(self._root)) for path in self.everything()]
        paths = []
        for _ in range(self._dice.choice([1, 1, 1, 2, 3, 5])):
            path = self._dice.choice([*here, *here, *tracked, *FOLDERS])
            match self._dice.randrange(16):
                case 0:
                    path = self._dice.choice(ODD)
                case 1:
                    path = f"{path}/{self._dice.choice((*GOOD, *BAD))}"
                case 2:
                    path = self._dice.choice(
                        ["other/secret", "public", "content2/a", "config.toml", ".git/config"]
                    )
                case 3 | 4 | 5:
                    path = path.rpartition("/")[0] or path
                case 6:
                    path = f"{path}/"
                case _:
                    pass
            if "\udcff" not in path:
                paths.append(path)
        return paths


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
