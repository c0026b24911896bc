"""Which commands there are."""

from __future__ import annotations

from typing import Annotated

import typer

from briter_worker import views
from briter_worker.commands import db, look, move, past, register, serve, steer, work

app = typer.Typer(
    name="briter-worker",
    help="Publishes the posts of a flat-file CMS through git, exactly once each.",
    add_completion=False,
    no_args_is_help=True,
    # Rich takes longer to load than most commands run.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(work.run)
app.command()(work.enqueue)
app.command("list")(look.list_)
app.command()(past.show)
app.command()(past.history)
app.command()(steer.retry)
app.command()(steer.cancel)
app.command("publish-now")(steer.publish_now)
app.command()(steer.pause)
app.command()(steer.resume)
app.command()(look.status)
app.command()(look.health)
app.command()(look.doctor)
app.command()(serve.serve)
app.command()(look.schema)
app.command("import")(move.import_)
app.command()(move.export)
app.add_typer(register.app, name="site")
app.add_typer(db.app, name="db")


def _version(*, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - slow, and rarely asked for

        views.put(f"briter-worker {version('briter-worker')}")
        raise typer.Exit


@app.callback()
def _for_every_command(
    context: typer.Context,
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[  # noqa: ARG001 - its callback has done the work
        bool,
        typer.Option(
            "--version",
            callback=lambda wanted: _version(wanted=wanted),
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    context.obj.debug = context.obj.debug or debug
