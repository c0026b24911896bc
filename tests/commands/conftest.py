"""What several files need: a dashboard, and a cluster with everything real."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cluster_farm import Farm
from dashboards import Dashboard, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sites import Site

    from briter_worker.queues.postgres.database import Database


@pytest.fixture
def dashboard(site: Site) -> Iterator[Dashboard]:
    """The dashboard of the site."""
    with serving(site) as served:
        yield served


@pytest.fixture
def farm(tmp_path: Path, database: Database, database_url: str) -> Iterator[Farm]:
    """No sites yet, and no hosts."""
    farm = Farm(tmp_path, database, database_url)
    try:
        yield farm
    finally:
        farm.end()
