"""Random work trees with all that a file system can hold and no job should publish; and what must be of them.

The expected tree is what git itself and the file system say; no code is shared with the worker. Which paths
are proper follows from the names that were made up, what a path is from `lstat`, what is ignored from `git
check-ignore`, and modes and blobs from `git update-index` into an index of its own.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from soak.repository import GITLINK, LAX, Tree, git, join, read_tree

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable, Iterator

    from sites import Site


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


# The tree that must be published


@dataclass(slots=True)
class Wanted:
    """What one list of paths stands for."""

    files: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    on_hold: set[str] = field(default_factory=set)
    """Files of a folder that another job will publish, when it is due."""
    missing: set[str] = field(default_factory=set)
    """Declared paths that nobody ever had."""


class Oracle:
    """What git and the file system say of one work tree, and of the commit that it is on."""

    def __init__(self, site: Site, held: Iterable[str]) -> None:
        self._root = site.worktree
        self._index = site.root / "oracle.index"
        self.tip = read_tree(self._root)
        names = ("log", "--format=", "--name-only", "-z", "--root", "-m")
        self.ever = {*git(self._root, *names).split("\0"), *self.tip}
        # What a scheduled job misspells is withheld all the same.
        plain = (os.path.normpath(f"/{each}").lstrip("/") for each in held)
        self.held = {path for each in plain if (path := proper(each)) is not None}

    def wanted(self, paths: Iterable[str]) -> dict[str, Wanted | None]:
        """Each declared path on its own; None where it is improper."""
        found: dict[str, Wanted | None] = {}
        for declared in paths:
            path = proper(declared)
            found[declared] = None if path is None else self._look(path)
        return found

    def _look(self, path: str) -> Wanted:
        wanted = Wanted()
        if any(self._in_tip(each) == GITLINK for each in (*above(path), path)):
            wanted.rejected.add(path)
            return wanted
        kind: int | None = None
        for each in (*above(path), path):
            kind = self._kind(each)
            if kind is None or (stat.S_ISREG(kind) and each != path):
                kind = None
                break
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or self._is_nested(each):
                wanted.rejected.add(path)
                return wanted
        if kind is None:
            if path in self.tip:
                wanted.gone.add(path)
            else:
                wanted.gone |= {each for each in self._below(path) if self._may_go(each, wanted)}
        elif stat.S_ISREG(kind):
            wanted.files.add(path)
            wanted.gone |= {each for each in self._below(path) if self._may_go(each, wanted)}
        else:
            wanted.folders.add(path)
            self._walk(path, wanted)
        return wanted

    def _walk(self, top: str, wanted: Wanted) -> None:
        here: set[str] = set()
        shut: set[str] = set()
        todo = [top]
        while todo:
            folder = todo.pop()
            for name in os.listdir(self._root / folder):  # noqa: PTH208 - names only
                path = f"{folder}/{name}"
                kind = self._kind(path)
                is_folder = kind is not None and stat.S_ISDIR(kind)
                if proper(path) is None or (is_folder and self._is_nested(path)):
                    shut.add(path)
                elif is_folder:
                    todo.append(path)
                elif kind is not None and stat.S_ISREG(kind):
                    here.add(path)
                else:
                    shut.add(path)
        wanted.rejected |= shut
        wanted.files |= here
        for path in (*self._below(top), *([top] if top in self.tip else [])):
            if (
                path not in here
                and shut.isdisjoint((*above(path), path))
                and (path == top or self._may_go(path, wanted))
            ):
                wanted.gone.add(path)

    def _may_go(self, path: str, wanted: Wanted) -> bool:
        if proper(path) is None:
            wanted.rejected.add(path)
            return False
        return True

    def _below(self, folder: str) -> list[str]:
        return [
            path for path, (mode, _) in self.tip.items() if path.startswith(f"{folder}/") and mode != GITLINK
        ]

    def _in_tip(self, path: str) -> str | None:
        return self.tip[path][0] if path in self.tip else None

    def _kind(self, path: str) -> int | None:
        try:
            return os.lstat(self._root / path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _is_nested(self, path: str) -> bool:
        kind = self._kind(path)
        if kind is None or not stat.S_ISDIR(kind):
            return False
        names = set(os.listdir(self._root / path))  # noqa: PTH208
        return ".git" in names or names >= {"HEAD", "objects", "refs"}

    def ignored(self, paths: Iterable[str]) -> set[str]:
        """Those of the paths that are new and that git ignores; in a submodule's place, it does not say."""
        # A tracked file does not count as ignored; what is in a folder that took its place does, also for
        # `git status` and `git add --all`.
        new = sorted(
            path
            for path in paths
            if path not in self.tip and self._in_tip(self._replaces(path) or "") != GITLINK
        )
        if not new:
            return set()
        # With the index, git would take a file called `*.md` for a pattern that tracked files match.
        out = git(self._root, "check-ignore", "--no-index", "-z", "--stdin", stdin=join(new), ok=(0, 1))
        return set(out.split("\0")[:-1])

    def _replaces(self, path: str) -> str | None:
        """What the tip has as a file where this path needs a folder."""
        return next((each for each in above(path) if each in self.tip), None)

    def blobs(self, paths: Iterable[str]) -> Tree:
        """What git itself would record for these files."""
        git(self._root, *LAX, "read-tree", "main", index=self._index)
        new = [path for path in paths if self._in_tip(self._replaces(path) or "") != GITLINK]
        add = ("update-index", "--add", "--replace", "-z", "--stdin")
        git(self._root, *LAX, *add, stdin=join(new), index=self._index)
        found: Tree = {}
        for line in git(self._root, "ls-files", "--stage", "-z", index=self._index).split("\0")[:-1]:
            about, _, path = line.partition("\t")
            mode, sha, _ = about.split()
            found[path] = (mode, sha)
        return found

    def settle(self, wanted: Wanted, ignored: set[str], places: Collection[str]) -> None:
        """Drop what is ignored, and from folders what a scheduled job declares."""
        for path in (wanted.files | wanted.gone) - set(places):
            lines = [*above(path), path]
            held = max((len(each) for each in lines if each in self.held), default=-1)
            if held >= max((len(each) for each in lines if each in places), default=0):
                wanted.on_hold.add(path)
        wanted.files -= wanted.on_hold
        wanted.gone -= wanted.on_hold
        wanted.ignored = wanted.files & ignored
        wanted.files -= ignored

    def is_missing(self, path: str, wanted: Wanted) -> bool:
        """Whether neither here, nor in git, there is or ever was anything at or below the path."""
        found = wanted.files | wanted.gone | wanted.rejected | wanted.ignored | wanted.on_hold
        return (
            not found and path not in self.ever and not any(one.startswith(f"{path}/") for one in self.ever)
        )

    def clashes(self, wanted: Wanted, declared: Collection[str]) -> set[str]:
        """Files that cannot be put where they are, which are dropped.

        They need a folder where the tip has a file that the job does not delete; or they would take the
        place of a folder in which something stays: on hold, a submodule. Then all of it stays,
        but for what the job itself says is gone.
        """
        needing = {
            path
            for path in wanted.files
            if (it := self._replaces(path)) is not None and it not in wanted.gone
        }
        burying = {
            path
            for path in wanted.files - needing
            if any(each.startswith(f"{path}/") and each not in wanted.gone for each in self.tip)
        }
        for path in burying:
            said = [each for each in declared if each.startswith(f"{path}/")]
            wanted.gone -= {
                each
                for each in wanted.gone
                if each.startswith(f"{path}/") and not any(_holds(one, each) for one in said)
            }
        wanted.files -= needing | burying
        return needing | burying

    def is_barren(self, folder: str, wanted: Wanted) -> bool:
        """Whether nothing in a folder may be published, though something is there."""
        under = f"{folder}/"
        refused = any(path.startswith(under) or path == folder for path in wanted.rejected | wanted.ignored)
        found = wanted.files | wanted.gone | wanted.on_hold
        carried = any(path.startswith(under) or path == folder for path in found)
        return refused and not carried and not self._below(folder)


def proper(declared: str) -> str | None:
    """The path, if its text is one that may be published at all."""
    path = declared.removesuffix("/")
    parts = path.split("/")
    if any(
        part in {"", ".", "..", ".git"} or part in BAD or "\udcff" in part or "\\" in part for part in parts
    ):
        return None
    inside = any(parts[: len(each)] == each for each in (folder.split("/") for folder in FOLDERS))
    return path if inside else None


def above(path: str) -> list[str]:
    """The folders that a path is in, the outermost first."""
    return [path[:i] for i, c in enumerate(path) if c == "/"]


def _holds(folder: str, path: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def put(tree: Tree, wanted: Wanted, blobs: Tree) -> Tree:
    """Return the tree after a commit of these changes."""
    left = {path: blob for path, blob in tree.items() if path not in wanted.gone}
    return left | {path: blobs[path] for path in wanted.files}
