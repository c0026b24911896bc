"""Keep a cluster's clone of a site on its node: bare, shallow, without blobs, and disposable.

Everything that must outlive the clone is in the database and on the remote. So a clone that is missing,
damaged, of another address or too large is cloned again, and nothing in it waits for the disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from briter_worker.errors import FailureCode, PublishError, conceal, os_error_text
from briter_worker.git.commits import read_commits
from briter_worker.git.configuration import conceal_secrets
from briter_worker.git.environment import RemoteAccess
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from briter_worker.git.commits import Person, RemoteCommit
    from briter_worker.git.configuration import Configuration
    from briter_worker.git.environment import Signer
    from briter_worker.git.ssh import SshConnections

REMOTE = "origin"
_FORMAT = "3"
_MARK = "briter/clone"
_MAX_PACKS = 100
"""Each publication and each fetch adds one; rolling them up is not worth the time of a new clone."""
_DAMAGED = frozenset({FailureCode.CORRUPT, FailureCode.NOT_A_REPOSITORY, FailureCode.LOCKED})
_configurations: dict[Path, Configuration] = {}
"""Git's configuration as this process read it last, by the folder of the clones: their addresses differ."""
_NO_BRANCH = re.compile(r"Remote branch .* not found")


@contextmanager
def open_clone(
    folder: Path,
    *,
    url: str,
    branch: str,
    credentials: Mapping[str, str] | None,
    timeout: float,
    total_timeout: float,
    signer: Signer | None = None,
    patience: float = 1.0,
    ssh: SshConnections | None = None,
) -> Iterator[Repository]:
    """Lock the site's clone in `folder`, make it where needed, and yield it; end its git on leaving.

    `credentials` are references, see `open_access`. `patience`: seconds to wait for the lock. A clone
    in which git finds damage is cloned again by the next caller. `ssh`: connections that sites share.
    Raises PublishError.
    """
    access = open_access(url, credentials)
    conceal_secrets([(f"remote.{REMOTE}.url", url)])
    place = folder / "clone.git"
    git = Git(
        None,
        bare=place,
        remote=REMOTE,
        timeout=timeout,
        total_timeout=total_timeout,
        access=access,
        durable=False,
        signer=signer,
        ssh=ssh,
    )
    repository = Repository(git, branch=branch, remote=REMOTE)
    try:
        with _naming(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A process that another thread is just starting has a copy of the lock for a moment.
        with git.locked(folder / "lock", patience):
            try:
                if (known := _configurations.get(folder.parent)) is not None and known.is_current():
                    git.configuration = known.for_clone(url)
                with repository.refs.kept():
                    with _naming(folder):
                        _prepare(repository, place, url)
                    yield repository
            finally:
                git.abort()
                if git.configuration is not None:
                    _configurations[folder.parent] = git.configuration
                if git.failures & _DAMAGED:
                    with suppress(OSError):  # the next opening clones again
                        (place / _MARK).unlink()
    finally:
        git.close()


def fetch_commits(repository: Repository, pushed: str | None, identity: Person) -> list[RemoteCommit]:
    """Fetch, and return the commits that came after `pushed`. Raises PublishError."""
    tip = repository.fetch()
    repository.update_refs((repository.pushed_ref, tip, None))
    if pushed in (None, tip) or not repository.is_ancestor(pushed, tip):
        return []
    return read_commits(repository.git, pushed, tip, identity)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PublishError.from_os(f"the clone in {folder} cannot be used", error) from error


def _prepare(repository: Repository, place: Path, url: str) -> None:
    """Clone the site, or clear the clone that is there of what a dead worker left in it."""
    # A hash, because the address may contain credentials.
    mark = hashlib.sha256(f"{_FORMAT}\0{url}\0{repository.branch}".encode()).hexdigest()
    if not _is_usable(repository, place, mark):
        _clone(repository, place, url, mark)
        return
    # The holders of git's lock files are dead, as this process has the clone's lock. The locks of refs
    # other than the worker's stay: they stop nobody, as git writes no such ref under the same name again.
    repository.locks.remove_own()
    for path in (*place.iterdir(), *(place / "briter").iterdir(), *place.glob("reftable/*.lock")):
        if path.suffix == ".lock":
            path.unlink(missing_ok=True)
        elif path.name.startswith(("lfs", "index-", "worktree-")):  # uploaded, or left by a dead worker
            shutil.rmtree(path, ignore_errors=True)


def _is_usable(repository: Repository, place: Path, mark: str) -> bool:
    """Return True if the clone was finished, is of this address, and has not grown too large."""
    try:
        packs = sum(path.suffix == ".pack" for path in (place / "objects" / "pack").iterdir())
        if (place / _MARK).read_text() != mark or not (place / "config").is_file() or packs > _MAX_PACKS:
            return False
        return bool(repository.git.settings) and repository.ref(repository.pushed_ref) is not None
    except (OSError, ValueError, PublishError):
        return False


def _clone(repository: Repository, place: Path, url: str, mark: str) -> None:
    """Make a new clone in place of what is there, and mark the clone as finished."""
    repository.git.refresh()
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    try:
        repository.git.run(
            *("clone", "--quiet", "--bare", "--depth=1", "--filter=blob:none", "--no-local"),
            *("--no-tags", "--template="),
            *(f"--origin={REMOTE}", f"--branch={repository.branch}", "--upload-pack=git-upload-pack"),
            *("--", url, str(place)),
            discover=True,
        )
    except PublishError as failure:
        if _NO_BRANCH.search(failure.message):
            raise repository.no_branch_error() from failure
        raise
    repository.git.refresh()
    repository.refs.forget()
    tip = repository.ref(repository.branch_ref)
    repository.update_refs((repository.pushed_ref, tip, None))
    repository.git.state_dir.joinpath("clone").write_text(mark)


_USER = "x-access-token"
"""User of a token where none is given: hosts look at the token alone."""
_NAME, _SECRET = "BRITER_ACCESS_NAME", "BRITER_ACCESS_SECRET"
_HELPER = (
    f'!f() {{ test "$1" = get || exit 0; printf "username=%s\\npassword=%s\\n" "${_NAME}" "${_SECRET}"; }}; f'
)
_MAX_SECRET = 65_536


def open_access(url: str, credentials: Mapping[str, str] | None) -> RemoteAccess | None:
    """Return how git opens the remote, by credentials as they are now; no text shows the secret from now on.

    They are `{"env": NAME}` or `{"file": PATH}`, with a `username` if needed, or `{"sshKey": PATH}`. Git's
    helper gets the secret by git's environment: it is in no command line, no configuration and no URL. Raises
    PublishError where there is no secret.
    """
    if not credentials:
        return None
    if "sshKey" in credentials:
        path = credentials["sshKey"]
        _read(path, f"the ssh key {path} on the worker's node")
        return RemoteAccess(ssh_options=f"-i {shlex.quote(path)} -o IdentitiesOnly=yes")
    if "env" in credentials:
        where = f"the variable {credentials['env']} of the worker's environment"
        secret = os.environ.get(credentials["env"], "").strip()
    else:
        where = f"the file {credentials['file']} on the worker's node"
        secret = _read(credentials["file"], where).decode(errors="replace").strip()
    conceal([secret])
    if not secret or re.search(r"[\x00-\x1f\x7f\ufffd]", secret):
        raise _unusable(f"{where} holds no credential in one line")
    parts = urlsplit(url)
    # For this host alone: a redirect or another service does not get the credential.
    host = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return RemoteAccess(
        # The empty helper: no configured helper is asked before, nor told to store it.
        (("credential.helper", ""), (f"credential.{host}.helper", _HELPER)),
        {_NAME: credentials.get("username", _USER), _SECRET: secret},
    )


def _read(path: str, where: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_SECRET)
    except OSError as error:
        raise _unusable(f"{where} cannot be read: {os_error_text(error, with_path=False)}") from error


def _unusable(what: str) -> PublishError:
    return PublishError(FailureCode.AUTH, what, "provide it on every node, or change the site's credentials")
