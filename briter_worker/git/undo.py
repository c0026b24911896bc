"""Bring the files of a post back to an earlier version, and show what a publication changed.

An undo is an edit as the CMS makes one: the files change in the work tree, and a job publishes them. So a
worker may run meanwhile. Neither the index nor a ref changes.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import closing, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, cast

import filelock

from briter_worker.allowlist import PathRefusedError, normalized, parents
from briter_worker.errors import DeclinedError, UsageError, one_line
from briter_worker.git.index import hash_files
from briter_worker.git.repository import DIFF_TREE, FOLDER, LINK, SUBMODULE, blob_of, name_some, read_raw
from briter_worker.git.work_tree import WorkTree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from briter_worker.allowlist import Allowlist
    from briter_worker.git.repository import Entry, Repository
    from briter_worker.git.run import Git

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
LOCK_NAME = "undo.lock"
_SHOWN = 50
"""Files of which a page shows the differences."""
_MAX_SHOWN_BYTES = 20 << 20
_MAX_TEXT = 1 << 20
"""With more text than this, a page shows the sizes only."""
_PATCH_HEADER = re.compile(r"^diff --git .*\n", re.MULTILINE)
_KIND_DIGITS = 3
"""Digits of a mode that tell files, links and submodules apart."""
_LOCK_TIMEOUT_S = 30.0
_Versions = dict[str, "Entry | None"]
_Stats = dict[str, os.stat_result | None]


class FileDifference(NamedTuple):
    """What a publication changed in one file."""

    path: str
    sizes: tuple[int | None, int | None]
    """In bytes, before and after; None where there is no file."""
    words: Sequence[tuple[str, str]]
    """Parts of the text, each marked as same (` `), removed (`-`), added (`+`) or left out (`@`)."""


def difference(repository: Repository, commit: str) -> str:
    """Return what a publication changed, as git shows it. Raises DeclinedError for an unknown commit."""
    _check_published(repository, commit)
    return _diff(repository, commit, "--patch-with-stat", "-M").decode(errors="replace")


def differences(repository: Repository, commit: str) -> list[FileDifference]:
    """Return what a publication changed, by words, of its first files. Raises as `difference`."""
    _check_published(repository, commit)
    raw = repository.git.fields(*DIFF_TREE, "--raw", "--no-commit-id", "--no-abbrev", commit)
    entries = {path: (old, new) for _, path, old, new in read_raw(raw)}
    shown = dict(islice(entries.items(), _SHOWN))
    if not shown:
        return []
    patches = iter(_read_patches(repository, commit, list(shown)))
    sizes = iter(_read_sizes(repository, chain.from_iterable(shown.values())))
    found = []
    for path, (old, new) in shown.items():
        old_size, new_size = next(sizes), next(sizes)
        words = []
        for patch in islice(patches, _patch_count(old, new)):
            words += _words_of(patch)
        found.append(FileDifference(path, (old_size, new_size), words))
    return found


def _read_patches(repository: Repository, commit: str, paths: Sequence[str]) -> list[str]:
    """Return the patches of the files by words, in git's order; all empty if they are too long for a page."""
    options = ("-r", "--patch", "--word-diff=porcelain", "--unified=2")
    text = _diff(repository, commit, *options, paths=paths).decode(errors="replace")
    patches = _PATCH_HEADER.split(text)[1:]
    if len(text) > _MAX_TEXT:
        return [""] * len(patches)
    return patches


def _read_sizes(repository: Repository, versions: Iterable[Entry | None]) -> list[int | None]:
    """Return the size of each version in bytes; None where there is no file, or no blob."""
    asked = "".join(f"{blob_of(version)}\n" for version in versions)
    out = repository.git.run("cat-file", "--batch-check=%(objectsize)", stdin=asked.encode()).decode()
    return [int(line) if line.isdigit() else None for line in out.splitlines()]


def _patch_count(old: Entry | None, new: Entry | None) -> int:
    """Return how many patches git prints for a path.

    Where a file, a link or a submodule takes the place of another kind, git prints a deletion first.
    """
    if old is None or new is None:
        return 1
    return 1 if old.mode[:_KIND_DIGITS] == new.mode[:_KIND_DIGITS] else 2


def _words_of(patch: str) -> list[tuple[str, str]]:
    words = []
    for line in patch.partition("\n@@")[2].split("\n")[1:]:
        mark, text = line[:1], line[1:]
        if mark in {"~", "@"}:
            words.append((" ", "\n") if mark == "~" else ("@", ""))
        elif mark in {" ", "-", "+"}:
            words.append((mark, text))
    return words


