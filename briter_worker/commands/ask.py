"""Ask for a publication. Without typer, see `plain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from briter_worker import views
from briter_worker.commands import read_site
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from briter_worker.commands.plain import Enqueue
    from briter_worker.settings import Settings


def ask(asked: Enqueue) -> None:
    """Write a job, safely, and say which."""
    settings = read_site(asked.site)
    if settings.database_url:
        _send(settings, asked)
        return
    if asked.root is not None:
        raise UsageError(
            "--root goes with a cluster, and there is none: the worker reads the files where they are, in "
            f"{settings.git_worktree}. Fix: leave it out, or set BRITER_DATABASE_URL or BRITER_GIT_WORKTREE"
        )
    from briter_worker import client  # noqa: PLC0415 - only when there is a configuration

    try:
        job = client.enqueue(
            asked.slug,
            asked.paths,
            message=asked.message,
            at=asked.at,
            author=asked.author,
            queue=settings.queue_root,
        )
    except ValueError as error:
        raise UsageError(for_people(str(error))) from None
    _warn_of_refusals(settings, asked, _site_here(settings))
    _say(asked, {"id": job.id, "slug": asked.slug, "file": str(job.path)})


def _send(settings: Settings, asked: Enqueue) -> None:
    from briter_worker.client import compose  # noqa: PLC0415 - for a cluster only
    from briter_worker.cluster.asking import send  # noqa: PLC0415

    root = settings.git_worktree if asked.root is None else Path(asked.root).absolute()
    try:
        document = compose(asked.slug, asked.paths, message=asked.message, at=asked.at, author=asked.author)
        sent = send(settings, document, root=root)
    except ValueError as error:
        raise UsageError(for_people(str(error))) from None
    for path, reason in sent.left_out.items():
        views.tell(f"warning: {path} will not be published: {reason}")
    for path in sent.missing:
        views.tell(f"warning: {path} is not in {root}: if the site has it, it will be deleted there")
    _warn_of_refusals(settings, asked)
    _say(asked, {"id": sent.id, "slug": asked.slug, "site": sent.site})


def _say(asked: Enqueue, job: dict[str, str]) -> None:
    if asked.as_json:
        views.put_json(job)
    elif views.is_terminal():
        views.put(f"{for_people(asked.slug)} waits to be published, as job {job['id']}")
    else:
        views.put(job["id"])


def _warn_of_refusals(settings: Settings, asked: Enqueue, site: Path | None = None) -> None:
    """A person at a terminal learns at once what the worker would say later, and what is not in `site`."""
    from briter_worker.allowlist import Allowlist, PathRefusedError  # noqa: PLC0415 - loaded by now

    allowlist = Allowlist(settings.folders)
    for path in asked.paths:
        try:
            allowlist.resolve(path)
        except PathRefusedError as refused:
            views.tell(f"warning: {path} will not be published: {refused.reason}")
        else:
            if site is not None and not os.path.lexists(site / path):
                views.tell(f"warning: {path} is not in {site}: if the site has it, it will be deleted there")


def _site_here(settings: Settings) -> Path | None:
    """The site's work tree, where it is on this machine; a person who is in the wrong folder is told.

    Nothing is said where the queue has a place of its own: a CMS may have that alone.
    """
    site = settings.git_worktree
    if (site / ".git").exists():
        return site
    if settings.queue_root.is_relative_to(site):
        from briter_worker.git.pending import lacking  # noqa: PLC0415 - seldom

        views.tell(f"warning: {lacking(site)}")
    return None
