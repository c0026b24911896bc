"""The refs that the worker looks at: read and moved by git, which keeps them in files or in tables."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from briter_worker.errors import FailureCode, PublishError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from briter_worker.git.run import Git

PRIVATE = "refs/briter"
"""Every ref below is the worker's own."""
_ROOT_REFS = ("HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")
"""Refs outside `refs/` that a reftable has, and no file: git can list them since it has reftables."""
_FORMAT = "--format=%(HEAD)%(refname) %(objectname)"
"""Behind one character: a star marks the branch that is checked out."""
_BROKEN = re.compile(r"^warning: ignoring broken ref (\S+)$", re.MULTILINE)

Move = tuple[str, str | None, str | None]
"""A ref, its new value (None: delete it), and the value it must have (None: any; empty: none yet)."""


class _Listed(NamedTuple):
    """The refs at one moment."""

    objects: dict[str, str]
    """By ref: the object that it points to."""
    broken: frozenset[str]
    """Refs of which git cannot read the value."""
    head: str
    """The ref that is checked out; empty where HEAD is detached."""


@dataclass(eq=False, repr=False)
class Refs:
    """The branch here and on the remote, the worker's own refs, and HEAD.

    Git lists all of them in one command. Inside `kept`, what was listed counts until `forget`: others may
    move the branch, its tracking ref and HEAD meanwhile, but not the worker's own refs.
    """

    _git: Git
    _branch_ref: str
    _tracking_ref: str
    _own_refs: str

    def __post_init__(self) -> None:
        self._listed: _Listed | None = None
        self._is_kept = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """List the refs once inside, unless `forget` is called."""
        if self._is_kept:
            yield
            return
        self.forget()
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            self.forget()

    def list_ahead(self) -> None:
        """Start git's list of the refs, which the next question reads, while the worker does other work."""
        self._git.begin(*self._command())

    def forget(self) -> None:
        """Drop the kept list: the next question lists the refs again."""
        self._listed = None

    def get(self, name: str) -> str | None:
        """Return the object that a ref points to, or None. Raises PublishError when a user's ref is damaged.

        A damaged ref of the worker's own, emptied by a power cut, is removed, and publishing goes on.
        """
        listed = self._list()
        if name not in listed.broken:
            return listed.objects.get(name)
        if not name.startswith(f"{PRIVATE}/"):
            raise self._damage_error(name)
        (self._git.common_dir / name).unlink(missing_ok=True)  # git deletes no ref that it cannot read
        self.forget()
        return self._list().objects.get(name)

    def _damage_error(self, name: str) -> PublishError:
        """Return the error for a damaged ref of the user's, with the commands that repair the ref."""
        if name == self._tracking_ref:
            repair = f"git fetch {self._git.remote}"
        else:
            log = shlex.quote(str(self._git.common_dir / "logs" / name))
            repair = f'git update-ref {name} "$(tail -n 1 {log} | cut -d" " -f2)"'
        path = self._git.common_dir / name
        fix = f"rm {shlex.quote(str(path))} && {repair}"
        return PublishError(FailureCode.CORRUPT, f"{path} is damaged: it holds no commit", fix)

    def head(self) -> str:
        """Return the ref that is checked out; empty where HEAD is detached, or its branch is damaged."""
        return self._list().head

    def has(self, name: str) -> bool:
        """Return True if there is such a ref, also one outside `refs/` that only a reftable has."""
        return name in self._list().objects

    def update(self, moves: Iterable[Move]) -> None:
        """Move refs, all or none."""
        moves = [*moves]
        stdin = "".join(f"{move_line(move)}\n" for move in moves)
        self._git.run("update-ref", "-m", "briter: publish", "--stdin", stdin=stdin.encode())
        self.note(moves)

    def note(self, moves: Iterable[Move]) -> None:
        """Update the kept list with what one of the worker's commands has moved."""
        if self._listed is None:
            return
        for name, new, _ in moves:
            if new is None:
                self._listed.objects.pop(name, None)
            else:
                self._listed.objects[name] = new

    def _list(self) -> _Listed:
        if self._listed is not None:
            return self._listed
        command = self._command()
        status, out, said = self._git.attempt(*command)
        if status:
            raise self._git.failure(command, said, status)
        objects: dict[str, str] = {}
        head = None
        for line in out.decode(errors="surrogateescape").splitlines():
            name, _, value = line[1:].partition(" ")
            objects[name] = value
            if line.startswith("*"):
                head = name
        if head is None and self._git.worktree is not None:
            head = self._ask_head()
        listed = _Listed(objects, frozenset(_BROKEN.findall(said)), head or "")
        if self._is_kept:
            self._listed = listed
        return listed

    def _command(self) -> tuple[str, ...]:
        patterns = (self._branch_ref, self._tracking_ref, f"{self._own_refs}/")
        if self._git.config("extensions.refStorage") == "reftable":
            return ("for-each-ref", "--include-root-refs", _FORMAT, *_ROOT_REFS, *patterns)
        return ("for-each-ref", _FORMAT, *patterns)

    def _ask_head(self) -> str:
        """Return the ref that HEAD names, also one that does not exist; empty where it names none."""
        out = self._git.attempt("symbolic-ref", "--quiet", "HEAD")[1]
        return out.decode(errors="surrogateescape").strip()


def move_line(move: Move) -> str:
    """Return the line with which `git update-ref --stdin` makes the move."""
    name, new, old = move
    must = "0" * len(new or "") if old == "" else old or ""
    return (f"update {name} {new} {must}" if new else f"delete {name} {must}").rstrip()
