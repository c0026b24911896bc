"""Checks of the machine: configuration, plugins, webhooks, folders, disk, queue."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from contextlib import closing, suppress
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import Finding, attempt, error, ok, unless, warning
from briter_worker.git import INHERITED
from briter_worker.job import count
from briter_worker.plugins import Plugins
from briter_worker.settings import PREFIX, Settings, settings_schema
from briter_worker.sinks.store import StoreError, unsent
from briter_worker.sinks.webhooks import (
    AddressRefusedError,
    UndeliveredError,
    origin_of,
    parse_address,
    parse_receiver,
    resolve,
)
from briter_worker.status import read_status
from briter_worker.wiring import open_history, open_outbox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from briter_worker.status import SiteStatus


_MEBIBYTE = 1 << 20
_LOW_DISK = 500 * _MEBIBYTE
_DAY_S = 86_400
_CLOSE_S = 60
_MAX_LOOKED_AT = 20_000
_MANY = 5
"""So many commits of a post, each close to the one before, are an autosave's."""
_PERSONAL = frozenset({"GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS", "SSH_ASKPASS"})
"""Variables by which people give git their credentials. The worker's git does not get them."""


def check_configuration(settings: Settings) -> Iterator[Finding]:
    """Report the sources of the configuration, what nothing reads, and the dry run."""
    known = settings_schema()["properties"]
    path = settings.config_path
    if path.exists():
        keys = set(json.loads(path.read_bytes().decode("utf-8-sig")))
        yield ok("configuration", f"{path} was read; the environment overrides it")
    else:
        keys = set()
        yield ok("configuration", f"from the environment and the defaults; there is no {path}")
    variables = {described["title"] for described in known.values()} | {f"{PREFIX}DEBUG"}
    settings_like = {key.lower(): key for key in known}
    for key in sorted(keys - set(known)):  # other keys may be those of a CMS that shares the file
        plain = key.removeprefix(PREFIX).replace("_", "").lower()
        for like in get_close_matches(plain, settings_like, n=1, cutoff=0.8):
            message = f"{path} has the unknown key {key}, which has no effect"
            yield warning("configuration", message, f"write {settings_like[like]} if the worker is meant")
    for name in sorted(set(os.environ) - variables):
        if name.startswith(PREFIX):
            message = f"the environment has the unknown variable {name}"
            yield warning("configuration", message, "correct its spelling; see briter-worker schema config")
    for name in sorted(_PERSONAL & {*INHERITED, *os.environ}):
        fix = "git config core.sshCommand or credential.helper in the site's repository"
        yield warning("environment", f"{name} is set, and the worker ignores it", fix)
    text, fix = "dry run is on: nothing reaches the remote", "set BRITER_WORKER_DRY_RUN=false to go live"
    yield unless(settings.worker_dry_run, "dry-run", text, fix, "live: publications reach the remote")


def check_webhooks(settings: Settings) -> Iterator[Finding]:
    """Report the webhooks, if there are any. They never stop a publication: each problem is a warning."""
    urls = [parse_receiver(text)[0] for text in settings.webhook_urls]
    urls += [settings.build_hook_url] if settings.build_hook_url else []
    found = []
    if urls and settings.webhook_secret and find_spec("standardwebhooks") is None:
        message = "webhooks are stored but not sent: standardwebhooks is not installed"
        found.append(warning("webhooks", message, "pip install 'briter-worker[webhooks]'"))
    if settings.webhook_urls and settings.webhook_template == "json" and not settings.webhook_secret:
        message = "webhooks are not signed, so that receivers cannot tell them from forged ones"
        fix = "set BRITER_WEBHOOK_SECRET here and at the receivers: echo whsec_$(openssl rand -base64 32)"
        found.append(warning("webhooks", message, fix))
    allow = settings.webhook_allow_private
    for url in urls:
        try:
            resolve(parse_address(url, allow_http=allow), allow_private=allow)
        except (AddressRefusedError, UndeliveredError) as problem:
            fix = getattr(problem, "fix", "correct BRITER_WEBHOOK_URLS or BRITER_BUILD_HOOK_URL")
            found.append(warning("webhooks", f"{origin_of(url)} gets nothing: {problem}", fix))
    try:
        for url, count, text in unsent(open_outbox(settings)):
            message = f"messages that wait for {origin_of(url)}: {count}; {text or 'being sent'}"
            found.append(warning("webhooks", message, "check the receiver, or wait"))
    except StoreError as problem:
        found.append(warning("webhooks", problem.message, problem.fix))
    if urls and not found:
        found.append(ok("webhooks", ", ".join(dict.fromkeys(origin_of(url) for url in urls))))
    yield from found


def check_quiet_time(settings: Settings, now: float) -> Iterator[Finding]:
    """Propose a quiet time where each pause of an author makes a commit."""
    if settings.worker_quiet_ms:
        return
    with suppress(StoreError), closing(open_history(settings)) as history:
        slug, again = history.most_republished(now - _DAY_S, _CLOSE_S)
        if again >= _MANY:
            text = f"{slug} was published {again} times within {_CLOSE_S} s of the commit before, in one day"
            fix = "set BRITER_WORKER_QUIET_MS=10000: a post then waits until its author pauses for 10 s"
            yield warning("quiet-time", text, fix)


def check_folders(settings: Settings) -> Iterator[Finding]:
    """Report the folders and the lock file that the worker writes."""
    for name in ("queue", "quarantine", "storage"):
        yield check_writable(name, getattr(settings, f"{name}_root"))
    lock = settings.lock_path
    if lock.is_symlink():
        fix = f"remove {lock} while no worker runs"
        yield error("lock", f"{lock} is a link, and the worker locks no other program's file", fix)
    elif os.path.lexists(lock) and not (lock.is_file() and os.access(lock, os.R_OK | os.W_OK)):
        fix = f"remove {lock} while no worker runs, or give the worker's user write access"
        yield error("lock", f"{lock} is not a file that the worker can write", fix)
    else:
        yield ok("lock", f"{lock} can be used")


