"""One repository, one branch, one remote: its state, its refs, and its objects."""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from briter_worker.errors import FailureCode, PublishError, UsageError
from briter_worker.git.locks import LockFiles, remove_temporary
from briter_worker.git.packs import roll_up_packs
from briter_worker.git.refs import PRIVATE, Refs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.git.refs import Move
    from briter_worker.git.run import Git

FOLDER, LINK, SUBMODULE = "040000", "120000", "160000"
COMMIT_MARK = "\x01"
"""Begins what `read_raw` yields of each commit."""

_IN_PROGRESS = {
    "MERGE_HEAD": ("a merge", "git merge --abort, or finish it with git commit"),
    "rebase-merge": ("a rebase", "git rebase --abort, or git rebase --continue"),
    "rebase-apply": ("a rebase or git am", "git rebase --abort, or git am --abort"),
    "CHERRY_PICK_HEAD": ("a cherry-pick", "git cherry-pick --abort, or --continue"),
    "REVERT_HEAD": ("a revert", "git revert --abort, or --continue"),
    "BISECT_LOG": ("a bisect", "git bisect reset"),
}
_MAX_REFLOG = 100
_REFLOG_ENTRY = re.compile(r"^HEAD@\{(\d+) [+-]\d+\} (.*)$", re.MULTILINE)
_SWITCH = "checkout: moving from "
_UPLOAD = "--upload-pack=git-upload-pack"
"""Given each time: the repository's configuration may name another program, which git would run."""
FAST_IMPORT = ("-c", "core.ignoreCase=false", "-c", "pack.compression=1", "fast-import", "--quiet")
"""Begun early, so that it is ready to answer where something is in a tree, and then to write the commits.

With core.ignoreCase, it would write a file to another one whose name differs in case only. Trees consist of
digests, which a higher level hardly compresses, in three times the time.
"""
DIFF_TREE = ("diff-tree", "-r", "-z", "--no-renames", "--no-ext-diff", "--no-textconv")
COUNT_LINES = (*DIFF_TREE, "--numstat")
_VERY_FEW_PATHS = 12
_FEW_PATHS = 100
"""Git compares each entry of a folder with each path, so that for more paths all entries are listed."""
_NAMED = 10


@dataclass(slots=True)
class Entry:
    """Entry of a tree at a path: a file, a link, a folder or a submodule."""

    mode: str
    blob: str
    content: bytes | None = field(default=None, compare=False, repr=False)
    """Given for a new file, whose blob the repository may lack."""


def blob_of(entry: Entry | None) -> str | None:
    """Return the blob of a tree's entry; None for no entry."""
    return entry.blob if entry else None


class _Look(NamedTuple):
    """A look at the site before its files are read."""

    at: float
    stamp: tuple[int, ...] | None
    """The index: it changes whenever git writes it."""


class LocalCommit(NamedTuple):
    """A commit of the local branch that the remote lacks."""

    commit: str
    parent: str
    """Of a merge, all parents."""
    subject: str


