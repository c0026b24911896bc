"""Traces of declared paths in git beside the remote's tip: history, stashes, files that git wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from briter_worker.allowlist import parents
from briter_worker.git.repository import DIFF_TREE, blob_of, read_raw

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

    from briter_worker.git.repository import Repository
    from briter_worker.git.run import Git

_FEW_PATHS = 100
"""Git compares each entry of a folder with each path, so that for more paths all names are listed."""
_LIST_NAMES = (
    *("--literal-pathspecs", "-c", "log.showRoot=true", "-c", "log.follow=false", "log", "--full-history"),
    *("-m", "--no-show-signature", "--format=", "--name-only", "--no-renames", "-z"),
)
"""`--full-history`: git leaves out a branch that added and deleted a file. `-m`: names of merges, too."""
_STASH_FORMAT = ("--no-show-signature", "--format=%H %ct %P")
_AUTOSTASH = "MERGE_AUTOSTASH"
"""The stash of `git merge --autostash` until the merge ends."""
_NO_UNTRACKED_PARENTS = 2


class Stash(NamedTuple):
    """A stash: what a user's git took out of the work tree."""

    name: str
    made_at: float
    versions: Mapping[str, str | None]
    """The stashed blob of each path that it changed (None: deleted), and of each untracked one."""


def paths_in_history(repository: Repository, paths: Collection[str]) -> set[str]:
    """Return which of the paths the remote's branch, or the local one, has or ever had.

    A shallow clone answers for the time since it was made: what it began with counts as added then.
    """
    names = (
        *(repository.pushed_ref, repository.fetched_ref),
        *(repository.tracking_ref, repository.branch_ref),
    )
    tips = [name for name in names if repository.ref(name)]
    if not paths or not tips:
        return set()
    wanted = sorted(paths)
    if len(wanted) > _FEW_PATHS:
        wanted = sorted({path.partition("/")[0] for path in wanted})
    is_one_question = len(wanted) == 1 == len(paths)
    limit = ["--max-count=1"] if is_one_question else []
    listed = repository.git.fields(*_LIST_NAMES, *limit, *tips, "--", *wanted)
    found: set[str] = set()
    for path in (each.lstrip("\n") for each in listed):
        found.update((path, *parents(path)))
    return found.intersection(paths)


def list_stashes(git: Git, since: float) -> Iterator[Stash]:
    """Yield the stashes that were made since then, also that of a merge which is under way, newest first."""
    for name, commit, made_at, stash_parents in _list_commits(git):
        if made_at < int(since):  # git counts whole seconds
            continue
        changed = git.fields(*DIFF_TREE, "--raw", "--no-abbrev", stash_parents[0], commit)
        versions = {path: blob_of(new) for _, path, _, new in read_raw(changed)}
        for untracked in stash_parents[_NO_UNTRACKED_PARENTS:]:
            for line in git.fields("ls-tree", "-r", "-z", "--full-tree", untracked):
                about, _, path = line.partition("\t")
                versions[path] = about.split()[2]
        yield Stash(name, made_at, versions)


def _list_commits(git: Git) -> Iterator[tuple[str, str, float, list[str]]]:
    """Yield name, commit, time and parents of each stash."""
    stashes = git.attempt("log", "--walk-reflogs", *_STASH_FORMAT, "refs/stash", "--")[1]
    named = [(f"stash@{{{number}}}", line) for number, line in enumerate(stashes.decode().splitlines())]
    if (git.git_dir / _AUTOSTASH).exists():
        out = git.attempt("log", "--no-walk", *_STASH_FORMAT, _AUTOSTASH, "--")[1]
        named += [(_AUTOSTASH, line) for line in out.decode().splitlines()]
    for name, line in named:
        commit, made_at, *stash_parents = line.split()
        if stash_parents:
            yield name, commit, float(made_at), stash_parents


def written_by_git(git: Git, root: Path, saved: Mapping[str, float]) -> set[str]:
    """Return the files that git itself has written since they were saved, by `git checkout` for example.

    Git's index then has the file's own time stamp. `saved`: the time of the save, by path.
    """
    later = [path for path, at in saved.items() if _modified_at(root / path) > at]
    if not later:
        return set()
    command = ("--literal-pathspecs", "ls-files", "-z", "--cached", "--", *later)
    changed = git.fields("--literal-pathspecs", "diff-files", "-z", "--name-only", "--", *later)
    return set(git.fields(*command)).intersection(later).difference(changed)


def conflicts_written_by_git(git: Git, root: Path, saved: Mapping[str, float]) -> set[str]:
    """Return the files into which git has written a conflict since they were saved, and nobody resolved it.

    `git stash pop`, `git checkout --merge` and `git cherry-pick --no-commit` end so, with nothing under way:
    the index has several versions of the file, and the file their lines between conflict markers. `saved`:
    the time of the save, by path.
    """
    # Whole milliseconds: many a CMS cuts off the rest of `createdAt`.
    later = {path for path, at in saved.items() if int(_modified_at(root / path) * 1000) > round(at * 1000)}
    if not later:
        return set()
    listed = git.fields("ls-files", "-z", "--unmerged")
    return later.intersection(line.partition("\t")[2] for line in listed)


def _modified_at(file: Path) -> float:
    try:
        return file.lstat().st_mtime
    except OSError:
        return 0.0