def check_writable(check: str, folder: Path) -> Finding:
    """Write a file without a name into the folder, or find out whether the folder can be created."""
    fix = f"make {folder} a folder that the worker's user may write"
    place = _existing(folder)
    if place != folder and place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        return ok(check, f"{folder} does not exist yet; the worker creates it")
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        return error(check, f"{folder} cannot be written: {problem.strerror}", fix)
    return ok(check, f"{folder} can be written")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if os.path.lexists(place))


def check_accounts(settings: Settings, git_dir: Path) -> Finding:
    """Report the first permission by which a CMS of another user and the worker are in each other's way."""
    worker = git_dir.stat().st_uid
    folders = (settings.git_worktree / folder for folder in settings.folders)
    places = [each for each in (settings.queue_root, *folders) if each.is_dir()]
    private = [git_dir, git_dir / "config", git_dir / "hooks", settings.storage_root, settings.config_path]
    looked = list(islice(_entries(places), _MAX_LOOKED_AT))
    shared = {each.st_gid for _, each in looked if each.st_mode & stat.S_IWGRP}
    if not any(each.st_uid != worker for _, each in looked):
        return ok("accounts", "posts and jobs belong to the worker's user")
    for path in filter(os.path.lexists, private):
        found = path.lstat()
        is_shared = stat.S_IWOTH | (stat.S_IWGRP if found.st_gid in shared else 0)
        if found.st_uid != worker or found.st_mode & is_shared:
            message = f"{path} can be written by others than the worker's user, who could run programs by it"
            return warning("accounts", message, f"sudo chown {worker} {path}; sudo chmod go-w {path}")
    for path, found in looked:
        is_folder = stat.S_ISDIR(found.st_mode)
        has_group = found.st_mode & stat.S_ISGID or "system.posix_acl_default" in os.listxattr(path)
        wanted = os.R_OK | (os.W_OK | os.X_OK if is_folder else 0)
        if not _may(path, found, worker, wanted):
            message = f"the worker's user may not {'write' if is_folder else 'read'} {path}"
        elif is_folder and not has_group:
            message = f"{path} has no setgid bit: what the worker writes there leaves the group of the CMS"
        else:
            continue
        place = next(each for each in places if path.is_relative_to(each))
        group = next(iter(shared), "posts")
        fix = f"sudo chgrp -R {group} {place}; sudo chmod -R g+rwX {place}; "
        fix += f"sudo find {place} -type d -exec chmod g+s {{}} +; and give the CMS the umask 0002"
        return warning("accounts", message, fix)
    return ok("accounts", "the CMS's user and the worker's user can read what the other writes")


def _entries(places: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and files that a CMS writes, without links and the worker's folders in the queue."""
    for place in places:
        yield place, place.lstat()
        for folder, folders, files in os.walk(place):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for path in (Path(folder, name) for name in (*folders, *files)):
                with suppress(OSError):
                    if not path.is_symlink():
                        yield path, path.lstat()


def _may(path: Path, found: os.stat_result, user: int, wanted: int) -> bool:
    """Return True if the user may use the path; of another user than this process's, look at the mode."""
    if user == os.geteuid():
        return os.access(path, wanted)
    shift = 6 if found.st_uid == user else 3
    return found.st_mode >> shift & wanted == wanted


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Report the free space, before a full disk stops everything."""
    for name, folder in {"storage": settings.storage_root, "site": settings.git_worktree}.items():
        free = shutil.disk_usage(_existing(folder)).free
        text = f"{free // _MEBIBYTE} MiB free for the {name} at {folder}"
        yield unless(free <= _LOW_DISK, "disk", text, "free some space", text)


def check_plugins(settings: Settings) -> Finding:
    """Report the plugins in their order."""
    return attempt("plugins", lambda: ", ".join(Plugins(settings.plugins).names) or "none")


def check_state(status: SiteStatus) -> Finding:
    """Report the sentence that every command and page says."""
    state = status.headline()
    is_wrong = state.tone == "bad" or status.partly_published
    return unless(is_wrong, "state", state.text, state.fix or "see below", state.text)


def check_queue(settings: Settings, now: float) -> Iterator[Finding]:
    """Report a pause, dead letters, unreadable files, the site condition and the worker."""
    try:
        status = read_status(settings, now, local_commits=())
    except OSError as problem:
        yield error("queue", f"{settings.queue_root}: {problem.strerror}", "let the worker's user read it")
        return
    yield check_state(status)
    if status.paused:
        yield warning("pause", "publishing is paused", "briter-worker resume")
    failed = status.jobs["failed"]
    message = f"{count(failed, 'job')} failed and will not be retried"
    fix = "briter-worker list --status failed shows why; then retry or cancel them"
    yield unless(failed, "dead-letters", message, fix)
    message = f"{status.quarantined} in {settings.quarantine_root}, {len(status.stuck)} in the queue"
    fix = "correct the program that wrote them, save those posts again, then remove the files"
    yield unless(status.quarantined or status.stuck, "unreadable-files", message, fix)
    if status.condition:
        yield warning("condition", f"the last attempt failed: {status.condition}", status.fix or "see below")
    if status.has_worker:  # else to open the history would change files
        yield from check_quiet_time(settings, now)
    worker = status.worker
    yield ok("worker", f"PID {worker.pid} is running" if worker and worker.alive else "none is running now")
