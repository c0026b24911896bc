"""Dataclasses whose methods are generated when the first one is made.

Python writes and compiles them for each class when its module is imported, about half a millisecond each.
Most runs find nothing to do, and make none of most of them. To a type checker, and to all who use them, they
are dataclasses:

    if TYPE_CHECKING:
        from dataclasses import dataclass
    else:
        from briter_worker.lazily import dataclass
"""

from __future__ import annotations

import dataclasses
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_guard = threading.RLock()


class _Pending:
    """Stands for a class's fields until a subclass, `dataclasses.fields` or the first instance asks."""

    def __init__(self, cls: type, options: dict[str, bool]) -> None:
        self._cls = cls
        self._options = options
        self.made = False

    def __get__(self, instance: object, owner: type) -> Any:  # noqa: ANN401 - what dataclasses puts there
        self.make()
        return owner.__dataclass_fields__  # type: ignore[attr-defined]

    def make(self) -> None:
        """The class is whole at return, also when another thread is at it."""
        with _guard:
            if not self.made:
                dataclasses.dataclass(**self._options)(self._cls)
                self.made = True


def dataclass(**options: bool) -> Callable[[type], type]:
    """As `dataclasses.dataclass`, later. Not with `slots`, which takes another class."""

    def later(cls: type) -> type:
        pending = _Pending(cls, options)

        def new(kind: type, /, *_args: object, **_values: object) -> object:
            if not pending.made:
                pending.make()
            return object.__new__(kind)

        cls.__new__ = new  # type: ignore[assignment]
        cls.__dataclass_fields__ = pending  # type: ignore[attr-defined]
        return cls

    return later
