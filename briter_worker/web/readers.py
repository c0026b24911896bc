"""The history, for several threads at once: each has a connection to itself while it reads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from briter_worker.wiring import open_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.settings import Settings
    from briter_worker.sinks.history.reading import History

T = TypeVar("T")
_KEPT = 4


class Readers:
    """Lends out connections."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[History] = []
        self._guard = threading.Lock()

    def read(self, ask: Callable[[History], T]) -> T:
        """The answer. Raises HistoryUnreadableError."""
        with self._guard:
            history = self._idle.pop() if self._idle else open_history(self._settings)
        try:
            return ask(history)
        finally:
            with self._guard:
                keep = len(self._idle) < _KEPT
                if keep:
                    self._idle.append(history)
            if not keep:
                history.close()

    def close(self) -> None:
        """Let go of all that nobody uses."""
        with self._guard:
            idle, self._idle = self._idle, []
        for history in idle:
            history.close()
