"""Options and arguments that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from briter_worker.commands import plain

Json = Annotated[bool, typer.Option(plain.JSON, help="Print JSON, for programs.")]
Wanted = Annotated[str, typer.Argument(metavar="ID-or-SLUG", help="A job's id, or a post's slug.")]
OfSite = Annotated[
    str | None,
    typer.Option(plain.SITE, metavar="NAME", help="In a cluster: of which site; default: BRITER_SITE."),
]
