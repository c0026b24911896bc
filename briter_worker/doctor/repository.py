"""The site's repository, and its remote."""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import State, error, ok, refused, tried, warning
from briter_worker.doctor.surroundings import writable
from briter_worker.errors import Failure, PublishError
from briter_worker.wiring import open_remote, open_site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from briter_worker.doctor.finding import Finding
    from briter_worker.git.site import Site
    from briter_worker.settings import Settings

_OLDEST_GIT = (2, 36)
_PATIENCE_MS = 30_000


def examine(settings: Settings) -> Iterator[Finding]:
    """All of it, as far as each step lets the next one look."""
    if shutil.which("git") is None:
        yield error("git", "git was not found", f"install git {_dotted(_OLDEST_GIT)} or newer")
        return
    # A person is waiting: a remote that hangs has less time than in a publication.
    settings = replace(settings, git_timeout_ms=min(settings.git_timeout_ms, _PATIENCE_MS))
    site = open_site(settings)
    worktree = tried("worktree", lambda: _worktree(site))
    yield worktree
    if worktree.state is State.ERROR:
        return
    yield _version(site)
    yield tried("ownership", lambda: _passed(site.check_owner, "git trusts the repository's owner"))
    yield tried("branch", lambda: _branch(site))
    yield tried(
        "unfinished", lambda: _passed(site.check_nothing_under_way, "no merge or rebase is under way")
    )
    yield from _locks(site)
    yield writable("repository", Path(site.commands.repo.common_dir, "objects"))
    yield ok("identity", f"commits are by {settings.git_author_name} <{settings.git_author_email}>")
    yield from _folders(settings, site)
    yield _storage(settings, site)
    yield _hooks(settings, site)
    yield from _large_files(site)
    yield _remote(site)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def _passed(check: Callable[[], None], message: str) -> str:
    check()
    return message


def _worktree(site: Site) -> str:
    if site.commands.repo.bare:
        raise PublishError(
            Failure.NOT_A_REPOSITORY,
            f"{site.commands.worktree} is a bare repository. "
            "Fix: point BRITER_GIT_WORKTREE at a clone with a work tree",
        )
    return f"{site.commands.worktree} is the top of a repository"


