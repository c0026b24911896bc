"""Plugins: other programs' code in the worker, found by the entry point group `briter_worker`.

A plugin is any object (a module, as a rule) with some of the functions of `Specs`, marked with `hookimpl`.
They run in the worker's process, with all that the worker may do: install only what you trust.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from briter_worker.allowlist import Allowlist
from briter_worker.backoff import Backoff
from briter_worker.errors import Failure, PublishError, RefusedError, SnoozedError
from briter_worker.ports import Change, JobKind, Publication

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from importlib.metadata import EntryPoint

    from pluggy import PluginManager

    from briter_worker.job import Job

GROUP = "briter_worker"

__all__ = [
    "Change",
    "JobKind",
    "Plugins",
    "Publication",
    "RefusedError",
    "SnoozedError",
    "hookimpl",  # noqa: F822 - made by __getattr__
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - pluggy's marker
    if name == "hookimpl":
        import pluggy  # noqa: PLC0415 - only a plugin's author and a worker that has one pay for it

        return pluggy.HookimplMarker(GROUP)
    raise AttributeError(name)


class Specs(Protocol):
    """What a plugin may have. Each is called with the arguments that it names."""

    def allowed_paths(self) -> Sequence[str]:
        """Folders that may be published besides the adapter's."""
        ...

    def before_publish(self, job: Job, changes: Sequence[Change]) -> None:
        """Look at what is about to be published. Raise RefusedError or SnoozedError to keep it back."""
        ...

    def around_attempt(self, job: Job, attempt: int) -> AbstractContextManager[None]:
        """What surrounds each attempt, the first registered outermost."""
        ...

    def after_publish(self, publication: Publication) -> None:
        """The post is on the remote. What this raises is told, and changes nothing."""
        ...

    def job_kinds(self, settings: Mapping[str, Any]) -> Mapping[str, JobKind]:
        """Types of job that this plugin handles. `settings` is `plugins` in config.json, by plugin's name."""
        ...


class Plugins:
    """Implements `ports.Extensions` with what is installed. Nothing is loaded before the first question."""

    def __init__(self, settings: Mapping[str, Any], extra: Iterable[object] = ()) -> None:
        self._settings = settings
        self._extra = tuple(extra)
        self._loaded: PluginManager | None = None
        self._looked = False
        self._kinds: dict[str, JobKind] = {}

    @property
    def names(self) -> list[str]:
        """Which are installed, in the order in which they are asked."""
        manager = self._manager()
        return [] if manager is None else [name for name, _ in manager.list_name_plugin()]

    def allowed_paths(self) -> tuple[str, ...]:
        """Folders that plugins add to the adapter's."""
        with _blamed():
            found = tuple(path for paths in self._call("allowed_paths") for path in paths)
            Allowlist(found)
            return found

    def kind(self, name: str) -> JobKind | None:
        """See `ports.Extensions`."""
        try:
            self._manager()
        except PublishError as broken:
            # Whose kind it is cannot be known: its attempt fails for that reason, as everybody's does.
            return JobKind(partial(_fail, broken))
        return self._kinds.get(name)

    def before_publish(self, job: Job, changes: Sequence[Change]) -> None:
        """See `ports.Extensions`."""
        self._call("before_publish", job=job, changes=changes)

    @contextmanager
    def around_attempt(self, job: Job, attempt: int) -> Iterator[None]:
        """See `ports.Extensions`."""
        with ExitStack() as stack:
            for around in self._call("around_attempt", job=job, attempt=attempt):
                stack.enter_context(around)
            yield

    def after_publish(self, publication: Publication) -> None:
        """See `ports.Extensions`."""
        self._call("after_publish", publication=publication)

    def _call(self, hook: str, **arguments: object) -> list[Any]:
        manager = self._manager()
        # pluggy asks the last registered first; a reader of the list of plugins expects the first.
        return [] if manager is None else list(reversed(getattr(manager.hook, hook)(**arguments)))

    def _manager(self) -> PluginManager | None:
        if not self._looked:
            from importlib.metadata import entry_points  # noqa: PLC0415 - a worker that finds no job needs none

            found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
            if found or self._extra:
                with _blamed():
                    self._loaded = self._load([(point.name, _loaded(point)) for point in found])
            self._looked = True
        return self._loaded

    def _load(self, found: list[tuple[str, object]]) -> PluginManager:
        import pluggy  # noqa: PLC0415 - see above

        manager = pluggy.PluginManager(GROUP)
        marker = pluggy.HookspecMarker(GROUP)
        for name in _HOOKS:
            marker(getattr(Specs, name))
        manager.add_hookspecs(Specs)
        for name, plugin in [*found, *((type(each).__name__, each) for each in self._extra)]:
            manager.register(plugin, name)
        manager.check_pending()
        for kinds in manager.hook.job_kinds(settings=self._settings):
            self._kinds.update({name: _sound(name, kind) for name, kind in kinds.items()})
        return manager


def _sound(name: str, kind: JobKind) -> JobKind:
    """Raises what is wrong with it now: when its job has to be settled, it would be too late."""
    if not isinstance(kind, JobKind):
        raise TypeError(f"the kind {name!r} is no JobKind")
    if kind.delays:
        Backoff(kind.delays)
    return kind


def _fail(why: PublishError, _job: Job) -> NoReturn:
    raise why


@contextmanager
def _blamed() -> Iterator[None]:
    """What a plugin raises inside is the site's condition: without it, nobody knows what may be published."""
    try:
        yield
    except PublishError:
        raise
    except Exception as error:
        raise PublishError(
            Failure.PLUGIN_BROKEN,
            f"a plugin cannot be used: {type(error).__name__}: {error}. Fix: correct it, or uninstall it",
        ) from error


def _loaded(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        raise PublishError(
            Failure.PLUGIN_BROKEN,
            f"the plugin {point.name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}. "
            "Fix: correct it, or uninstall it",
        ) from error


_HOOKS = ("allowed_paths", "before_publish", "around_attempt", "after_publish", "job_kinds")
