"""A pause that somebody's editor or a broken disk has spoilt is still a pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from briter_worker.queues.pausing import NAME, Pausing

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"since": 1}',
        b'{"since": "x", "until": null, "reason": ""}',
        b"\xff\xfe",
        b"[" * 99_999,
    ],
)
def test_damage_does_not_end_a_pause(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    pause = Pausing(tmp_path).read(NOW)
    assert pause is not None
    assert "cannot be read" in pause.reason
    assert pause == Pausing(tmp_path).read(NOW + 1)


def test_a_folder_in_its_place_is_a_pause_too(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert Pausing(tmp_path).read(NOW) is not None