class Repository:
    """The branch in this repository and on its remote."""

    def __init__(self, git: Git, *, branch: str, remote: str) -> None:
        self.git = git
        self.branch = git.branch = branch
        self.remote = remote
        self.branch_ref = f"refs/heads/{branch}"
        self.tracking_ref = f"refs/remotes/{remote}/{branch}"
        # As one part of a name: the refs of the branches `a` and `a/pushed` must not collide.
        self.own_refs = f"{PRIVATE}/branches/{branch.replace('%', '%25').replace('/', '%2F')}"
        """Prefix of the worker's refs for this branch; git checks out no branch in two work trees."""
        self.pushed_ref = f"{self.own_refs}/pushed"
        """The remote's tip as the worker saw it last."""
        self.fetched_ref = f"{self.own_refs}/fetched"
        self.refs = Refs(git, self.branch_ref, self.tracking_ref, self.own_refs)
        self._looked: _Look | None = None
        """Time of the last check of the site, and the index then."""
        self._listed: tuple[str, dict[str, Entry | None]] = ("", {})
        """A commit, and what its tree has at the paths asked for so far."""
        self._last_built: tuple[str, str] | None = None
        """A commit of the remote, and one that was built on it: git need not be asked."""
        self._is_working = False
        self.locks = LockFiles(git, self.own_refs, (self.branch_ref, self.tracking_ref))

    def check(self) -> None:
        """Raise PublishError unless the repository is ready for a publication. The remote is not asked."""
        self.check_owner()
        self._check_head()
        self.check_remote()

    def _check_head(self) -> None:
        if self.git.worktree is None:
            return
        self._looked = _Look(time.time(), self._index_stamp())
        self.refs.forget()
        self.check_branch()
        self.check_under_way()

    def check_unmoved(self) -> None:
        """Raise PublishError if another branch was checked out since `check`, if only for a moment.

        Files that were read meanwhile may be that branch's. Git writes the index whenever it changes files:
        while the index is the same, whatever is checked out has the same files.
        """
        if self._looked is None or self._index_stamp() == self._looked.stamp:
            return
        self.refs.forget()
        self.check_branch()
        self.check_under_way()
        if self._has_switched_since(self._looked.at):
            fix = f"leave the site on {self.branch}; the worker tries again by itself"
            text = "another branch was checked out while the posts were read"
            raise PublishError(FailureCode.WRONG_BRANCH, text, fix)

    def _index_stamp(self) -> tuple[int, ...] | None:
        with suppress(FileNotFoundError):
            status = (self.git.git_dir / "index").stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
        return None

    def _has_switched_since(self, moment: float) -> bool:
        """Return True if HEAD's reflog has a switch since then, or does not tell."""
        command = ("log", "--walk-reflogs", f"--max-count={_MAX_REFLOG}", "--date=raw", "--format=%gd %gs")
        status, out, _ = self.git.attempt(*command, "HEAD", "--")
        entries = _REFLOG_ENTRY.findall(out.decode(errors="replace"))
        since = [subject for at, subject in entries if int(at) >= int(moment)]
        is_known = status == 0 and bool(entries) and len(since) < _MAX_REFLOG
        return not is_known or any(subject.startswith(_SWITCH) for subject in since)

    def check_branch(self) -> None:
        """Raise PublishError unless the configured branch is checked out, with a commit."""
        message, fix = f"the branch {self.branch} has no commit yet", "commit and push once by hand"
        commit = self.ref(self.branch_ref)  # first: of a damaged branch git cannot say that it is checked out
        if (current := self.refs.head()) != self.branch_ref:
            found = f"the branch {current[11:]} is checked out" if current else "HEAD is detached"
            message = f"{found}, and the worker publishes {self.branch}"
            fix = f"git switch {self.branch}, or set BRITER_GIT_BRANCH"
        elif commit is not None:
            return
        raise PublishError(FailureCode.WRONG_BRANCH, message, fix)

    def check_under_way(self) -> None:
        """Raise PublishError while a merge, a rebase or the like is under way."""
        for name, (what, fix) in _IN_PROGRESS.items():
            if (self.git.git_dir / name).exists() or self.refs.has(name):
                text = f"{what} is under way in the site's repository"
                raise PublishError(FailureCode.UNFINISHED, text, fix)

    def check_owner(self) -> None:
        """Raise PublishError if git does not trust the repository's owner.

        With a --git-dir git does not check the owner, so it is asked where that matters.
        """
        places = filter(None, (self.git.git_dir, self.git.worktree))
        if self.git.worktree and {place.stat().st_uid for place in places} != {os.geteuid()}:
            self.git.run("rev-parse", "--git-dir", discover=True)

    def check_remote(self) -> None:
        """Raise PublishError unless the remote is configured, with one push address."""
        try:
            count = self.check_push_address()
        except UsageError as error:
            raise PublishError(FailureCode.REMOTE_MISSING, error.message, error.fix) from None
        if not count:
            fix = f"git remote add {self.remote} URL, or set BRITER_GIT_REMOTE"
            text = f"the repository has no remote named {self.remote}"
            raise PublishError(FailureCode.REMOTE_MISSING, text, fix)

    def check_push_address(self) -> int:
        """Return the number of push addresses. Raises UsageError if there is more than one."""
        urls = self.git.config_values(f"remote.{self.remote}.url")
        addresses = self.git.config_values(f"remote.{self.remote}.pushurl") or urls
        if len(addresses) > 1:
            raise UsageError(
                f"the remote {self.remote} has {len(addresses)} push addresses, and the worker pushes to one",
                f"git config --unset-all remote.{self.remote}.pushurl, and keep one remote.{self.remote}.url",
            )
        return len(addresses)

    # Refs

    def ref(self, name: str) -> str | None:
        """Return the object a ref points to, or None. Raises PublishError when the ref is damaged."""
        return self.refs.get(name)

    def update_refs(self, *moves: Move) -> None:
        """Move refs, all or none."""
        self.refs.update(moves)

    def know_built(self, base: str, tip: str, changes: Iterable[Mapping[str, Entry | None]]) -> None:
        """Note what was built on a commit of the remote: git need not be asked for that."""
        self._last_built = base, tip
        files = {path: file for each in changes for path, file in each.items()}
        # Where a file was deleted, a folder may be.
        self._listed = tip, {path: Entry(file.mode, file.blob) for path, file in files.items() if file}

    def is_ancestor(self, old: str, new: str) -> bool:
        """Return True if `new` contains `old`; False also where `old` is not known here."""
        if old == new or (old, new) == self._last_built:
            return True
        command = ("merge-base", "--is-ancestor", old, new)
        if self.git.attempt(*command)[0] == 0:
            return True
        return self.complete_history() and self.git.attempt(*command)[0] == 0

    def complete_history(self) -> bool:
        """Fetch the commits, without trees, that a shallow clone lacks. Return False if it lacks none."""
        if not (self.git.common_dir / "shallow").exists():
            return False
        self._fetch("--unshallow", "--filter=tree:0")
        return True

    def local_commits(self, *options: str) -> list[LocalCommit]:
        """Return the commits of the local branch that the remote lacks, newest first."""
        known = [name for name in (self.pushed_ref, self.tracking_ref) if self.ref(name)]
        if not known or self.ref(self.branch_ref) is None:
            return []
        command = ("log", "-z", "--topo-order", "--format=%H%n%P%n%s", *options, self.branch_ref)
        out = self.git.run(*command, "--not", *known, "--").decode(errors="replace")
        return [LocalCommit(*entry.split("\n", 2)) for entry in out.split("\0") if entry]

    # The remote

    def remote_tip(self) -> str | None:
        """Ask the remote where the branch is; None where it has no such branch."""
        out = self.git.run("ls-remote", _UPLOAD, "--", self.remote, self.branch_ref)
        lines = (line.partition("\t") for line in out.decode(errors="replace").splitlines())
        return next((sha for sha, _, name in lines if name == self.branch_ref), None)

    def fetch(self) -> str:
        """Fetch the branch and return the remote's tip. Moves no ref that a user looks at."""
        self.ref(self.fetched_ref)  # removes a damaged one, which git would not move
        self._fetch()
        return cast("str", self.ref(self.fetched_ref))

    def _fetch(self, *options: str) -> None:
        command = ("--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--refmap=")
        refspec = f"+{self.branch_ref}:{self.fetched_ref}"
        status, _, said = self.git.attempt("fetch", *options, *command, _UPLOAD, "--", self.remote, refspec)
        if status and "couldn't find remote ref" in said:
            raise self.no_branch_error()
        if status:
            raise self.git.failure(["fetch"], said, status)
        self.refs.forget()

    def no_branch_error(self) -> PublishError:
        """Return the failure for a remote without the branch."""
        return PublishError(
            FailureCode.REMOTE_REWRITTEN,
            f"the remote has no branch {self.branch} any more",
            f"git push {self.remote} {self.branch}, if it should be there; or check what answers at its "
            f"address: git ls-remote {self.remote}",
        )

    def check_not_rewritten(self, tip: str) -> None:
        """Raise PublishError if the remote's tip lacks what the worker has seen there.

        A user accepts the rewritten branch by moving the local branch to it.
        """
        pushed = self.ref(self.pushed_ref) or tip
        if self.is_ancestor(pushed, tip) or self.ref(self.branch_ref) == tip:
            return
        raise PublishError(
            FailureCode.REMOTE_REWRITTEN,
            f"the remote's {self.branch} no longer contains what it had ({pushed[:10]})",
            f"git push {self.remote} {pushed[:10]}:{self.branch}, to restore it; or accept the change: "
            f"git fetch && git status && git reset --keep {self.remote}/{self.branch}",
        )

    # Objects

    def entries(self, commit: str, paths: Collection[str]) -> dict[str, Entry]:
        """Return what the commit's tree has at these paths, folders included; absent paths are left out."""
        if self._listed[0] != commit:
            self._listed = (commit, {})
        listed = self._listed[1]
        if asked := [path for path in paths if path not in listed]:
            listed.update(dict.fromkeys(asked) | self._look_up(commit, asked))
        return {path: entry for path in paths if (entry := listed[path]) is not None}

    def _look_up(self, commit: str, paths: Sequence[str]) -> dict[str, Entry]:
        if len(paths) <= _VERY_FEW_PATHS:  # each takes as long as reading its folder
            questions = [b"ls %s %s\n" % (commit.encode(), quote_path(path)) for path in paths]
            if answers := self.git.ask(FAST_IMPORT, questions):
                found = zip(paths, (os.fsdecode(answer).split() for answer in answers), strict=True)
                return {path: Entry(words[0], words[2]) for path, words in found if words[0] != "missing"}
        if len(paths) <= _FEW_PATHS:
            return self._list_tree("-t", commit, "--", *paths)
        return self._list_tree("-r", "-t", commit, "--", *sorted({path.partition("/")[0] for path in paths}))

    def entries_below(
        self, commit: str, folders: Collection[str] = (), *, with_folders: bool = False
    ) -> dict[str, Entry]:
        """Return all files, links and submodules below these folders of the commit's tree; empty: of all."""
        wanted = [f"{folder}/" for folder in folders]
        if len(wanted) > _FEW_PATHS:
            wanted = sorted({f"{folder.partition('/')[0]}/" for folder in folders})
        return self._list_tree("-r", *(["-t"] if with_folders else []), commit, "--", *wanted)

    def changes(self, old: str, new: str) -> dict[str, tuple[Entry | None, Entry | None]]:
        """Return the files that differ between two commits, as both have them."""
        raw = self.git.fields(*DIFF_TREE, "--raw", "--no-abbrev", old, new)
        return {path: (before, after) for _, path, before, after in read_raw(raw)}

    def _list_tree(self, *args: str) -> dict[str, Entry]:
        command = ("--literal-pathspecs", "ls-tree", "-z", "--full-tree")
        found = {}
        for line in self.git.fields(*command, *args):
            about, _, path = line.partition("\t")
            mode, _, sha = about.split()
            found[path] = Entry(mode, sha)
        return found

    def blob(self, sha: str) -> bytes:
        """Return the content of a blob. Raises PublishError: CORRUPT if it is nowhere."""
        return self.blobs([sha])[0]

    def blobs(self, shas: Collection[str]) -> list[bytes]:
        """Return the contents of blobs, in their order. Raises PublishError as `blob` does."""
        stdin = "".join(f"{sha}\n" for sha in shas).encode()
        try:
            out = self.git.run("cat-file", "--batch", stdin=stdin)
        except PublishError as failure:
            # A blobless clone fetches each blob from the remote, which may not have it.
            if "promisor" in failure.message and (
                failure.code is FailureCode.INTERNAL
                or re.search("not our ref|unadvertised object", failure.message)
            ):
                raise _missing(next(iter(shas))) from failure
            raise
        found, at = [], 0
        for sha in shas:
            end = out.index(b"\n", at)
            kind, _, size = out[at:end].partition(b" ")[2].partition(b" ")
            if kind != b"blob":
                raise _missing(sha)
            at = end + 1 + int(size) + 1
            found.append(out[end + 1 : at - 1])
        return found

    @contextmanager
    def working(self, patience: float | None = None) -> Iterator[None]:
        """Keep a worker and `pull` apart inside, and list the refs once. A nested call does nothing more.

        On leaving, git commands that were started ahead and never used are ended. `patience`: as
        `Git.locked`. Raises PublishError.
        """
        if self._is_working:
            yield
            return
        with self.refs.kept(), self._work_tree_locked(patience):
            self._is_working = True
            try:
                yield
            finally:
                self._is_working = False
                self.git.end_begun()

    @contextmanager
    def _work_tree_locked(self, patience: float | None) -> Iterator[None]:
        """Read git's configuration again, then hold the work tree's lock inside, without stale lock files."""
        if self.git.worktree is None:  # a cluster's clone is read, locked and cleared when it is opened
            yield
            return
        self.git.refresh()
        # Of this work tree alone: a worker in another linked one has its own.
        with self.git.locked(self.git.own_dir / "lock", patience):
            self.refs.list_ahead()
            with self.locks.marked():
                yield

    def tidy(self, now: float, keep: Collection[str] = ()) -> None:
        """Remove old temporary files and unused private refs, and roll up small packs. Raises PublishError.

        `keep` has the refs that recorded plans name. Call it inside `working`.
        """
        remove_temporary(self.git, now)
        out = self.git.run("for-each-ref", "--format=%(refname)", f"{self.own_refs}/batch/")
        # A batch that no plan names is of a worker that died before it had one.
        if unused := set(out.decode().split()) - set(keep):
            self.update_refs(*((name, None, None) for name in unused))
        roll_up_packs(self.git)


def read_raw(fields: Iterable[str]) -> Iterator[tuple[str, str, Entry | None, Entry | None]]:
    """Yield path, old and new entry of what git prints with `--raw -z`, after the text of their commit.

    That is what the format has behind COMMIT_MARK; empty where there is no format.
    """
    commit, rest = "", iter(fields)
    for each in rest:
        text = each.lstrip("\n")
        if text.startswith(COMMIT_MARK):
            commit = text[1:]
        elif text:
            old_mode, new_mode, old_blob, new_blob, _ = text[1:].split(" ")
            old = Entry(old_mode, old_blob) if old_mode.strip("0") else None
            yield commit, next(rest), old, Entry(new_mode, new_blob) if new_mode.strip("0") else None


def name_some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def quote_path(path: str) -> bytes:
    """Return a path as `git fast-import` reads it."""
    escaped = os.fsencode(path).replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n")
    return b'"%s"' % escaped


def _missing(sha: str) -> PublishError:
    return PublishError(
        FailureCode.CORRUPT,
        f"the repository has no blob {sha}",
        "restore it from the remote (git fetch --refetch) or a backup; git fsck --full names what is missing",
    )
