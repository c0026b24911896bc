#!/usr/bin/env python3
"""Ask the worker to publish a post: enqueue.py QUEUE SLUG PATH MESSAGE. Standard library only."""

import json
import os
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path


def enqueue(queue: Path, slug: str, paths: list[str], message: str) -> str:
    """Write the job aside, then rename it into the queue: the worker never sees half a file."""
    job = {
        "id": str(uuid.uuid4()),
        "slug": slug,
        "paths": paths,
        "message": message,
        "createdAt": datetime.now(UTC).isoformat(),
    }
    queue.mkdir(parents=True, exist_ok=True)
    aside = queue / f".{job['id']}.tmp"
    with aside.open("w", encoding="utf-8") as file:
        json.dump(job, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())  # a power cut after the rename must not leave an empty file
    aside.rename(queue / f"{job['id']}.json")
    return str(job["id"])


if __name__ == "__main__":
    folder, post, path, text = sys.argv[1:]
    print(enqueue(Path(folder), post, [path], text))
