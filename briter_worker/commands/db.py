"""The cluster's database: bring it up to date, and look whether it is."""

from __future__ import annotations

import typer

from briter_worker import views
from briter_worker.commands import read_cluster
from briter_worker.commands.options import Json  # noqa: TC001 - typer reads it

app = typer.Typer(no_args_is_help=True, help="In a cluster: the database.", rich_markup_mode=None)


@app.command()
def upgrade(*, as_json: Json = False) -> None:
    """Make the tables, or bring them up to date. Safe while older workers run, and to repeat."""
    settings = read_cluster("db upgrade")
    from briter_worker.wiring import open_database  # noqa: PLC0415 - see app

    database = open_database(settings)
    done = database.upgrade()
    version = database.version()
    if as_json:
        views.put_json({"version": version, "applied": done})
    elif done:
        ours = [name for name in done if not name.startswith("procrastinate")]
        views.put(f"the database is at version {version} now: {', '.join(ours) or 'procrastinate is newer'}")
    else:
        views.put(f"the database is up to date (version {version})")


@app.command()
def check(*, as_json: Json = False) -> None:
    """Whether the database can be reached, and fits this program."""
    settings = read_cluster("db check")
    from briter_worker.wiring import open_database  # noqa: PLC0415 - see app

    database = open_database(settings)
    database.check()
    version = database.version()
    if as_json:
        views.put_json({"ok": True, "version": version})
    else:
        views.put(f"the database fits this program (version {version})")