def file_of(repository: Repository, commit: str, path: str, *, before: bool) -> bytes:
    """Return a file as a publication's commit has it, or as it was before. Raises DeclinedError."""
    _check_published(repository, commit)
    entry = repository.entries(f"{commit}^" if before else commit, [path]).get(path)
    size = repository.git.run("cat-file", "-s", entry.blob) if entry else b""
    if entry is None or int(size) > _MAX_SHOWN_BYTES:
        raise DeclinedError(
            f"{one_line(path, 80)!r} is no file of at most {_MAX_SHOWN_BYTES >> 20} MiB there"
        )
    return repository.blob(entry.blob)


def _diff(repository: Repository, commit: str, *options: str, paths: Sequence[str] = ()) -> bytes:
    command = ["--literal-pathspecs", "-c", "core.quotePath=false"]
    if paths:  # for a page: of larger files the sizes are enough
        command += ["-c", "core.bigFileThreshold=256k"]
    plain = ("--no-commit-id", "--no-ext-diff", "--no-textconv")
    return repository.git.run(*command, "diff-tree", *plain, *options, commit, "--", *paths)


@contextmanager
def restored(
    repository: Repository,
    allowlist: Allowlist,
    commits: Sequence[str],
    to: str | None = None,
    *,
    scheduled: Collection[str] = (),
) -> Iterator[dict[str, Entry | None]]:
    """Bring the files to their version before the last publication, or at `to`; yield these versions.

    `commits` are the post's publications, newest first. `scheduled` are the paths that scheduled jobs
    declare. A file that is neither as published nor restored already is the CMS's edit. Raises DeclinedError
    and UsageError, with nothing changed. Until the context ends, `watch` does not look at the files.
    """
    repository.check()
    last = commits[0]
    tip, goal = _find_goal(repository, last, to)
    paths = _changed_paths(repository, commits, goal)
    wanted, now = _versions(repository, goal, paths), _versions(repository, tip, paths)
    if wanted == now:
        raise DeclinedError(
            f"the remote has the version of {goal[:10]} already", "choose another version: --to COMMIT"
        )
    check_allowed(allowlist, paths)
    check_not_scheduled(scheduled, paths)
    published = _versions(repository, last, paths)
    # What only the remote has changed since is dropped on request alone.
    known = (wanted, published, now) if to else (wanted, published)
    folder = repository.git.state_dir
    with (
        filelock.FileLock(folder / LOCK_NAME, timeout=_LOCK_TIMEOUT_S),
        closing(WorkTree(cast("Path", repository.git.worktree), folder / "undo-files")) as work_tree,
    ):
        _put_files(repository, work_tree, known)
        yield wanted


def check_allowed(allowlist: Allowlist, paths: Iterable[str]) -> None:
    """Raise DeclinedError if one of the files that an undo restores may not be published now."""
    for path in paths:
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            fix = "allow the path (BRITER_ALLOWED_PATHS), or restore it with git"
            raise DeclinedError(f"{path} may not be published now: {refused.reason}", fix) from None


def check_not_scheduled(scheduled: Iterable[str], paths: Iterable[str]) -> None:
    """Raise DeclinedError if a scheduled job declares one of the files that an undo restores."""
    declared = {normalized(path) for path in scheduled}
    for path in paths:
        if not declared.isdisjoint((path, *parents(path))):
            fix = "briter-worker list --status scheduled; cancel that job, or undo when it is published"
            raise DeclinedError(f"{path} belongs to a scheduled post", fix)


def versions_to_restore(
    repository: Repository, last: str, to: str | None, paths: Collection[str]
) -> dict[str, tuple[Entry | None, Entry | None]]:
    """Return the version before the publication `last`, or at `to`, of each path; and the published one.

    Raises DeclinedError and UsageError.
    """
    _, goal = _find_goal(repository, last, to)
    wanted, published = _versions(repository, goal, paths), _versions(repository, last, paths)
    return {path: (wanted[path], published[path]) for path in paths if wanted[path] != published[path]}


