"""The engines under test. A second one is a second parameter here, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from queue_engines import Disk, Engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=[False, True], ids=["disk", "disk-named-after-slugs"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    """An empty queue."""
    return Disk(tmp_path, named_after_slugs=request.param)
