"""One repository, one branch, one remote: its state, its refs, and its objects."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from briter_worker.errors import FailureCode, PublishError, UsageError
from briter_worker.git.locks import LockFiles, remove_temporary

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from briter_worker.git.run import Git

PRIVATE = "refs/briter"
"""Every ref below is the worker's own."""
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
_VALUE = re.compile(rb"([0-9a-f]{64}|[0-9a-f]{40})(?:\s|\Z)")
_SYMBOLIC = re.compile(rb"ref:\s*(refs/[^\s\0]+)\s*\Z")
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
_MAX_PACKS = 10
_NAMED = 10

Move = tuple[str, str | None, str | None]
"""A ref, its new value (None: delete it), and the value it must have (None: any; empty: none yet)."""


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
        self._head: object = None
        self._listed: tuple[str, dict[str, Entry | None]] = ("", {})
        """A commit, and what its tree has at the paths asked for so far."""
        self._last_built: tuple[str, str] | None = None
        """A commit of the remote, and one that was built on it: git need not be asked."""
        self._is_working = False
        self._pushed: str | None = None
        """Value of `pushed_ref` in a cluster's clone, once it is read: nobody else moves it there."""
        self.locks = LockFiles(git, self.own_refs, (self.branch_ref, self.tracking_ref))

    def check(self) -> None:
        """Raise PublishError unless the repository is ready for a publication. The remote is not asked."""
        self.check_owner()
        self._head = self._check_head()
        self.check_remote()

    def check_unmoved(self) -> None:
        """Raise PublishError if another branch was checked out since `check`, if only for a moment.

        Files that were read meanwhile may be that branch's.
        """
        if self._check_head() != self._head:
            fix = f"leave the site on {self.branch}; the worker tries again by itself"
            text = "another branch was checked out while the posts were read"
            raise PublishError(FailureCode.WRONG_BRANCH, text, fix)

    def _check_head(self) -> object:
        """Return what changes whenever git switches branches: it rewrites HEAD; a commit does not."""
        if self.git.worktree is None:
            return None
        status = (self.git.git_dir / "HEAD").stat()
        self.check_branch()
        self.check_under_way()
        return status.st_ino, status.st_mtime_ns

    def check_branch(self) -> None:
        """Raise PublishError unless the configured branch is checked out, with a commit."""
        message, fix = f"the branch {self.branch} has no commit yet", "commit and push once by hand"
        if (current := self.head_ref()) != self.branch_ref:
            found = f"the branch {current[11:]} is checked out" if current else "HEAD is detached"
            message = f"{found}, and the worker publishes {self.branch}"
            fix = f"git switch {self.branch}, or set BRITER_GIT_BRANCH"
        elif self.ref(self.branch_ref) is not None:
            return
        raise PublishError(FailureCode.WRONG_BRANCH, message, fix)

    def head_ref(self) -> str:
        """Return the ref that is checked out; empty where HEAD is detached, or damaged since."""
        with suppress(AssertionError, TypeError, ValueError):
            return str(self.git.repo.head.reference.path)
        return ""

    def check_under_way(self) -> None:
        """Raise PublishError while a merge, a rebase or the like is under way."""
        for name, (what, fix) in _IN_PROGRESS.items():
            if (self.git.git_dir / name).exists():
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
        """Return the object a ref points to, or None. Raises PublishError when the ref is damaged.

        Without git, as a drain asks for many; and without GitPython, for which a ref that cannot be read is
        missing.
        """
        if name == self.pushed_ref and self._pushed is not None:
            return self._pushed
        path = self.git.common_dir / name
        try:
            content = path.read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return self._packed_ref(name)
        except OSError as error:
            raise PublishError.from_os(f"{name} cannot be read", error) from error
        if value := _VALUE.match(content):
            if name == self.pushed_ref and self.git.worktree is None:
                self._pushed = value[1].decode()
            return value[1].decode()
        if target := _SYMBOLIC.match(content):
            return self.ref(os.fsdecode(target[1]))
        if name.startswith(f"{PRIVATE}/"):  # emptied by a power cut: it must not stop the posts
            path.unlink(missing_ok=True)
            return self._packed_ref(name)
        log = shlex.quote(str(self.git.common_dir / "logs" / name))
        repair = f'git update-ref {name} "$(tail -n 1 {log} | cut -d" " -f2)"'
        if name == self.tracking_ref:
            repair = f"git fetch {self.remote}"
        text, fix = f"{path} is damaged: it holds no commit", f"rm {shlex.quote(str(path))} && {repair}"
        raise PublishError(FailureCode.CORRUPT, text, fix)

    def _packed_ref(self, name: str) -> str | None:
        try:
            packed = (self.git.common_dir / "packed-refs").read_bytes()
        except FileNotFoundError:
            return None
        before, found, _ = packed.partition(b" %s\n" % os.fsencode(name))
        return before.rpartition(b"\n")[2].decode() if found else None

    def update_refs(self, *moves: Move) -> None:
        """Move refs, all or none."""
        if self.git.worktree is None:  # a clone that is locked, and thrown away if damaged
            self._write_refs(moves)
            return
        stdin = "".join(f"{move_line(move)}\n" for move in moves)
        command = ("update-ref", "-m", "briter: publish", "--stdin")
        self.git.run(*command, stdin=stdin.encode())

    def _write_refs(self, moves: Iterable[Move]) -> None:
        self._pushed = None
        for name, new, _ in moves:
            path = self.git.common_dir / name
            if new is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                # In place: ext4 writes what replaces a file to the disk at once. All values have one length.
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "w") as file:
                    file.write(f"{new}\n")

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
        # By the remote's name: with a URL, git would write a section for that into the configuration.
        self._fetch(self.remote, "--unshallow", "--filter=tree:0")
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

    def push_side(self) -> str:
        """Return what to ask for the branch: the remote's name, or its push address where that is another.

        What a fetch address lacks is no rewritten history: it may be a replica some seconds behind. So the
        branch is read where it is pushed to.
        """
        keys = {key for key, _ in self.git.settings}
        has_rewrite = any(key.startswith("url.") and key.endswith(".pushinsteadof") for key in keys)
        if not has_rewrite and f"remote.{self.remote}.pushurl" not in keys:
            return self.remote
        pushed = os.fsdecode(self.git.run("remote", "get-url", "--push", self.remote)).rstrip("\n")
        fetched = os.fsdecode(self.git.run("remote", "get-url", self.remote)).rstrip("\n")
        return self.remote if pushed == fetched else pushed

    def remote_tip(self) -> str | None:
        """Ask the remote where the branch is; None where it has no such branch."""
        out = self.git.run("ls-remote", _UPLOAD, "--", self.push_side(), self.branch_ref)
        lines = (line.partition("\t") for line in out.decode(errors="replace").splitlines())
        return next((sha for sha, _, name in lines if name == self.branch_ref), None)

    def fetch(self) -> str:
        """Fetch the branch and return the remote's tip. Moves no ref that a user looks at."""
        self.ref(self.fetched_ref)  # removes a damaged one, which git would not move
        self._fetch(self.push_side())
        return cast("str", self.ref(self.fetched_ref))

    def _fetch(self, source: str, *options: str) -> None:
        command = ("--progress", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--refmap=")
        refspec = f"+{self.branch_ref}:{self.fetched_ref}"
        status, _, said = self.git.attempt("fetch", *options, *command, _UPLOAD, "--", source, refspec)
        if status and "couldn't find remote ref" in said:
            raise self.no_branch_error()
        if status:
            raise self.git.failure(["fetch"], said, status)

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
        """Lock the repository, read the configuration again, and remove stale lock files of git.

        The lock keeps a worker and `pull` apart; a cluster's clone has one of its own. `patience`: as
        `Git.locked`. Raises PublishError.
        """
        if self._is_working:
            yield
            return
        with ExitStack() as stack:
            # A cluster's clone is read, locked and cleared when it is opened.
            if self.git.worktree is not None:
                self.git.refresh()
                # Of this work tree alone: a worker in another linked one has its own.
                stack.enter_context(self.git.locked(self.git.own_dir / "lock", patience))
                stack.enter_context(self.locks.marked())
            self._is_working = True
            try:
                yield
            finally:
                self._is_working = False
                self.git.end_begun()

    def tidy(self, now: float, keep: Collection[str] = ()) -> None:
        """Remove old temporary files and unused private refs, and roll up small packs. Raises PublishError.

        `keep` has the refs that recorded plans name. Call it inside `working`.
        """
        remove_temporary(self.git, now)
        out = self.git.run("for-each-ref", "--format=%(refname)", f"{self.own_refs}/batch/")
        # A batch that no plan names is of a worker that died before it had one.
        if unused := set(out.decode().split()) - set(keep):
            self.update_refs(*((name, None, None) for name in unused))
        # Objects shared with another repository, or still on the remote, are left to `git gc`.
        objects = self.git.common_dir / "objects"
        kinds = [path.suffix for path in objects.glob("pack/pack-*")]
        shared = (objects / "info" / "alternates").exists() or ".promisor" in kinds
        if not shared and kinds.count(".pack") >= _MAX_PACKS:
            # Keeps every object, whether referred to or not, at the cost of the small packs alone.
            limits = ("-c", "pack.threads=1", "-c", "pack.windowMemory=64m", "-c", "gc.bigPackThreshold=0")
            command = ("repack", "--geometric=2", "-d", "-q", "--no-write-bitmap-index")
            self.git.run(*limits, *command)


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


def move_line(move: Move) -> str:
    """Return the line with which `git update-ref --stdin` makes the move."""
    name, new, old = move
    must = "0" * len(new or "") if old == "" else old or ""
    return (f"update {name} {new} {must}" if new else f"delete {name} {must}").rstrip()


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
