"""Puts the parts together: the only module that names concrete classes."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from briter_worker.allowlist import Allowlist
from briter_worker.drain import Drain
from briter_worker.errors import FailureCode, LockLostError, PublishError, StoppedError, UsageError
from briter_worker.events import Progress, Warned, WorkerSkipped, WorkerStarted, WorkerStopped
from briter_worker.git.checkout import Checkout
from briter_worker.git.plans import FilePlans
from briter_worker.git.publisher import GitPublisher, Person
from briter_worker.git.repository import Repository
from briter_worker.git.run import Git
from briter_worker.git.staging import WorkTreeSource
from briter_worker.lock import AnotherWorkerError, SiteLock, UnusableLockError
from briter_worker.plugins import Plugins
from briter_worker.queues.disk.queue import DiskQueue
from briter_worker.queues.disk.watch import FolderWatcher
from briter_worker.retry import Backoff
from briter_worker.worker import Stop, Worker, heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.ports import EventSink, QueueControl
    from briter_worker.queues.postgres.database import Database
    from briter_worker.settings import Settings

_SKIPPED = "another worker instance is active, skipping"
