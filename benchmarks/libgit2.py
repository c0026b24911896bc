"""The same commits by libgit2, run by `benchmarks.drain` in an environment of its own.

libgit2.py WORKTREE each|once PATH…: a commit for each path that was edited, and a push after each, or one
push at the end; prints the seconds it took.
"""

from __future__ import annotations

import sys
import time

import pygit2  # type: ignore[import-not-found]  # not of this project


def publish(worktree: str, paths: list[str], *, each: bool) -> float:
    """Seconds, without the start of Python."""
    began = time.perf_counter()
    repository = pygit2.Repository(worktree)
    person = repository.default_signature
    remote = repository.remotes["origin"]
    for number, path in enumerate(paths):
        repository.index.add(path)
        tree = repository.index.write_tree()
        message = f"Publish post {number}"
        parents = [repository.head.target]
        repository.create_commit("refs/heads/main", person, person, message, tree, parents)
        if each:
            repository.index.write()
            remote.push(["refs/heads/main:refs/heads/main"])
    if not each:
        repository.index.write()
        remote.push(["refs/heads/main:refs/heads/main"])
    return time.perf_counter() - began


if __name__ == "__main__":
    print(publish(sys.argv[1], sys.argv[3:], each=sys.argv[2] == "each"))
