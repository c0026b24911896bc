"""The names of the worker's own refs, for those who read them with git and those who do without."""

from __future__ import annotations

PRIVATE = "refs/briter"
"""Everything below is the worker's own."""
DRY_RUN = "dry-run"


def of_branch(branch: str) -> str:
    """Below what is kept for this branch, and for no other."""
    # As one part of a name: the refs of branches `a` and `a/dry-run` must not be in each other's way.
    return f"{PRIVATE}/branches/{branch.replace('%', '%25').replace('/', '%2F')}"
