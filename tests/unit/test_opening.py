"""The work tree's folders and files are opened part by part, and nothing but those."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from briter_worker.allowlist import PathRefusedError
from briter_worker.git.folders import Folders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    opened = Folders(tmp_path)
    yield opened
    opened.close()


def open_here() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a list of names


@pytest.mark.parametrize("folder", ["a/..", "a/../..", ".", "a//b", ".."])
def test_a_way_out_of_the_work_tree_is_no_folder(folders: Folders, tmp_path: Path, folder: str) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(PathRefusedError, match="write it in full"):
        folders.open(folder)


def test_however_many_folders_are_opened_few_are_open_at_once(folders: Folders, tmp_path: Path) -> None:
    before = open_here()
    for number in range(200):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        (tmp_path / "a" / str(number) / "file").write_text(f"{number}")
        with folders.file(f"a/{number}/file") as fd:
            assert os.read(fd, 10) == str(number).encode()
    assert open_here() - before < 70
