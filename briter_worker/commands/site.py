"""The command group `site`: the sites of a cluster."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from briter_worker.client import parse_author
from briter_worker.commands import Json, output, queue, read_cluster, tables
from briter_worker.errors import UsageError
from briter_worker.job import format_time
from briter_worker.redaction import one_line
from briter_worker.wiring import open_database

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.cluster.sites import Site, SiteSummary

app = typer.Typer(no_args_is_help=True, help="Manage the sites of a cluster.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site.")]
_REMOTE = typer.Option(metavar="URL", help="Repository to publish to, without credentials.")
Remote = Annotated[str | None, _REMOTE]
Branch = Annotated[str | None, typer.Option(help="Branch to publish to. [env: BRITER_GIT_BRANCH]")]
Adapter = Annotated[str | None, typer.Option(help="Kind of site. [env: BRITER_ADAPTER]")]
Allow = Annotated[list[str] | None, typer.Option(metavar="FOLDER", help="Added folder. Repeatable.")]
Author = Annotated[
    str | None, typer.Option(metavar="'NAME <MAIL>'", help="Committer. [env: BRITER_GIT_AUTHOR_NAME]")
]
CredentialEnv = Annotated[
    str | None, typer.Option(metavar="VARIABLE", help="Nodes' variable with the token.")
]
CredentialFile = Annotated[str | None, typer.Option(metavar="PATH", help="Nodes' file with the token.")]
CredentialUser = Annotated[str | None, typer.Option(metavar="USER", help="User name for the token.")]
SshKey = Annotated[str | None, typer.Option(metavar="PATH", help="Nodes' file with the SSH key.")]
NoCredential = Annotated[bool, typer.Option("--no-credential", help="Remove the credentials.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Setting, as in config.json. Repeatable."),
]


@app.command()
def add(  # noqa: PLR0913 - each is an option
    name: Name,
    *,
    remote: Annotated[str, _REMOTE],
    branch: Branch = None,
    adapter: Adapter = None,
    allow: Allow = None,
    author: Author = None,
    credential_env: CredentialEnv = None,
    credential_file: CredentialFile = None,
    credential_user: CredentialUser = None,
    ssh_key: SshKey = None,
    own: Set = None,
    as_json: Json = False,
) -> None:
    """Add a site to the cluster."""
    settings = read_cluster("site add")
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    site = sites.Site(
        name,
        remote,
        branch or settings.git_branch,
        adapter or settings.adapter,
        # Stored in the row, so that all nodes agree.
        allowed=tuple(allow) if allow else settings.allowed_paths,
        settings=_read_own(own, author),
        credentials=_read_credentials(credential_env, credential_file, credential_user, ssh_key),
        created_at=time.time(),
    )
    sites.add(open_database(settings), site, settings)
    _write(site, as_json=as_json)


@app.command()
def change(  # noqa: PLR0913 - each is an option
    name: Name,
    *,
    remote: Remote = None,
    branch: Branch = None,
    adapter: Adapter = None,
    allow: Allow = None,
    author: Author = None,
    credential_env: CredentialEnv = None,
    credential_file: CredentialFile = None,
    credential_user: CredentialUser = None,
    ssh_key: SshKey = None,
    no_credential: NoCredential = False,
    own: Set = None,
    as_json: Json = False,
) -> None:
    """Update the given settings of a site. `--set KEY=` and `--allow ''` remove a value."""
    settings = read_cluster("site change")
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    database = open_database(settings)
    old = sites.get(database, name)
    values = {**old.settings, **_read_own(own, author)}
    credentials = _read_credentials(credential_env, credential_file, credential_user, ssh_key)
    site = replace(
        old,
        remote=remote or old.remote,
        branch=branch or old.branch,
        adapter=adapter or old.adapter,
        allowed=old.allowed if allow is None else tuple(filter(None, allow)),
        settings={key: value for key, value in values.items() if value != ""},
        credentials=credentials or (None if no_credential else old.credentials),
    )
    sites.change(database, site, settings)
    _write(site, as_json=as_json)


@app.command("list")
def list_(*, as_json: Json = False) -> None:
    """List the sites with their job counts."""
    settings = read_cluster("site list")
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    rows = sites.summaries(open_database(settings), time.time())
    if as_json:
        output.write_json([_summary_to_json(row) for row in rows])
    else:
        tables.write_sites(rows)


@app.command()
def show(name: Name, *, as_json: Json = False) -> None:
    """Show the registration of a site."""
    settings = read_cluster("site show")
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    _write(sites.get(open_database(settings), name), as_json=as_json)


@app.command()
def remove(
    name: Name,
    *,
    discard: Annotated[bool, typer.Option("--discard", help="Discard the site's jobs.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a site from the cluster. Its repository stays as it is."""
    settings = read_cluster("site remove")
    from briter_worker.cluster import sites  # noqa: PLC0415 - the extra [postgres]

    sites.remove(open_database(settings), name, discard=discard)
    output.answer({"name": name, "removed": True}, f"{one_line(name)} is removed", as_json=as_json)


@app.command()
def pause(
    name: Name, *, span: queue.Span = None, until: queue.Until = None, reason: queue.Reason = ""
) -> None:
    """Pause publishing of a site, as `pause --site`."""
    read_cluster("site pause")
    queue.pause(span=span, until=until, reason=reason, site=name)


@app.command()
def resume(name: Name) -> None:
    """Resume publishing of a site, as `resume --site`."""
    read_cluster("site resume")
    queue.resume(site=name)


def _summary_to_json(row: SiteSummary) -> dict[str, Any]:
    since = None if row.oldest is None else format_time(row.oldest)
    jobs = {"waiting": row.waiting, "claimed": row.jobs["claimed"], "failed": row.jobs["failed"]}
    return {**row.site.to_json(), "jobs": jobs, "waitingSince": since}


def _read_own(pairs: Sequence[str] | None, author: str | None) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set is {pair!r}; accepted: a key of config.json, = and its value")
        own[key.strip()] = value.strip()
    if author is not None:
        try:
            own["gitAuthorName"], own["gitAuthorEmail"] = parse_author(author)
        except ValueError as error:
            raise UsageError(f"--author: {error}") from None
    return own


def _read_credentials(
    variable: str | None, file: str | None, user: str | None, key: str | None
) -> dict[str, str] | None:
    given = {"env": variable, "file": file, "username": user, "sshKey": key}
    return {name: value for name, value in given.items() if value is not None} or None


def _write(site: Site, *, as_json: bool) -> None:
    if as_json:
        output.write_json(site.to_json())
    else:
        tables.write_site(site)