def _check_published(repository: Repository, commit: str) -> str:
    """Return the remote's tip as last seen. Raises DeclinedError if the publication is not part of it."""
    if repository.git.worktree is None:  # git would fetch an unknown commit with its whole history
        repository.complete_history()
    tip = repository.ref(repository.pushed_ref) or repository.ref(repository.tracking_ref)
    if tip is None or not _COMMIT.fullmatch(commit) or not repository.is_ancestor(commit, tip):
        text = f"the publication {commit[:10]} is not on {repository.branch} of {repository.remote}"
        raise DeclinedError(text, f"git fetch {repository.remote}; or save the post again")
    return tip


def _find_goal(repository: Repository, last: str, to: str | None) -> tuple[str, str]:
    """Return the remote's tip as last seen, and the commit to go back to."""
    tip = _check_published(repository, last)
    revision = (to or f"{last}^").replace("\0", " ")
    command = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    commit = repository.git.attempt(*command)[1].decode().strip()
    if not commit and not to:
        text = f"nothing was on the branch before the publication {last[:10]}"
        raise DeclinedError(text, "git fetch --unshallow if the clone is shallow; else delete the files")
    if not commit or not repository.is_ancestor(commit, tip):
        raise UsageError(
            f"--to is {to!r}, which is no commit of {repository.branch} that this repository knows",
            f"choose one of: git log {repository.remote}/{repository.branch}",
        )
    return tip, commit


def _changed_paths(repository: Repository, commits: Sequence[str], goal: str) -> list[str]:
    """Return the paths that the last publication changed, and those of earlier ones since `goal`."""
    since = set(repository.git.run("rev-list", f"{goal}..{commits[0]}", "--").decode().split())
    stdin = "".join(f"{each}\n" for each in commits if each in since or each == commits[0])
    command = (*DIFF_TREE, "--stdin", "--name-only", "--no-commit-id")
    return sorted({*repository.git.fields(*command, stdin=stdin.encode())})


def _versions(repository: Repository, commit: str, paths: Collection[str]) -> _Versions:
    entries = repository.entries(commit, paths)
    if special := [path for path, entry in entries.items() if entry.mode in (FOLDER, LINK, SUBMODULE)]:
        raise DeclinedError(f"{special[0]} is no file in {commit[:10]}", "restore it with git")
    return {path: entries.get(path) for path in paths}


def _put_files(repository: Repository, work_tree: WorkTree, known: Sequence[_Versions]) -> None:
    """Bring all files, or none, to the first of the known versions. Raises DeclinedError for an edit."""
    work_tree.clear_temporary()  # of an undo that was killed
    git, length = repository.git, len(str(repository.ref(repository.branch_ref)))
    versions = {path: {blob_of(each[path]): each[path] for each in known} for path in known[0]}
    stats: _Stats = {}
    blobs: dict[str, str | None] = {}
    for path in versions:
        try:
            stats[path], blobs[path] = work_tree.read(path, length)
        except OSError as error:
            raise _edited([path]) from error
    # Git may convert a file on its way in.
    others = [path for path, blob in blobs.items() if blob and blob not in versions[path]]
    blobs.update(zip(others, hash_files(git, others), strict=True))
    if edited := [path for path, blob in blobs.items() if blob not in versions[path]]:
        raise _edited(edited)
    found = {path: versions[path][blob] for path, blob in blobs.items()}
    done: list[str] = []
    try:
        _write(
            git,
            work_tree,
            {path: known[0][path] for path in found if known[0][path] != found[path]},
            stats,
            done,
        )
    except BaseException:
        stats = {path: work_tree.read(path)[0] for path in done}
        _write(git, work_tree, {path: found[path] for path in done}, stats, [])
        raise


def _write(git: Git, work_tree: WorkTree, files: _Versions, stats: _Stats, done: list[str]) -> None:
    """Replace the files, removals first: a file may take a folder's place. `done` names the replaced ones."""
    copies = {}
    for path, entry in files.items():
        if entry is None:
            continue
        command = ("cat-file", "--filters", f"--path={path}", entry.blob)
        content = io.BytesIO(git.run(*command))
        is_executable = entry.mode == "100755"
        copies[path] = work_tree.copy_beside(path, content, executable=is_executable, like=stats[path])
    for path in sorted(files, key=lambda path: path in copies):
        if not work_tree.put(copies.get(path), path, stats[path]):
            raise _edited([path])
        done.append(path)


def _edited(paths: Sequence[str]) -> DeclinedError:
    return DeclinedError(
        f"{name_some(paths)} changed since the publication; nothing was changed",
        "save the post to publish the changes, then undo; a change of the remote alone: undo --to COMMIT",
    )
