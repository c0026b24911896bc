#!/usr/bin/env python3
"""Enqueue a post: enqueue.py QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]].

Needs the standard library only. To use it as a module: `from enqueue import enqueue`.
"""

import json
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path


def enqueue(
    queue: Path,
    slug: str,
    paths: list[str],
    message: str,
    *,
    author: tuple[str, str] | None = None,
    scheduled_for: str | None = None,
) -> str:
    """Write the job aside, then rename it into the queue: the worker never sees half a file."""
    job: dict[str, object] = {
        "id": str(uuid.uuid4()),
        "slug": slug,
        "paths": paths,
        "message": message,
        "createdAt": datetime.now(UTC).isoformat(),
    }
    if author:
        job["author"] = {"name": author[0], "email": author[1]}
    if scheduled_for:
        job["scheduledFor"] = scheduled_for  # such as 2026-01-31T09:00:00+01:00
    queue.mkdir(parents=True, exist_ok=True)
    aside = queue / f".{job['id']}.tmp"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(job, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())  # a power cut after the rename must not leave an empty file
    aside.rename(queue / f"{job['id']}.json")
    return str(job["id"])


if __name__ == "__main__":
    if len(sys.argv) not in {5, 7, 8}:
        sys.exit("usage: enqueue.py QUEUE SLUG PATH MESSAGE [AUTHOR-NAME AUTHOR-EMAIL [SCHEDULED-FOR]]")
    folder, post, path, text, *more = sys.argv[1:]
    print(
        enqueue(
            Path(folder),
            post,
            [path],
            text,
            author=(more[0], more[1]) if more else None,
            scheduled_for=more[2] if more[2:] else None,
        )
    )
