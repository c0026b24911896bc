"""A batch needs little memory, whatever it holds: its files are streamed into the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster_farm import Farm
    from sites import Site

PHOTOS, PHOTO_BYTES = 40, 3_900_000
"""Just small enough to be read by the worker, and not by git."""
MOST_MIB = 160
"""A worker alone needs half of it, and the photos need as much again."""
PROGRAM = """
import atexit, runpy, sys

def tell():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(status["VmHWM"].split()[0], file=sys.stderr)

atexit.register(tell)
runpy.run_module("briter_worker", run_name="__main__")
"""


def peak_of_a_run(env: Mapping[str, str]) -> float:
    """Return the most MiB that a `run --once` ever had in memory; its git commands apart."""
    command = [sys.executable, "-c", PROGRAM, "run", "--once"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    return int(done.stderr.splitlines()[-1]) / 1024


def photo(number: int) -> str:
    return f"{number}\n".ljust(PHOTO_BYTES, "x")


@pytest.mark.parametrize("kind", ["one job", "many jobs", "through a filter"])
def test_an_album_of_any_size_is_published_in_bounded_memory(site: Site, kind: str) -> None:
    if kind == "through a filter":
        site.write_post(".gitattributes", "*.jpg filter=photo\n")
        site.git("config", "filter.photo.clean", "cat")
        site.commit_all("Attributes")
    paths = [f"content/posts/album/{number}.jpg" for number in range(PHOTOS)]
    for number, path in enumerate(paths):
        site.write_post(path, photo(number))
        if kind == "many jobs":
            site.save(f"photo-{number}", [path])
    if kind != "many jobs":
        site.save("album", paths)
    assert peak_of_a_run(site.environment()) < MOST_MIB
    names = site.git("ls-tree", "-r", "--name-only", "main", "content/posts/album", cwd=site.remote)
    assert sorted(names.splitlines()) == sorted(paths)
    assert site.remote_file(paths[-1]) == photo(PHOTOS - 1)


def test_an_album_is_published_by_a_cluster_in_bounded_memory(farm: Farm) -> None:
    farm.add("blog")
    for number in range(PHOTOS):
        farm.save("blog", f"photo-{number}", photo(number))
    assert peak_of_a_run(os.environ | farm.environment("one")) < MOST_MIB
    assert len(farm.published("blog")) == PHOTOS
    assert farm.site("blog").remote_file(f"content/photo-{PHOTOS - 1}.md") == photo(PHOTOS - 1)
