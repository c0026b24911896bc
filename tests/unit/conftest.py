"""What several unit tests need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from queue_backends import Disk

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """An empty queue folder."""
    return Disk(tmp_path)
