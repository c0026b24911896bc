"""The register of a cluster's sites."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from briter_worker import views
from briter_worker.commands import DeclinedError, read_cluster, steer
from briter_worker.commands.options import Json  # noqa: TC001 - typer reads it
from briter_worker.errors import UsageError, for_people

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from briter_worker.cluster.sites import Site, Standing

app = typer.Typer(no_args_is_help=True, help="In a cluster: its sites.", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")]
Remote = Annotated[
    str | None, typer.Option(metavar="URL", help="The repository to publish to, without any credential.")
]
Branch = Annotated[str | None, typer.Option(help="Its branch; default: BRITER_GIT_BRANCH.")]
Adapter = Annotated[str | None, typer.Option(help="The kind of site; default: BRITER_ADAPTER.")]
Allow = Annotated[
    list[str] | None, typer.Option(metavar="FOLDER", help="A folder besides the adapter's; repeatable.")
]
Author = Annotated[
    str | None, typer.Option(metavar="'NAME <MAIL>'", help="The committer; default: BRITER_GIT_AUTHOR_NAME.")
]
Variable = Annotated[
    str | None, typer.Option(metavar="VARIABLE", help="The workers' variable that holds the remote's token.")
]
Secret = Annotated[str | None, typer.Option(metavar="PATH", help="The workers' file that holds it.")]
User = Annotated[str | None, typer.Option(metavar="USER", help="The user that goes with the token.")]
Key = Annotated[str | None, typer.Option(metavar="PATH", help="The workers' file with the SSH key.")]
Without = Annotated[bool, typer.Option("--no-credential", help="It needs none any more.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the site's own, as in config.json."),
]


@app.command()
def add(  # noqa: PLR0913 - each is an option
    name: Name,
    *,
    remote: Annotated[str, typer.Option(metavar="URL", help="The repository, without any credential.")],
    branch: Branch = None,
    adapter: Adapter = None,
    allow: Allow = None,
    author: Author = None,
    credential_env: Variable = None,
    credential_file: Secret = None,
    credential_user: User = None,
    ssh_key: Key = None,
    own: Set = None,
    as_json: Json = False,
) -> None:
    """Add a site: its repository, its kind, its credential's place."""
    settings = read_cluster("site add")
    from briter_worker.cluster import sites  # noqa: PLC0415 - see app
    from briter_worker.wiring import open_database  # noqa: PLC0415

    site = sites.Site(
        name,
        remote,
        branch or settings.git_branch,
        adapter or settings.adapter,
        # Kept in the row, so that no two workers read it differently.
        allowed=tuple(allow) if allow else settings.allowed_paths,
        settings=_own(own, author),
        credentials=_credentials(credential_env, credential_file, credential_user, ssh_key),
        created_at=time.time(),
    )
    with _declining():
        sites.add(open_database(settings), site, settings)
    _put(site, as_json=as_json)


@app.command()
def change(  # noqa: PLR0913 - as above
    name: Name,
    *,
    remote: Remote = None,
    branch: Branch = None,
    adapter: Adapter = None,
    allow: Allow = None,
    author: Author = None,
    credential_env: Variable = None,
    credential_file: Secret = None,
    credential_user: User = None,
    ssh_key: Key = None,
    no_credential: Without = False,
    own: Set = None,
    as_json: Json = False,
) -> None:
    """Change what is given. From the next publication on; `--set KEY=` and `--allow ''` take back."""
    settings = read_cluster("site change")
    from briter_worker.cluster import sites  # noqa: PLC0415 - see app
    from briter_worker.wiring import open_database  # noqa: PLC0415

    database = open_database(settings)
    with _declining():
        old = sites.get(database, name)
        site = replace(
            old,
            remote=remote or old.remote,
            branch=branch or old.branch,
            adapter=adapter or old.adapter,
            allowed=old.allowed if allow is None else tuple(filter(None, allow)),
            settings={
                key: value for key, value in {**old.settings, **_own(own, author)}.items() if value != ""
            },
            credentials=_credentials(credential_env, credential_file, credential_user, ssh_key)
            or (None if no_credential else old.credentials),
        )
        sites.change(database, site, settings)
    _put(site, as_json=as_json)


