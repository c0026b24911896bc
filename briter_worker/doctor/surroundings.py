"""The machine around the site: configuration, folders, disk, clock, queue."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from typing import TYPE_CHECKING

from briter_worker.doctor.finding import error, ok, warning
from briter_worker.errors import PublishError
from briter_worker.job import State as JobState
from briter_worker.plugins import Plugins
from briter_worker.settings import PREFIX, settings_schema
from briter_worker.standing import stand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from briter_worker.doctor.finding import Finding
    from briter_worker.settings import Settings

_MEBIBYTE = 1 << 20
_ENOUGH = 500 * _MEBIBYTE
_TOO_LITTLE = 50 * _MEBIBYTE
_FIRST_YEAR = 2020
_SKEW = 5.0
_KNOWN = frozenset({f"{PREFIX}DEBUG"})
_IGNORED = {
    "GIT_SSH_COMMAND": "git config core.sshCommand '…' in the site's repository",
    "GIT_SSH": "git config core.sshCommand '…' in the site's repository",
    "GIT_ASKPASS": "a credential helper (git config credential.helper …), or an ssh key",
    "SSH_ASKPASS": "a key without a passphrase, or ssh-agent (SSH_AUTH_SOCK)",
    "GIT_CONFIG_COUNT": "git config in the site's repository",
    "GIT_CONFIG_PARAMETERS": "git config in the site's repository",
    "GIT_DIR": "BRITER_GIT_WORKTREE",
    "GIT_WORK_TREE": "BRITER_GIT_WORKTREE",
    "GIT_AUTHOR_NAME": "BRITER_GIT_AUTHOR_NAME",
    "GIT_AUTHOR_EMAIL": "BRITER_GIT_AUTHOR_EMAIL",
    "GIT_COMMITTER_NAME": "BRITER_GIT_AUTHOR_NAME",
    "GIT_COMMITTER_EMAIL": "BRITER_GIT_AUTHOR_EMAIL",
    "GIT_PROXY_COMMAND": "http_proxy, https_proxy or core.sshCommand",
    "GIT_SSL_NO_VERIFY": "SSL_CERT_FILE with the host's certificate",
    "GIT_SSL_CAINFO": "SSL_CERT_FILE",
}
"""Variables that a person sets for their own git, and what the worker reads instead."""


def configuration(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings that nobody reads are likely misspelt ones."""
    known = settings_schema()["properties"]
    path = settings.config_path
    variables = {what["title"] for what in known.values()} | _KNOWN
    try:
        keys = set(json.loads(path.read_bytes().decode("utf-8-sig")))
        yield ok("configuration", f"{path} was read; the environment stands above it")
    except FileNotFoundError:
        keys = set()
        yield ok("configuration", f"from the environment and defaults; there is no {path}")
    for name in sorted(keys - set(known)):
        yield warning(
            "configuration",
            f"{path} has a key that nothing reads: {name}",
            "correct its spelling: briter-worker schema config lists the keys",
        )
    for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in variables):
        yield warning(
            "configuration",
            f"the environment has a variable that nothing reads: {name}",
            "correct its spelling: docs/reference/configuration.md lists them",
        )
    for name in sorted(name for name in _IGNORED if environ.get(name)):
        yield warning(
            "environment", f"{name} is set, but the worker does not use it", f"use {_IGNORED[name]}"
        )
    if settings.worker_dry_run:
        yield warning(
            "dry-run",
            "dry run is on: nothing reaches the remote",
            "set BRITER_WORKER_DRY_RUN=false to go live",
        )
    else:
        yield ok("dry-run", "live: publications reach the remote")


def folders(settings: Settings) -> Iterator[Finding]:
    """What the worker writes, beside the repository."""
    for check, folder in {
        "queue": settings.queue_root,
        "quarantine": settings.quarantine_root,
        "storage": settings.storage_root,
    }.items():
        yield writable(check, folder)
    yield _lock_file(settings)


