"""A Postgres server of its own for as long as it is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.lab import Lab

_DEBIAN = Path("/usr/lib/postgresql")


@contextmanager
def server(lab: Lab) -> Iterator[Path]:
    """Yield the folder of its socket. It flushes as Postgres does by default (fsync, synchronous_commit)."""
    programs = _find_programs()
    is_root = os.geteuid() == 0
    folder = Path(tempfile.mkdtemp(prefix="briter-bench-pg-"))
    try:
        if is_root:  # Postgres refuses to run as root
            shutil.chown(folder, "postgres", "postgres")

        def run(program: str, *arguments: str) -> None:
            before = ["runuser", "-u", "postgres", "--"] if is_root else []
            command = [*before, str(programs / program), "-D", str(folder / "data"), *arguments]
            done = subprocess.run(command, env=lab.env, cwd="/", stdout=subprocess.DEVNULL, check=False)
            if done.returncode:
                raise RuntimeError(f"{program} failed")

        run("initdb", "-A", "trust", "-U", "bench", "-E", "UTF8", "--no-locale")
        options = f"-c listen_addresses= -c unix_socket_directories={folder}"
        run("pg_ctl", "start", "-w", "-l", str(folder / "log"), "-o", options)
        try:
            yield folder
        finally:
            run("pg_ctl", "stop", "-w", "-m", "fast")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_programs() -> Path:
    for initdb in sorted(_DEBIAN.glob("*/bin/initdb"), reverse=True):
        return initdb.parent
    if path := shutil.which("initdb"):
        return Path(path).parent
    raise RuntimeError("there is no Postgres: apt-get install postgresql")
