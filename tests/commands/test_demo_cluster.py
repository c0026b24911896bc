"""A newcomer's first look at a cluster: one command, from anywhere, that leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from requirements import provide

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_post_arrives_once_though_a_worker_is_killed(tmp_path: Path) -> None:
    provide("git", package="git")
    before = {path.name for path in Path("/tmp").glob("briter-demo.*")}
    state = ["git", "-C", str(ROOT), "status", "--short", "scripts", "storage"]
    clean = subprocess.run(state, capture_output=True, text=True, check=False).stdout
    done = subprocess.run(
        [ROOT / "scripts" / "demo", "cluster"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is killed (SIGKILL), with posts in hand" in done.stdout
    assert re.search(r"^ +blog: 21 commits", done.stdout, re.MULTILINE)
    assert re.search(r"^ +shop: 21 commits", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith("docs/how-to/cluster.md.")
    assert not list(tmp_path.iterdir())
    assert {path.name for path in Path("/tmp").glob("briter-demo.*")} <= before
    assert subprocess.run(state, capture_output=True, text=True, check=False).stdout == clean
