"""The doctor, called by a page: one examination at a time, seen while it goes on."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from briter_worker.doctor import State, examine
from briter_worker.doctor.finding import error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.doctor import Finding
    from briter_worker.settings import Settings


class Examination:
    """The last one, or the one under way."""

    def __init__(self, settings: Settings, complain: Callable[[str], None]) -> None:
        self._settings = settings
        self._complain = complain
        self._guard = threading.Lock()
        self._running: threading.Thread | None = None
        self.findings: Sequence[Finding] = ()
        self.at: float | None = None
        """When it began."""

    @property
    def is_running(self) -> bool:
        """Whether there is more to come."""
        running = self._running
        return running is not None and running.is_alive()

    @property
    def is_sound(self) -> bool:
        """Whether nothing that was found keeps posts from being published."""
        return all(finding.state is not State.ERROR for finding in self.findings)

    def start(self) -> threading.Thread:
        """Begin one, unless one is under way."""
        with self._guard:
            if self._running is None or not self._running.is_alive():
                self.findings = ()
                self.at = time.time()
                # A remote may take minutes to answer: nobody who ends the dashboard waits for that.
                self._running = threading.Thread(target=self._run, name="doctor", daemon=True)
                self._running.start()
            return self._running

    def _run(self) -> None:
        try:
            for finding in examine(self._settings, time.time()):
                self.findings = (*self.findings, finding)
        except Exception as mistake:  # noqa: BLE001 - a person waits for an answer
            self._complain(f"doctor: {type(mistake).__name__}: {mistake}")
            self.findings = (*self.findings, error("doctor", f"it could not go on: {mistake}", "see the log"))
