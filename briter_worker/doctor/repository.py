"""Checks of the site's repository and its remote; in a cluster, of database, nodes and one site's remote."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.allowlist import PathRefusedError
from briter_worker.doctor.environment import check_accounts, check_state, check_writable
from briter_worker.doctor.finding import Finding, State, attempt, error, ok, unless, warning
from briter_worker.doctor.host import check_rules
from briter_worker.errors import FailureCode, FixableError, PublishError, os_error_text
from briter_worker.git.commits import write_commit
from briter_worker.git.folders import Folders
from briter_worker.git.run import Git
from briter_worker.job import count
from briter_worker.status import PULL_COMMAND, read_status
from briter_worker.wiring import check_site_format, open_database, open_repository, signer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from briter_worker.cluster.sites import Site
    from briter_worker.git.repository import Repository
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_MIN_GIT = (2, 38)
_ASKED = "can be reached, and git may push"
_NOT_ASKED = "rules that the host applies to a real push were not asked, as BRITER_GIT_HOST_TOKEN is not set"
_MAX_SKEW_S = 2.0
_MAX_TIMEOUT_MS = 30_000
"""A user is waiting, so a remote that hangs has less time than in a publication."""


def examine(settings: Settings) -> Iterator[Finding]:
    """Yield the findings about the repository, as far as each check allows the next."""
    if shutil.which("git") is None:
        yield error("git", "git was not found", "install git 2.38 or newer")
        return
    timeout = min(settings.git_timeout_ms, _MAX_TIMEOUT_MS)
    limits = {"git_timeout_ms": timeout, "git_transfer_timeout_ms": timeout}
    repository = open_repository(settings.model_copy(update=limits))
    place = f"{settings.git_worktree} is the top of a repository"
    worktree = attempt("worktree", lambda: _check_worktree(repository), place)
    yield worktree
    if worktree.state is State.ERROR:
        return
    yield attempt("git", lambda: _check_version(repository), f"git is {_MIN_GIT[0]}.{_MIN_GIT[1]} or newer")
    yield attempt("format", lambda: check_site_format(settings), "this program knows the state of the site")
    yield from _check_signing(settings, repository.git.common_dir)
    yield attempt("ownership", repository.check_owner, "git trusts the repository's owner")
    yield attempt("branch", repository.check_branch, f"{repository.branch} is checked out")
    yield attempt("unfinished", repository.check_under_way, "no merge or rebase is under way")
    yield attempt("index", lambda: repository.git.run("ls-files", "--unmerged"), "the index can be read")
    for path in repository.locks.find():
        yield warning(
            "locks",
            f"{path} exists: a git command is running, or was killed",
            "end that command; the worker removes its own stale locks; remove any other by hand",
        )
    yield check_writable("repository", repository.git.common_dir / "objects")
    yield check_accounts(settings, repository.git.common_dir)
    yield from _check_folders(settings, repository)
    yield _check_storage(settings, repository)
    yield from _check_local_commits(repository)
    remote = _check_remote(repository, settings)
    yield remote
    if settings.git_host_token and remote.state is State.OK:
        url = repository.git.run("remote", "get-url", "--push", "--", repository.remote).decode().strip()
        yield check_rules(settings, url)


def _check_worktree(repository: Repository) -> None:
    if repository.git.repo.bare:
        message = f"{repository.git.worktree} is a bare repository"
        fix = "set BRITER_GIT_WORKTREE to a clone with a work tree"
        raise PublishError(FailureCode.NOT_A_REPOSITORY, message, fix)


def _check_version(repository: Repository) -> None:
    version = repository.git.run("version", discover=True).decode().strip()
    found = re.search(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _MIN_GIT:
        raise PublishError(FailureCode.GIT_MISSING, f"{version} is too old", "install git 2.38 or newer")


def _check_signing(settings: Settings, folder: Path) -> Iterator[Finding]:
    """Sign a commit in a repository of its own, if commits are to be signed."""
    if (signer := signer_of(settings)) is None:
        return

    def sign() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="signing-", dir=folder) as place:
            timeout = min(settings.git_timeout_ms, _MAX_TIMEOUT_MS) / 1000
            git = Git(None, bare=Path(place, "test.git"), remote="origin", timeout=timeout, signer=signer)
            with closing(git):
                git.run(
                    "init", "--quiet", "--bare", "--template=", str(Path(place, "test.git")), discover=True
                )
                tree = git.run("hash-object", "-t", "tree", "-w", "--stdin").decode().strip()
                doctor = [b"Doctor <doctor@localhost> 0 +0000"] * 2
                write_commit(git, tree, people=doctor, message=b"Test", signer=signer)

    message = f"commits are signed ({signer.format}) with {signer.key}; a test commit was signed"
    yield attempt("signing", sign, message)


def _check_folders(settings: Settings, repository: Repository) -> Iterator[Finding]:
    usable = []
    with closing(Folders(settings.git_worktree)) as folders:
        for folder in settings.folders:
            try:
                folders.open(folder)
            except FileNotFoundError:
                if folder in settings.allowed_paths:  # an adapter's folder may well be missing
                    fix = "create it, or correct BRITER_ALLOWED_PATHS"
                    yield warning("folders", f"{folder}/ does not exist", fix)
            except (PathRefusedError, OSError) as problem:
                reason = problem.reason if isinstance(problem, PathRefusedError) else os_error_text(problem)
                message = f"nothing in {folder}/ is published: {reason}"
                yield error("folders", message, "make it a plain folder that the worker's user may read")
            else:
                usable.append(f"{folder}/")
                if _is_ignored(repository, f"{folder}/post.md"):
                    message = f"git ignores {folder}/: files there that git does not track are not published"
                    yield warning("folders", message, "take the folder out of .gitignore")
    message = f"none of the folders that may be published exists: {', '.join(settings.folders)}"
    fix = "create one, or set BRITER_ADAPTER to the kind of your site"
    yield unless(not usable, "folders", message, fix, f"posts may be published from {', '.join(usable)}")


def _is_ignored(repository: Repository, path: str) -> bool:
    return repository.git.attempt("check-ignore", "--no-index", "--", path)[0] == 0


def _check_storage(settings: Settings, repository: Repository) -> Finding:
    storage = settings.storage_root
    if not storage.is_relative_to(settings.git_worktree):
        return ok("storage-place", f"{storage} is outside the site's repository")
    inside = storage.relative_to(settings.git_worktree).as_posix()
    is_ignored = _is_ignored(
        repository, f"{inside}/queue/job.json"
    )  # of a file: `storage/*` ignores no folder
    message = f"{storage} is in the site's repository, and git does not ignore it"
    fix = f"echo /{inside}/ >> {settings.git_worktree}/.gitignore"
    return unless(not is_ignored, "storage-place", message, fix, f"git ignores {storage}")


def _check_local_commits(repository: Repository) -> Iterator[Finding]:
    try:
        commits = repository.local_commits()
    except PublishError as failure:
        yield error("local-commits", failure.message, failure.fix or "see the message")
        return
    if commits:
        newest = f"{commits[0].commit[:10]} {commits[0].subject}"
        message = f"not pushed: {count(len(commits), 'commit')} of {repository.branch}; the newest: {newest}"
        yield warning("local-commits", message, PULL_COMMAND)


def _asked(settings: Settings) -> str:
    return _ASKED if settings.git_host_token else f"{_ASKED}; {_NOT_ASKED}"


def _check_remote(repository: Repository, settings: Settings) -> Finding:
    """Ask for a push without making it: network, host key, credentials and permission in one."""
    branch, remote = repository.branch, repository.remote

    def ask() -> str:
        repository.check_push_address()
        repository.check_remote()
        theirs = repository.remote_tip()
        seen = repository.ref(repository.pushed_ref) or repository.ref(repository.tracking_ref)
        if theirs is None and seen is not None:
            raise repository.no_branch_error()
        ask_push(repository, repository.ref(repository.branch_ref) or "", expected=theirs or "")
        return f"{branch} of {remote} {_asked(settings)}" if theirs else ""

    finding = attempt("remote", ask)
    if finding.state is State.OK and not finding.message:
        message = f"{remote} has no branch {branch} yet; the first publication creates it"
        return warning("remote", message, f"git push {remote} {branch}")
    return finding


def ask_push(repository: Repository, commit: str, *, expected: str) -> None:
    """Have git push the commit in a dry run. Raises PublishError if the remote would not take it."""
    repository.git.run(
        *("push", "--dry-run", "--porcelain", "--no-verify"),
        f"--force-with-lease={repository.branch_ref}:{expected}",
        *("--", repository.remote, f"{commit}:{repository.branch_ref}"),
    )


# --- a cluster


def examine_cluster(settings: Settings) -> Iterator[Finding]:
    """Yield the findings about a cluster; without a site, those that concern all sites."""
    database = open_database(settings)
    reached = attempt("database", database.check, "it can be reached and fits this program")
    yield reached
    if reached.state is State.ERROR:
        return
    from briter_worker.cluster import health, sites  # noqa: PLC0415 - the extra [postgres]

    yield _check_clock(database)
    if nodes := health.running_nodes(database):
        yield ok("hosts", f"running: {count(len(nodes), 'node')}")
        yield from (warning("nodes", *each) for each in health.complaints(nodes))
    else:
        yield warning("hosts", "no node is running", "start briter-worker run on a node")
    if not settings.site:
        yield from _check_signing(settings, settings.cache_root)
        return
    try:
        site = sites.get(database, settings.site)
        own = sites.settings_of(site, settings)
    except FixableError as problem:
        yield error("site", problem.message, problem.fix)
        return
    message, fix = f"{site.name} is paused", f"briter-worker site resume {site.name}"
    fine = f"{site.name} publishes {', '.join(own.folders)} to {site.branch}"
    yield unless(site.paused is not None, "site", message, fix, fine)
    yield check_state(read_status(own, database.read_clock()))
    yield from _check_signing(own, settings.cache_root)
    message = f"{site.branch} of {site.remote} {_asked(settings)}"
    remote = attempt("remote", lambda: _ask_site_remote(site, own), message)
    yield remote
    if settings.git_host_token and remote.state is State.OK:
        yield check_rules(own, site.remote)


def _check_clock(database: Database) -> Finding:
    """Compare this machine's clock, which people see in its logs, with the one that decides."""
    ahead = time.time() - database.read_clock()
    message = f"this machine's clock is {ahead:+.0f} s off Postgres's, which decides when a post is due"
    fix, fine = (
        "synchronise the clocks: timedatectl set-ntp true",
        "as Postgres's, which decides when a post is due",
    )
    return unless(abs(ahead) > _MAX_SKEW_S, "clock", message, fix, fine)


def _ask_site_remote(site: Site, settings: Settings) -> None:
    from briter_worker.cluster.sites import open_site_clone  # noqa: PLC0415 - the extra [postgres]

    with open_site_clone(site, settings) as repository:
        tip = repository.fetch()
        ask_push(repository, tip, expected=tip)
