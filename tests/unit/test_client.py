"""`enqueue`: what a writer in Python may rely on."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from briter_worker.client import enqueue

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "storage" / "queue"


def test_a_job_is_in_the_queue_under_its_id_when_the_call_returns(queue: Path) -> None:
    began = datetime.now(UTC) - timedelta(seconds=1)
    job = enqueue("a", ["content/a.md", "content/b"], queue=queue)
    assert job.path == queue / f"{job.id}.json"
    assert list(queue.iterdir()) == [job.path]
    found = json.loads(job.path.read_bytes())
    created = datetime.fromisoformat(found.pop("createdAt"))
    assert began <= created <= datetime.now(UTC)
    assert found == {
        "id": job.id,
        "type": "git-sync",
        "slug": "a",
        "paths": ["content/a.md", "content/b"],
    }
    assert UUID(job.id)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"paths": "content/a.md"}, "paths is a list of paths, not 'content/a.md'"),
        ({"paths": b"content/a.md"}, "paths is a list"),
        ({"paths": [5]}, "paths"),
        ({"slug": ""}, "slug"),
        ({"slug": "a\nb"}, "slug"),
        ({"message": "a\0b"}, "."),
        ({"at": "tomorrow"}, "'TOMORROW' is no ISO-8601 time|'tomorrow' is no ISO-8601 time"),
        ({"author": "Ada"}, "'Ada' is no author such as"),
        ({"author": "<a@b.c>"}, "no author"),
        ({"author": ("Ada", "")}, "author"),
        ({"attempts": 3, "id": "x"}, "attempts, id: set by the worker or by an argument of its own"),
        ({"status": "failed"}, "status: set by the worker"),
        ({"odd": object()}, "cannot be written as JSON"),
        ({"odd": float("nan")}, "JSON"),
        ({"odd": "x" * (1 << 20)}, "at most"),
        ({"odd": json.loads("[" * 70 + "]" * 70)}, "nested"),
        ({"odd": "\ud800"}, "."),
    ],
)
def test_what_the_worker_would_refuse_is_refused_at_once_and_leaves_nothing(
    queue: Path, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        enqueue(**{"slug": "a", "paths": ["content/a.md"], "queue": queue, **keys})
    assert not queue.exists() or not list(queue.iterdir())


def test_no_job_is_written_where_nobody_would_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRITER_APP_ROOT", str(tmp_path))
    monkeypatch.setenv("BRITER_DATABASE_URL", "postgresql://db/briter")
    with pytest.raises(ValueError, match=r"briter_worker\.cluster\.submit"):
        enqueue("a", ["content/a.md"])
    assert list(tmp_path.iterdir()) == []
    assert enqueue("a", ["content/a.md"], queue=tmp_path / "queue").path.exists()
