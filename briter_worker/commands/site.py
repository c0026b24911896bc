"""The command groups `site` and `token`: the sites of a cluster, and the tokens of its API."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from briter_worker.client import parse_author
from briter_worker.commands import Json, output, queue, read_cluster, user_name
from briter_worker.errors import UsageError, one_line, os_error_fix, os_error_text
from briter_worker.job import format_time
from briter_worker.wiring import open_database

with suppress(ImportError):  # the extra [postgres]; without it, `open_database` says how to install it
    from briter_worker.cluster import sites, sites_file, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Manage the sites of a cluster.", rich_markup_mode=None)
token_app = typer.Typer(
    no_args_is_help=True, help="Manage the API tokens of a cluster.", rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the site.")]


def _open(command: str) -> tuple[Settings, Database]:
    settings = read_cluster(command)
    return settings, open_database(settings)


@app.command(
    "change", help="Update the given settings of a site. `--set KEY=` and `--allow ''` remove a value."
)
@app.command("add", help="Add a site to the cluster. `--remote` is required.")
def save(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    name: Name,
    *,
    remote: Annotated[
        str | None, typer.Option(metavar="URL", help="Repository to publish to, without credentials.")
    ] = None,
    branch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Branch to publish to. [env: BRITER_GIT_BRANCH]")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="KIND", help="Kind of site. [env: BRITER_ADAPTER]")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="Added folder. Repeatable.")
    ] = None,
    author: Annotated[
        str | None, typer.Option(metavar="'NAME <MAIL>'", help="Committer. [env: BRITER_GIT_AUTHOR_NAME]")
    ] = None,
    credential_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Nodes' variable with the token.")
    ] = None,
    credential_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="Nodes' file with the token.")
    ] = None,
    credential_user: Annotated[
        str | None, typer.Option(metavar="USER", help="User name for the token.")
    ] = None,
    ssh_key: Annotated[str | None, typer.Option(metavar="PATH", help="Nodes' file with the SSH key.")] = None,
    no_credential: Annotated[bool, typer.Option("--no-credential", help="Remove the credentials.")] = False,
    own: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting, as in config.json. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add or update a site, after the name of the command."""
    is_new = context.info_name == "add"
    settings, database = _open(f"site {context.info_name}")
    if is_new:
        if remote is None:
            raise UsageError("site add needs --remote URL")
        # The settings are stored in the row, so that all nodes agree.
        branch, adapter = branch or settings.git_branch, adapter or settings.adapter
        now = database.read_clock()
        old = sites.Site(name, remote, branch, adapter, settings.allowed_paths, created_at=now)
    else:
        old = sites.get(database, name)
    values = {**old.settings, **_read_own(own, author)}
    given = {"env": credential_env, "file": credential_file, "username": credential_user, "sshKey": ssh_key}
    credentials = {key: value for key, value in given.items() if value is not None}
    site = replace(
        old,
        remote=remote or old.remote,
        branch=branch or old.branch,
        adapter=adapter or old.adapter,
        allowed=old.allowed if allow is None else tuple(filter(None, allow)),
        settings={key: value for key, value in values.items() if value != ""},
        credentials=credentials or (None if no_credential else old.credentials),
        changed_by=user_name(),
    )
    (sites.add if is_new else sites.change)(database, site, settings)
    _show(site, as_json=as_json)


def _show(site: sites.Site, *, as_json: bool) -> None:
    document = site.to_json()
    output.answer(document, lambda: output.write_facts(document), as_json=as_json)


@app.command("list")
def list_(*, as_json: Json = False) -> None:
    """List the sites with their job counts."""
    _, database = _open("site list")
    rows = sites.summaries(database, database.read_clock())
    found = [_summary_to_json(row) for row in rows]
    cells = [
        (row.name, row.waiting, row.jobs["claimed"], row.jobs["failed"], row.site.remote) for row in rows
    ]
    headings = ("Site", "Waiting", "In flight", "Failed", "Remote")
    empty = "No sites yet. Add one: briter-worker site add NAME --remote URL"
    output.answer(found, lambda: output.write_rows(cells, headings, empty=empty), as_json=as_json)