def _version(site: Site) -> Finding:
    try:
        said = site.commands.run("version").decode(errors="replace").strip()
    except PublishError as failure:
        return refused("git", failure)
    found = re.search(r"(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_GIT:
        return error("git", f"{said} is too old", f"install git {_dotted(_OLDEST_GIT)} or newer")
    return ok("git", said)


def _branch(site: Site) -> str:
    site.check_branch()
    return f"{site.branch} is checked out, at {site.tips().local[:10]}"


def _locks(site: Site) -> Iterator[Finding]:
    for path in site.locks():
        yield warning(
            "locks",
            f"{path} is there: a git command is running, or has left it",
            "end that command; the worker removes what is provably left over; else remove the file",
        )


def _folders(settings: Settings, site: Site) -> Iterator[Finding]:
    """Posts can only come from these; that some of an adapter's are missing is usual, of one's own not."""
    there = []
    for folder in settings.folders:
        path = settings.git_worktree / folder
        if problem := _unpublishable(settings.git_worktree, folder):
            yield error("folders", f"nothing in {folder}/ is published: {problem}", "make it a plain folder")
        elif not path.is_dir():
            if folder in settings.allowed_paths:
                yield warning(
                    "folders", f"{folder}/ is not there", "make it, or correct BRITER_ALLOWED_PATHS"
                )
        else:
            there.append(folder)
            if _ignores(site, folder, f"{folder}/post.md"):
                yield warning(
                    "folders",
                    f"git ignores {folder}/: what it does not track there is not published",
                    "take the folder out of .gitignore",
                )
    if there:
        yield ok("folders", f"posts may be published from {', '.join(f'{folder}/' for folder in there)}")
    else:
        yield warning(
            "folders",
            f"none of the folders that posts may be published from is there: {', '.join(settings.folders)}",
            "make one, or set BRITER_ADAPTER to the kind of your site",
        )


def _ignores(site: Site, *paths: str) -> bool:
    """Whether git would ignore one of these if it were new."""
    return site.commands.attempt("check-ignore", "--no-index", "--", *paths)[0] == 0


def _unpublishable(worktree: Path, folder: str) -> str | None:
    path = worktree
    for part in folder.split("/"):
        path /= part
        try:
            mode = path.lstat().st_mode
        except OSError:
            return None
        if stat.S_ISLNK(mode):
            return f"{path} is a symbolic link"
        if not stat.S_ISDIR(mode):
            return f"{path} is no folder"
        if os.path.lexists(path / ".git"):
            return f"{path} is a repository of its own"
    return None


def _storage(settings: Settings, site: Site) -> Finding:
    storage = settings.storage_root
    if not storage.is_relative_to(settings.git_worktree):
        return ok("storage-place", f"{storage} is outside the site's repository")
    inside = storage.relative_to(settings.git_worktree).as_posix()
    # Asked of a file in it, as `storage/*` ignores no folder.
    if _ignores(site, f"{inside}/queue/job.json"):
        return ok("storage-place", f"git ignores {storage}")
    return warning(
        "storage-place",
        f"{storage} is in the site's repository, and git does not ignore it",
        f"echo /{inside}/ >> {settings.git_worktree}/.gitignore",
    )


def _hooks(settings: Settings, site: Site) -> Finding:
    repo = site.commands.repo
    configured = str(repo.config_reader().get_value("core", "hooksPath", default=""))
    folder = settings.git_worktree / Path(configured).expanduser() if configured else None
    folder = folder or Path(repo.common_dir, "hooks")
    try:
        names = sorted(
            path.name for path in folder.iterdir() if path.suffix != ".sample" and os.access(path, os.X_OK)
        )
    except OSError:
        names = []
    if not names:
        return ok("hooks", "the site has none")
    listed = ", ".join(names)
    if settings.git_hooks:
        return ok("hooks", f"{listed}: run as BRITER_GIT_HOOKS says")
    return ok("hooks", f"{listed}: not run, unless BRITER_GIT_HOOKS=true")


def _large_files(site: Site) -> Iterator[Finding]:
    if not _uses_lfs(site):
        return
    if shutil.which("git-lfs") is None:
        yield error("lfs", "the site keeps files in git LFS, and git-lfs was not found", "install git-lfs")
    elif not site.commands.repo.config_reader().has_section('filter "lfs"'):
        yield error("lfs", "the site keeps files in git LFS, and git-lfs is not set up", "git lfs install")
    else:
        yield ok("lfs", "git-lfs is set up")


def _uses_lfs(site: Site) -> bool:
    tracked = os.fsdecode(site.commands.run("ls-files", "-z")).split("\0")
    places = {".gitattributes", *(path for path in tracked if path.endswith("/.gitattributes"))}
    for place in places:
        try:
            if b"filter=lfs" in (site.commands.worktree / place).read_bytes():
                return True
        except OSError:
            continue
    return False


def _remote(site: Site) -> Finding:
    """Ask for a push without making it: the network, the host's key, credentials and permission in one."""
    try:
        site.check_remote()
        tips = site.tips()
        remote = open_remote(site)
        theirs = remote.tip()
        if theirs is None and tips.remote is not None:
            return error(
                "remote",
                f"{site.remote} has no branch {site.branch} any more",
                f"git push {site.remote} {site.branch}, if it should be there",
            )
        # A lease on what is there now would let git force; in a dry run that is only a question.
        remote.push(site.branch_ref, new=tips.local, expect=theirs, dry_run=True)
    except PublishError as failure:
        return refused("remote", failure)
    if theirs is None:
        return warning(
            "remote",
            f"{site.remote} has no branch {site.branch} yet; the first publication makes it",
            f"git push {site.remote} {site.branch}",
        )
    where = f"{site.remote}'s {site.branch} can be pushed to"
    if site.is_ancestor(theirs, tips.local):
        return ok("remote", where)
    if tips.remote in {None, tips.local} or site.ref(site.dry_run_ref) == tips.local:
        return ok("remote", f"{where}; it has new commits, which the next publication merges")
    return warning(
        "remote",
        f"{where}, but it has new commits, and there are unpushed ones here that are not the worker's",
        f"git pull --rebase {site.remote} {site.branch}",
    )
