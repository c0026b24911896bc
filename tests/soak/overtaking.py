"""A remote that moved ahead, for the proof in `oracle`: who pushed there, and what becomes of a job then.

As `bystander`, it shares no code with the worker: lines are merged by `git merge-file`, file by file, and
what both sides want of one name is decided by what each of them changed.
"""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from soak.bystander import GITLINK, LAX, Blob, Tree, Wanted, above
from soak.grove import BAD, FOLDERS, GOOD

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from soak.place import Place

_LINK = "120000"


class Colleague:
    """Somebody with a clone of their own, who has pushed, and of whom this site knows nothing yet."""

    def __init__(self, place: Place, dice: random.Random) -> None:
        self._place = place
        self._dice = dice
        self._index = {"GIT_INDEX_FILE": str(place.root / "colleague.index")}

    def push(self, tip: Tree, here: Sequence[str]) -> None:
        """A commit of a few changes, of what is tracked and of what lies untracked in the site."""
        self._ask(*LAX, "read-tree", "main")
        names = [*here, *(path for path in tip if any(path.startswith(f"{each}/") for each in FOLDERS))]
        for path in self._dice.sample(names, min(len(names), self._dice.choice([1, 3, 6]))):
            self._change(path, tip)
        tree = self._ask(*LAX, "write-tree").decode().strip()
        commit = self._ask("commit-tree", tree, "-p", "main", "-m", "Of somebody else").decode().strip()
        self._ask("update-ref", "refs/heads/main", commit)

    def _change(self, path: str, tip: Tree) -> None:
        parent, _, name = path.rpartition("/")
        was = tip.get(path)
        match self._dice.randrange(12):
            case 0 | 1 if was is not None:
                self._put(path, None)
            case 2:
                self._put(f"{path}/{self._dice.choice(GOOD)}", ("100644", self._blob(b"below\n")))
            case 3 if parent not in (*FOLDERS, "public"):
                self._put(parent, ("100644", self._blob(b"instead of a folder\n")))
            case 4 if was is not None and was[0].startswith("100"):
                self._put(path, ("100644" if was[0] == "100755" else "100755", was[1]))
            case 5:
                self._put(path, (_LINK, self._blob(b"../../other/secret")))
            case 6:
                self._put(path, (GITLINK, "2" * 40))
            case 7:
                self._put(f"{parent}/{self._dice.choice((*GOOD, *BAD))}", ("100644", self._blob(b"beside\n")))
            case 8:
                self._put(f"{parent}/{name.swapcase()}", ("100644", self._blob(b"in another case\n")))
            case _ if was is not None and was[0].startswith("100"):
                self._put(path, (was[0], self._blob(self._edited(self._ask("cat-file", "blob", was[1])))))
            case _:
                self._put(path, ("100644", self._blob(self._edited(b""))))

    def _edited(self, content: bytes) -> bytes:
        lines = content.splitlines(keepends=True)
        new = b"of somebody else, %d\n" % self._dice.randrange(100)
        match self._dice.randrange(3):
            case 0:
                return new + content
            case 1 if lines:
                lines[self._dice.randrange(len(lines))] = new
                return b"".join(lines)
            case _:
                return content + new

    def _put(self, path: str, blob: Blob | None) -> None:
        if "\udcff" in path or "\n" in path:
            return
        mode, sha = blob or ("0", "0" * 40)
        line = f"{mode} {sha}\t".encode() + os.fsencode(path) + b"\0"
        self._ask(*LAX, "update-index", "--add", "--replace", "-z", "--index-info", stdin=line)

    def _blob(self, content: bytes) -> str:
        return self._ask("hash-object", "-w", "--stdin", stdin=content).decode().strip()

    def _ask(self, *args: str, stdin: bytes = b"") -> bytes:
        return self._place.ask(*args, cwd=self._place.remote, stdin=stdin, env=self._index)


def put(place: Place, tree: Tree, wanted: Wanted, blobs: Tree, tip: Tree) -> Tree | None:
    """The tree after a commit of these changes, which were made on `tip`; None where both sides clash."""
    after = dict(tree)
    for path in wanted.gone & tree.keys():
        if tree[path][0] == GITLINK or tree[path][1] != tip[path][1]:
            return None
        del after[path]
    for path in wanted.files:
        theirs, ours, base = tree.get(path), blobs[path], tip.get(path)
        if theirs != base and (ours == base or _is_moot(ours, base, theirs)):
            continue  # only the others changed it
        in_the_way = {each for each in above(path) if each in tree}
        in_the_way |= {each for each in tree if each.startswith(f"{path}/")}
        if not wanted.gone >= in_the_way:
            return None
        both = merged(place, ours, base, theirs)
        if both is None:
            return None
        after[path] = both
    return after


def _is_moot(ours: Blob, base: Blob | None, theirs: Blob | None) -> bool:
    """Whether our change is but of the mode, of what they have removed or made something else.

    Git itself calls it a conflict. But no word of the author's is in it, so the job publishes the rest.
    """
    return base is not None and ours[1] == base[1] and (theirs is None or theirs[0] in (_LINK, GITLINK))


def merged(place: Place, ours: Blob, base: Blob | None, theirs: Blob | None) -> Blob | None:
    """One file that we have changed, and they maybe as well."""
    if theirs == base:
        return ours
    if theirs is None or theirs[0] in (_LINK, GITLINK):
        return None
    # Of a file that both made, theirs counts: they were first.
    mode = theirs[0] if base is None or ours[0] == base[0] else ours[0]
    for sha, other in ((ours[1], theirs[1]), (theirs[1], ours[1])):
        if other in (sha, base and base[1]):
            return mode, sha
    files = []
    for name, blob in (("ours", ours), ("base", base), ("theirs", theirs)):
        file = place.root / f"merge-{name}"
        # What was staged is in the repository by now, as the worker has run.
        file.write_bytes(place.ask("cat-file", "blob", blob[1]) if blob else b"")
        files.append(str(file))
    done = subprocess.run(["git", "merge-file", "-p", "-q", *files], capture_output=True, check=False)
    if done.returncode != 0:
        return None
    return mode, place.git("hash-object", "-w", "--stdin", "--no-filters", stdin=done.stdout)
