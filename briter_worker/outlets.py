"""Who is told what happens: the sinks that a worker has, each opened when it is first needed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from briter_worker.events import (
    ConditionChanged,
    Event,
    Flushed,
    JobOutcome,
    Quarantined,
    Warned,
    WorkerStarted,
)
from briter_worker.sinks.condition import ConditionWatch, FileSlate
from briter_worker.sinks.fan import AtFirstJob, Fan, Later

if TYPE_CHECKING:
    from collections.abc import Callable

    from briter_worker.ports import EventSink
    from briter_worker.settings import Settings
    from briter_worker.sinks.fan import Sink
    from briter_worker.sinks.history.recording import Target
    from briter_worker.sinks.history.retention import Retention
    from briter_worker.sinks.history.sink import HistorySink
    from briter_worker.sinks.webhooks.sink import Receivers, WebhookSink


def open_outlets(
    settings: Settings, *, once: bool, log: EventSink, metrics: Callable[[], Sink] | None = None
) -> ConditionWatch:
    """Every sink: what stores first, `log` last. Metrics are served when the worker holds its lock."""
    stores: list[Sink] = [
        AtFirstJob(lambda: _history(settings, log)),
        _webhooks(settings, log, once=once),
    ]
    if metrics is not None:
        stores.append(Later(metrics, lambda event: isinstance(event, WorkerStarted)))
    return ConditionWatch(FileSlate(settings.condition_path), Fan(stores, log))


def open_record(settings: Settings, log: EventSink) -> Fan:
    """For who steers beside the worker: what is done to a job is in the history, then in the log."""
    return Fan([AtFirstJob(lambda: _history(settings, log))], log)


def target_of(settings: Settings) -> Target:
    """Where the site publishes to."""
    from briter_worker.sinks.history.recording import Target  # noqa: PLC0415 - not for a run of cron

    return Target(settings.git_branch, settings.git_remote, settings.published_href_template)


def retention_of(settings: Settings) -> Retention:
    """How long its receipts are kept."""
    from briter_worker.sinks.history.retention import Retention  # noqa: PLC0415 - as above

    return Retention(settings.history_stale_days, settings.history_keep_days)


def receivers_of(settings: Settings) -> Receivers:
    """Whom it tells, and how."""
    from briter_worker.sinks.webhooks.sink import Receivers  # noqa: PLC0415 - as above

    return Receivers(
        urls=settings.webhook_urls,
        template=settings.webhook_template,
        secret=settings.webhook_secret,
        allow_private=settings.webhook_allow_private,
        build_hook=settings.build_hook_url,
        build_interval=settings.build_hook_min_interval_ms / 1000,
        href=target_of(settings).href,
    )


def _webhooks(settings: Settings, log: EventSink, *, once: bool) -> Later:
    def complain(text: str) -> None:
        log(Warned(error=text))

    def opened() -> WebhookSink:
        from briter_worker.sinks.webhooks.outbox import Mark  # noqa: PLC0415 - not for a run of cron
        from briter_worker.sinks.webhooks.sink import WebhookSink  # noqa: PLC0415 - as above

        sink = WebhookSink(
            settings.webhooks_path, Mark(settings.webhooks_mark), receivers_of(settings), complain=complain
        )
        if _has_unsent(settings, once=once):
            sink.send()
        return sink

    return Later(opened, lambda event: _tells_somebody(settings, event, once=once))


def _history(settings: Settings, log: EventSink) -> HistorySink:
    from briter_worker.sinks.history.sink import HistorySink  # noqa: PLC0415 - not for a run of cron

    return HistorySink(
        settings.history_path,
        target_of(settings),
        retention_of(settings),
        announce=log,
        complain=lambda text: log(Warned(error=text)),
    )


def _tells_somebody(settings: Settings, event: Event, *, once: bool) -> bool:
    """Whether the event may be worth a message; the sink itself knows for certain."""
    match event:
        case WorkerStarted():
            return _has_unsent(settings, once=once)
        case JobOutcome() if event.webhook:
            return True
        case JobOutcome() | Quarantined() | ConditionChanged() | Flushed():
            return bool(settings.webhook_urls or settings.build_hook_url)
        case _:
            return False


def _has_unsent(settings: Settings, *, once: bool) -> bool:
    """Whether an earlier run has left something to send; for one that ends at once: and it is due."""
    try:
        due = settings.webhooks_mark.stat().st_mtime
    except OSError:
        return False
    return not once or due <= time.time()
