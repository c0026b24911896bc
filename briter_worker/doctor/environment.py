"""Checks of the machine: configuration, folders, disk, clock, plugins, queue."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
import time
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import error, from_failure, ok, warning
from briter_worker.errors import PublishError
from briter_worker.git import INHERITED
from briter_worker.plugins import Plugins
from briter_worker.settings import PREFIX, settings_schema
from briter_worker.status import read_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from briter_worker.doctor.finding import Finding
    from briter_worker.settings import Settings

_MEBIBYTE = 1 << 20
_LOW_DISK = 500 * _MEBIBYTE
_FULL_DISK = 50 * _MEBIBYTE
_FIRST_YEAR = 2020
_SSH = "use git config core.sshCommand '…' in the site's repository"
_ASKPASS = "use a credential helper (git config credential.helper …), or an ssh key"
_GIT_FIXES = {"GIT_SSH": _SSH, "GIT_SSH_COMMAND": _SSH, "GIT_ASKPASS": _ASKPASS, "SSH_ASKPASS": _ASKPASS}
_IGNORED = re.compile(
    r"GIT_((AUTHOR|COMMITTER)_(NAME|EMAIL)|CONFIG_(COUNT|PARAMETERS)|DIR|WORK_TREE|PROXY_COMMAND|SSL_.*)"
)


def check_configuration(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report the sources of the configuration, unknown keys and variables, and the dry run."""
    known = settings_schema()["properties"]
    path = settings.config_path
    try:
        keys = set(json.loads(path.read_bytes().decode("utf-8-sig")))
        yield ok("configuration", f"{path} was read; the environment overrides it")
    except FileNotFoundError:
        keys = set()
        yield ok("configuration", f"from the environment and the defaults; there is no {path}")
    variables = {described["title"] for described in known.values()} | {f"{PREFIX}DEBUG"}
    unknown = [
        *(f"{path} has the unknown key {key}" for key in sorted(keys - set(known))),
        *(
            f"the environment has the unknown variable {name}"
            for name in sorted(environ)
            if name.startswith(PREFIX) and name not in variables
        ),
    ]
    for message in unknown:
        yield warning("configuration", message, "correct its spelling; see briter-worker schema config")
    for name in sorted({*INHERITED, *environ}):
        if name not in _GIT_FIXES and not _IGNORED.fullmatch(name):
            continue
        fix = _GIT_FIXES.get(name, "use the BRITER_GIT_… variables, or git config in the site's repository")
        yield warning("environment", f"{name} is set, and the worker ignores it", fix)
    if settings.worker_dry_run:
        yield warning(
            "dry-run",
            "dry run is on: nothing reaches the remote",
            "set BRITER_WORKER_DRY_RUN=false to go live",
        )
    else:
        yield ok("dry-run", "live: publications reach the remote")


def check_folders(settings: Settings) -> Iterator[Finding]:
    """Report the folders and the lock file that the worker writes."""
    yield check_writable("queue", settings.queue_root)
    yield check_writable("quarantine", settings.quarantine_root)
    yield check_writable("storage", settings.storage_root)
    yield _check_lock(settings.lock_path)


def check_writable(check: str, folder: Path) -> Finding:
    """Write a file without a name into the folder, and report the result."""
    fix = f"make {folder} a folder that the worker's user may write"
    place = _existing(folder)
    if not place.is_dir():
        return error(check, f"{place} is not a folder", fix)
    if place != folder:
        if os.access(place, os.W_OK | os.X_OK):
            return ok(check, f"{folder} does not exist yet; the worker creates it")
        return error(check, f"{folder} does not exist and cannot be created in {place}", fix)
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


def _check_lock(path: Path) -> Finding:
    fix = f"remove {path} while no worker runs, or give the worker's user write access"
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ok("lock", f"{path} does not exist yet; the worker creates it")
    except OSError as problem:
        return error("lock", f"{path}: {problem.strerror}", fix)
    if not stat.S_ISREG(mode) or not os.access(path, os.R_OK | os.W_OK):
        return error("lock", f"{path} is not a file that the worker can write", fix)
    return ok("lock", f"{path} can be written")


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Report the free space, before a full disk stops everything."""
    for name, folder in {"storage": settings.storage_root, "site": settings.git_worktree}.items():
        free = shutil.disk_usage(_existing(folder)).free
        text = f"{free // _MEBIBYTE} MiB free for the {name} at {folder}"
        if free < _FULL_DISK:
            yield error("disk", text, "free some space")
        elif free < _LOW_DISK:
            yield warning("disk", text, "free some space")
        else:
            yield ok("disk", text)


def check_clock(now: float) -> Finding:
    """Report a clock that was never set: due times and retries follow it."""
    today = time.gmtime(now)
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", today)
    if today.tm_year < _FIRST_YEAR:
        return error("clock", f"the clock says {text}", "set the clock: timedatectl set-ntp true")
    return ok("clock", text)


def check_plugins(settings: Settings) -> Finding:
    """Report the plugins in their order."""
    try:
        names = Plugins(settings.plugins).names
    except PublishError as failure:
        return from_failure("plugins", failure)
    except Exception as problem:  # noqa: BLE001 - a plugin may raise anything
        fix = "correct the plugin, or uninstall it"
        return error("plugins", f"{type(problem).__name__}: {problem}", fix)
    return ok("plugins", ", ".join(names) or "none")


def check_queue(settings: Settings, now: float) -> Iterator[Finding]:
    """Report a pause, dead letters, unreadable files, the site condition and the worker."""
    status = read_status(settings, now, local_commits=())
    if status.paused:
        yield warning("pause", "publishing is paused", "briter-worker resume")
    if failed := status.jobs["failed"]:
        fix = "briter-worker list --status failed shows why; then retry or cancel them"
        yield warning("dead-letters", f"{failed} jobs failed and are not retried", fix)
    else:
        yield ok("dead-letters", "none")
    if status.quarantined or status.stuck:
        yield warning(
            "unreadable-files",
            f"{status.quarantined} in {settings.quarantine_root}, {len(status.stuck)} in the queue",
            "correct the program that wrote them, save those posts again, then remove the files",
        )
    else:
        yield ok("unreadable-files", "none")
    if status.condition:
        yield warning("condition", f"the last attempt failed: {status.condition}", status.fix or "see below")
    worker = status.worker
    yield ok("worker", f"PID {worker.pid} is running" if worker and worker.alive else "none is running now")
