"""The checks of `doctor`, run for a page or the API: one run at a time, its results shown as they come."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from briter_worker.doctor import Finding, State, examine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from briter_worker.settings import Settings


class SiteChecks:
    """The last run of the checks, or the running one."""

    def __init__(self, settings: Settings, complain: Callable[[str], None]) -> None:
        self._settings = settings
        self._complain = complain
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None
        self.findings: Sequence[Finding] = ()
        self.started_at: float | None = None

    @property
    def is_running(self) -> bool:
        """Return True if more results will come."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    @property
    def is_ok(self) -> bool:
        """Return True if no result is an error."""
        return all(finding.state is not State.ERROR for finding in self.findings)

    def start(self) -> threading.Thread:
        """Start a run, unless one is running; return its thread."""
        with self._guard:
            if self._thread is None or not self._thread.is_alive():
                self.findings = ()
                self.started_at = time.time()
                # A daemon: a remote may take minutes to answer, and the dashboard must end at once.
                self._thread = threading.Thread(target=self._run, name="doctor", daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        try:
            for finding in examine(self._settings, time.time()):
                self.findings = (*self.findings, finding)
        except Exception as error:  # noqa: BLE001 - the page waits for an answer
            self._complain(f"doctor: {type(error).__name__}: {error}")
            failed = Finding("doctor", State.ERROR, f"the checks failed: {error}", "see the log")
            self.findings = (*self.findings, failed)