def writable(check: str, folder: Path) -> Finding:
    """Whether a file can be written there, found out by writing one that never has a name."""
    fix = f"make {folder} a folder that the worker's user may write"
    place = _existing(folder)
    if not place.is_dir():
        return error(check, f"{place} is no folder", fix)
    if place != folder:
        if os.access(place, os.W_OK | os.X_OK):
            return ok(check, f"{folder} is not there yet; it is made when it is needed")
        return error(check, f"{folder} is not there, and cannot be made in {place}", fix)
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


def _lock_file(settings: Settings) -> Finding:
    path = settings.lock_path
    fix = f"remove {path} while no worker runs, or give the worker's user write access"
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ok("lock", f"{path} is made when the worker starts")
    except OSError as problem:
        return error("lock", f"{path}: {problem.strerror}", fix)
    if not stat.S_ISREG(found.st_mode) or not os.access(path, os.R_OK | os.W_OK):
        return error("lock", f"{path} is no file that the worker can write", fix)
    return ok("lock", f"{path} can be written")


def disk(settings: Settings) -> Iterator[Finding]:
    """A full disk stops everything, so it is told while there is time."""
    for name, folder in {"storage": settings.storage_root, "site": settings.git_worktree}.items():
        free = shutil.disk_usage(_existing(folder)).free
        text = f"{free // _MEBIBYTE} MiB free for the {name} at {folder}"
        fix = "free some space"
        if free < _TOO_LITTLE:
            yield error("disk", text, fix)
        elif free < _ENOUGH:
            yield warning("disk", text, fix)
        else:
            yield ok("disk", text)


def clock(settings: Settings) -> Finding:
    """Due times and retries follow the clock."""
    fix = "set the clock: timedatectl set-ntp true"
    place = _existing(settings.storage_root)
    now = time.time()
    if time.gmtime(now).tm_year < _FIRST_YEAR:
        return error("clock", f"the clock says it is {time.strftime('%Y-%m-%d', time.gmtime(now))}", fix)
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".doctor-") as file:
            file.write(b"\n")
            file.flush()
            skew = os.fstat(file.fileno()).st_mtime - now
    except OSError:
        return ok("clock", "plausible")  # that nothing can be written is told elsewhere
    if abs(skew) > _SKEW:
        return warning("clock", f"the file server's clock is {skew:+.0f} s off this machine's", fix)
    return ok("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def plugins(settings: Settings) -> Finding:
    """Which plugins the worker asks, in that order."""
    try:
        names = Plugins(settings.plugins).names
    except PublishError as broken:
        what, _, fix = broken.text.partition(" Fix: ")
        return error("plugins", what, fix or "correct it, or uninstall it")
    except Exception as mistake:  # noqa: BLE001 - whatever another's code raises
        return error("plugins", f"{type(mistake).__name__}: {mistake}", "correct the plugin, or uninstall it")
    return ok("plugins", ", ".join(names) or "none")


def queue(settings: Settings, now: float) -> Iterator[Finding]:
    """What is in the queue that somebody has to look at."""
    standing = stand(settings, now)
    if standing.paused:
        yield warning(
            "pause", "nothing is published while the site is paused", "briter-worker resume ends the pause"
        )
    failed = standing.jobs[JobState.FAILED.value]
    if failed:
        yield warning(
            "dead-letters",
            f"{failed} failed for good",
            "briter-worker list --status failed shows why; then retry or cancel them",
        )
    else:
        yield ok("dead-letters", "none")
    if standing.quarantined or standing.stuck:
        yield warning(
            "unreadable-files",
            f"{standing.quarantined} in {settings.quarantine_root}, {len(standing.stuck)} in the queue",
            "correct what wrote them, save those posts again, then remove the files",
        )
    else:
        yield ok("unreadable-files", "none")
    if standing.condition:
        yield warning("condition", f"the last attempt failed: {standing.condition}", "see the findings here")
    worker = standing.worker
    yield ok("worker", f"PID {worker.pid} is running" if worker and worker.alive else "none is running now")