@app.command()
def show(name: Name, *, as_json: Json = False) -> None:
    """Show the registration of a site."""
    _, database = _open("site show")
    site = sites.get(database, name)
    _show(site, as_json=as_json)


@app.command()
def remove(
    name: Name,
    *,
    discard: Annotated[bool, typer.Option("--discard", help="Discard the site's jobs.")] = False,
    as_json: Json = False,
) -> None:
    """Remove a site from the cluster. Its repository stays as it is."""
    _, database = _open("site remove")
    with database.transaction() as connection:
        sites.remove(connection, name, discard=discard, by=user_name())
    output.answer({"name": name, "removed": True}, f"{one_line(name)} is removed", as_json=as_json)


@app.command()
def apply(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file that declares sites. -: stdin.")],
    *,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove the sites that are not in the file.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show the changes, and make none.")] = False,
    as_json: Json = False,
) -> None:
    """Make the sites what a file declares: all changes or none."""
    settings, database = _open("site apply")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {os_error_text(error, with_path=False)}", os_error_fix(error)
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8") from None
    declared = sites_file.read_sites(text, settings, source="stdin" if file == "-" else file)
    changes = sites_file.compare(sites.all_sites(database), declared, prune=prune)
    if not diff:
        sites_file.apply(database, changes, user_name())
    document = {**changes.to_json(), "applied": not diff}
    output.answer(document, lambda: output.write_differences(changes, applied=not diff), as_json=as_json)


@app.command()
def export(*, as_json: Json = False) -> None:
    """Print a file for `site apply` that declares the sites as they are."""
    _, database = _open("site export")
    document = sites_file.declare(sites.all_sites(database))
    output.answer(document, sites_file.dump(document), as_json=as_json)


@app.command()
def pause(name: Name, *, span: queue.Span = None, reason: queue.Reason = "") -> None:
    """Pause publishing of a site, as `pause --site`."""
    read_cluster("site pause")
    queue.pause(span=span, reason=reason, site=name)


@app.command()
def resume(name: Name) -> None:
    """Resume publishing of a site, as `resume --site`."""
    read_cluster("site resume")
    queue.resume(site=name)


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the token, which records show.")],
    *,
    site: Annotated[list[str], typer.Option(metavar="NAME", help="Site that the token opens. Repeatable.")],
    may: Annotated[
        str, typer.Option(metavar="RIGHTS", help="Some of enqueue,read,act, with commas between.")
    ] = "enqueue,read",
    as_json: Json = False,
) -> None:
    """Create a token of the API, and print it. It is not shown again."""
    _, database = _open("token create")
    rights = [each.strip() for each in may.split(",") if each.strip()]
    token = tokens.create(database, name, sites_of=site, rights=rights, by=user_name())
    output.answer({"name": name, "token": token}, token, as_json=as_json)


@token_app.command("list")
def list_tokens(*, as_json: Json = False) -> None:
    """List the tokens with their sites and rights."""
    _, database = _open("token list")
    found = [token.to_json() for token in tokens.all_tokens(database)]
    cells = [
        (
            each["name"],
            ", ".join(each["rights"]),
            ", ".join(each["sites"]),
            each["createdBy"],
            each["createdAt"],
        )
        for each in found
    ]
    headings = ("Token", "Rights", "Sites", "Created by", "Created")
    empty = "No tokens yet. Create one: briter-worker token create NAME --site SITE"
    output.answer(found, lambda: output.write_rows(cells, headings, empty=empty), as_json=as_json)


@token_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")], *, as_json: Json = False
) -> None:
    """Delete a token. Requests with it are refused at once."""
    _, database = _open("token revoke")
    tokens.revoke(database, name)
    output.answer({"name": name, "revoked": True}, f"the token {name} is revoked", as_json=as_json)


def _summary_to_json(row: sites.SiteSummary) -> dict[str, Any]:
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
