"""Every call that changes the disk, as a moment at which something else may happen."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHANGES = ("rename", "replace", "link", "unlink", "write", "fsync", "mkdir")
_DIED = 77
_NO_MORE = 78


@contextmanager
def at_each_change(strike: Callable[[], None]) -> Iterator[None]:
    """`strike` is called before each call that changes the disk."""
    originals = {name: getattr(os, name) for name in _CHANGES} | {"open": os.open}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:  # noqa: ANN401 - any call of os
            if name != "open" or args[1] & os.O_CREAT:
                strike()
            return originals[name](*args, **keys)

        return call

    for name in originals:
        setattr(os, name, wrapped(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def killed_at(step: int, operation: Callable[[], object]) -> bool:
    """Run it in a process that dies before its change number `step`; whether it got that far."""
    child = os.fork()
    if child == 0:
        left = step

        def strike() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os._exit(_DIED)

        try:
            with at_each_change(strike):
                operation()
        except BaseException:  # noqa: BLE001 - reported by the exit code
            os._exit(1)
        os._exit(_NO_MORE)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {_DIED, _NO_MORE}
    return code == _DIED


def before_change(step: int, act: Callable[[], object], operation: Callable[[], object]) -> bool:
    """Run it, and `act` just before its change number `step`; whether it has so many."""
    left = step

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            act()

    with at_each_change(strike):
        operation()
    return left <= 0


def refused_at(step: int, operation: Callable[[], object], *, lasting: bool) -> bool:
    """Run it on a disk that is full at its change number `step`, and maybe from then on."""
    left = step

    def strike() -> None:
        nonlocal left
        left -= 1
        if left == 0 or (lasting and left < 0):
            raise OSError(errno.ENOSPC, "No space left on device")

    with at_each_change(strike):
        try:
            operation()
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - which of the two it was
    return left <= 0