@app.command("list")
def list_(*, as_json: Json = False) -> None:
    """Every site, with what waits in it."""
    settings = read_cluster("site list")
    from briter_worker.cluster import sites  # noqa: PLC0415 - see app
    from briter_worker.wiring import open_database  # noqa: PLC0415

    now = time.time()
    rows = sites.standings(open_database(settings), now)
    if as_json:
        views.put_json([row.as_json() for row in rows])
    else:
        _put_rows(rows, now)


@app.command()
def show(name: Name, *, as_json: Json = False) -> None:
    """What is known of a site."""
    settings = read_cluster("site show")
    from briter_worker.cluster import sites  # noqa: PLC0415 - see app
    from briter_worker.wiring import open_database  # noqa: PLC0415

    with _declining():
        _put(sites.get(open_database(settings), name), as_json=as_json)


@app.command()
def remove(
    name: Name,
    *,
    discard: Annotated[bool, typer.Option("--discard", help="With the jobs that it still has.")] = False,
    as_json: Json = False,
) -> None:
    """Take a site out of the cluster; its repository stays as it is."""
    settings = read_cluster("site remove")
    from briter_worker.cluster import sites  # noqa: PLC0415 - see app
    from briter_worker.wiring import open_database  # noqa: PLC0415

    with _declining():
        sites.remove(open_database(settings), name, discard=discard)
    if as_json:
        views.put_json({"name": name, "removed": True})
    else:
        views.put(f"{for_people(name)} is removed")


@app.command()
def pause(
    name: Name, *, span: steer.Span = None, until: steer.Until = None, reason: steer.Reason = ""
) -> None:
    """Publish nothing of a site until `site resume`. Or for a time: as `pause --site`."""
    read_cluster("site pause")
    steer.pause(span=span, until=until, reason=reason, site=name)


@app.command()
def resume(name: Name) -> None:
    """End a site's pause: as `resume --site`."""
    read_cluster("site resume")
    steer.resume(site=name)


def _own(pairs: Sequence[str] | None, author: str | None) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for pair in pairs or ():
        key, given, value = pair.partition("=")
        if not given:
            raise UsageError(
                for_people(f"--set {pair}: a key of config.json and its value, such as gitHooks=no")
            )
        own[key.strip()] = value.strip()
    if author is not None:
        from briter_worker.client import parse_author  # noqa: PLC0415 - rarely needed

        try:
            person = parse_author(author)
        except ValueError as error:
            raise UsageError(for_people(f"--author: {error}")) from None
        own |= {"gitAuthorName": person["name"], "gitAuthorEmail": person["email"]}
    return own


def _credentials(
    variable: str | None, file: str | None, user: str | None, key: str | None
) -> dict[str, str] | None:
    said = {"env": variable, "file": file, "username": user, "sshKey": key}
    return {name: value for name, value in said.items() if value is not None} or None


@contextmanager
def _declining() -> Iterator[None]:
    from briter_worker.cluster.sites import SiteError  # noqa: PLC0415 - loaded by now

    try:
        yield
    except SiteError as error:
        raise DeclinedError(str(error)) from None


def _put(site: Site, *, as_json: bool) -> None:
    if as_json:
        views.put_json(site.as_json())
        return
    place = site.credentials or {}
    views.put_facts(
        [
            ("site", site.name),
            ("publishes to", f"{site.branch} on {site.remote}"),
            ("adapter", site.adapter),
            ("allowed besides", ", ".join(site.allowed)),
            ("credential", ", ".join(f"{key} {value}" for key, value in place.items())),
            *((key, str(value)) for key, value in site.settings.items()),
            *([("paused", views.pause_in_words(site.paused, time.time()))] if site.paused else []),
        ]
    )


def _put_rows(rows: Sequence[Standing], now: float) -> None:
    if not views.is_terminal():
        views.put_columns(
            [row.site.name, str(row.waiting), str(row.claimed), str(row.failed), row.site.remote]
            for row in rows
        )
        return
    from rich.table import Table  # noqa: PLC0415 - only a terminal pays for it
    from rich.text import Text  # noqa: PLC0415

    if not rows:
        views.put("No sites yet: briter-worker site add makes one.")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("Site", "Waiting", "In flight", "Failed", "Since", "Remote"):
        table.add_column(head, overflow="fold")
    for row in rows:
        since = "" if row.oldest is None else views.ago(row.oldest - now)
        counts = (str(count or "") for count in (row.waiting, row.claimed, row.failed))
        table.add_row(Text(row.site.name), *counts, since, Text(for_people(row.site.remote)))
    views.put_rich(table)
