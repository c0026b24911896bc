"""The queues under test. Another one is another parameter here, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from postgres import add_site
from queue_backends import Backend, Disk, Postgres

if TYPE_CHECKING:
    from pathlib import Path

    from briter_worker.queues.postgres.database import Database


@pytest.fixture(params=["disk", "disk-named-after-slugs", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """An empty queue."""
    if request.param == "postgres":
        database: Database = request.getfixturevalue("database")
        return Postgres(database, add_site(database))
    return Disk(tmp_path, named_after_slugs=request.param == "disk-named-after-slugs")
