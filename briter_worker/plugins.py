"""Plugins: code of other packages in the worker, found by the entry point group `briter_worker`.

A plugin is any object (usually a module) with some of the functions of `HookSpecs`, marked with `hookimpl`.
Plugins run in the worker's process with all its permissions: install only what you trust.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from briter_worker.allowlist import Allowlist
from briter_worker.errors import FailureCode, PublishError, RefusedError, SnoozedError, one_line
from briter_worker.ports import Change, JobKind, Publication

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from briter_worker.job import Job


GROUP = "briter_worker"
__all__ = ["Change", "JobKind", "Plugins", "Publication", "RefusedError", "SnoozedError", "hookimpl"]
hookimpl = pluggy.HookimplMarker(GROUP)
_hookspec = pluggy.HookspecMarker(GROUP)


class HookSpecs(Protocol):
    """The hooks. Each is called with the arguments that it names."""

    @_hookspec
    def allowed_paths(self) -> Sequence[str]:
        """Return folders that may be published besides the adapter's."""

    @_hookspec
    def before_publish(self, job: Job, changes: Sequence[Change]) -> None:
        """Check the changes of a job. Raise RefusedError or SnoozedError to keep the job back."""

    @_hookspec
    def around_attempt(self, job: Job, attempt: int) -> AbstractContextManager[None]:
        """Return a context that surrounds each attempt; the plugin registered first is outermost."""

    @_hookspec
    def after_publish(self, publication: Publication) -> None:
        """React to a post that is on the remote. An error is reported and changes nothing."""

    @_hookspec
    def job_kinds(self, settings: Mapping[str, Any]) -> Mapping[str, JobKind]:
        """Return the types of job that the plugin handles. `settings` is `plugins` in config.json."""


class Plugins:
    """The installed plugins, loaded at the first call."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._manager: pluggy.PluginManager | None = None
        self.kinds: dict[str, JobKind] = {}
        """The plugins' own types of job, once the plugins are loaded."""

    @property
    def names(self) -> list[str]:
        """Return the names of the plugins, in the order of their calls."""
        return [name for name, _ in self._load().list_name_plugin()]

    def allowed_paths(self) -> tuple[str, ...]:
        """Return the folders that plugins add to the adapter's."""
        with _site_condition("a plugin cannot be used"):
            found = tuple(path for paths in self.call("allowed_paths") for path in paths)
            return Allowlist(found).folders

    def handle(self, job: Job) -> None:
        """Have the plugin of the job's type handle the job. Raises what the plugin raises."""
        self._load()
        if job.type not in self.kinds:
            raise PublishError(
                FailureCode.UNKNOWN_TYPE,
                f"no plugin handles the type {one_line(job.type, 80)!r}",
                "leave type out, or install the plugin",
            )
        self.kinds[job.type].handle(job)

    def call(self, hook: str, **arguments: object) -> list[Any]:
        """Call a hook of all plugins, in their order; return what they returned."""
        # pluggy calls the plugin that was registered last first.
        return list(reversed(getattr(self._load().hook, hook)(**arguments)))

    def _load(self) -> pluggy.PluginManager:
        if self._manager is not None:
            return self._manager
        with _site_condition("a plugin cannot be used"):
            manager = pluggy.PluginManager(GROUP)
            manager.add_hookspecs(HookSpecs)
            for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
                with _site_condition(f"the plugin {point.name!r} ({point.value}) cannot be loaded"):
                    plugin = point.load()
                manager.register(plugin, point.name)
            manager.check_pending()
            for kinds in manager.hook.job_kinds(settings=self._settings):
                self.kinds |= kinds
        self._manager = manager
        return manager


@contextmanager
def _site_condition(what: str) -> Iterator[None]:
    """Turn an error of a plugin into an environment failure: it may decide what may be published."""
    try:
        yield
    except PublishError:
        raise
    except Exception as error:
        message = f"{what}: {type(error).__name__}: {error}"
        fix = "correct the plugin, or uninstall it"
        raise PublishError(FailureCode.PLUGIN_BROKEN, message, fix) from error
