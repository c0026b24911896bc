"""Hundreds of jobs at once: one drain, which may be stopped anywhere."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from sites import lines_of

if TYPE_CHECKING:
    from sites import Site

_JOBS = 300


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_stop_in_the_middle_of_an_import_loses_and_doubles_nothing(site: Site, after: float) -> None:
    for number in range(_JOBS):
        site.write_post(f"content/posts/{number}.md", f"{number}\n")
        site.save(f"p{number}", [f"content/posts/{number}.md"])
    with site.running("run", "--once", BRITER_WORKER_SHUTDOWN_TIMEOUT_MS="1") as worker:
        next(event for event in lines_of(worker) if event["event"] == "start")
        time.sleep(after)  # wherever it is by then
        worker.terminate()
        worker.communicate(timeout=60)
    assert site.run_once().returncode == 0
    assert site.jobs() == []
    subjects = Counter(subject for _, subject in site.remote_log())
    assert subjects == {"Start the site": 1} | {f"Publish p{number}": 1 for number in range(_JOBS)}
    assert site.git("status", "--porcelain") == ""
    site.git("fsck", "--strict")
