"""Trouble at the remote: away, refusing every push or some, locked, slow."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from sites import Site

_REFUSE = "#!/bin/sh\necho 'not now' >&2\nexit 1\n"
_REFUSE_SOME = """#!/bin/sh
while read -r old new ref; do
  if git log --format=%B "$old..$new" | grep -q "save titled[01]"; then
    echo 'these not now' >&2
    exit 1
  fi
done
"""
_SLOW = "#!/bin/sh\ncat >/dev/null\nsleep 0.3\n"


class Outages:
    """Makes the remote fail for a moment, again and again."""

    def __init__(self, site: Site, dice: random.Random) -> None:
        self._remote = site.remote
        self._away = site.root / "away.git"
        self._dice = dice

    def act(self) -> None:
        """Cause one kind of trouble, then none."""
        trouble = [
            self._gone(),
            self._hook("pre-receive", _REFUSE),
            self._hook("pre-receive", _REFUSE_SOME),
            self._hook("pre-receive", _SLOW),
            self._hook("post-receive", _SLOW),
            self._locked(),
        ]
        with self._dice.choice(trouble):
            time.sleep(self._dice.uniform(0.2, 1.2))
        time.sleep(self._dice.uniform(0.2, 1.5))

    @contextmanager
    def _gone(self) -> Iterator[None]:
        self._remote.rename(self._away)
        try:
            yield
        finally:
            self._away.rename(self._remote)

    @contextmanager
    def _hook(self, name: str, text: str) -> Iterator[None]:
        hook = self._remote / "hooks" / name
        partial = hook.with_suffix(".partial")
        partial.write_text(text)
        partial.chmod(0o755)
        partial.rename(hook)  # a script that is open for writing cannot be run
        try:
            yield
        finally:
            hook.unlink()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._remote / "refs" / "heads" / "main.lock"
        try:
            lock.touch(exist_ok=False)
        except FileExistsError:  # a push is under way
            yield
            return
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
