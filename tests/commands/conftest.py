"""What several files need: a dashboard, and a cluster with everything real."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_farm import Farm
from dashboards import Dashboard, serving
from requirements import provide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sites import Site

    from briter_worker.queues.postgres.database import Database


@pytest.fixture
def dashboard(site: Site) -> Iterator[Dashboard]:
    with serving(site) as served:
        yield served


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key and certificate of 127.0.0.1 in one file; nobody has reason to trust it."""
    provide("openssl", package="openssl")
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = f"-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout {file} -out {file}.crt"
    subprocess.run([*command.split(), *names.split()], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(f"{file}.crt").read_text())
    return file


@pytest.fixture
def farm(tmp_path: Path, database: Database, database_url: str) -> Iterator[Farm]:
    """No sites yet, and no hosts."""
    farm = Farm(tmp_path, database, database_url)
    try:
        yield farm
    finally:
        farm.end()
