"""A dataclass that is made late is the same dataclass."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from typing import TYPE_CHECKING, ClassVar

import pytest

from briter_worker import events

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    from briter_worker.lazily import dataclass


@dataclass(frozen=True, kw_only=True)
class Base:
    """Something."""

    name: ClassVar[str] = "base"
    one: int


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """More of it."""

    two: tuple[str, ...] = ()
    three: list[int] = dataclasses.field(default_factory=list)


def fresh() -> type:
    @dataclass(frozen=True)
    class Fresh:
        one: int
        two: str = "two"

    return Fresh


def test_it_is_made_by_its_first_instance() -> None:
    cls = fresh()
    assert "__eq__" not in vars(cls)
    first = cls(1)
    assert "__eq__" in vars(cls)
    assert first == cls(one=1, two="two")
    assert repr(first).endswith("Fresh(one=1, two='two')")


def test_it_is_made_by_whoever_asks_for_its_fields() -> None:
    assert [field.name for field in dataclasses.fields(fresh())] == ["one", "two"]
    assert dataclasses.is_dataclass(fresh())


def test_a_subclass_has_the_fields_of_both_and_is_frozen() -> None:
    derived = Derived(one=1)
    assert dataclasses.asdict(derived) == {"one": 1, "two": (), "three": []}
    assert dataclasses.replace(derived, two=("a",)) != derived
    with pytest.raises(dataclasses.FrozenInstanceError):
        derived.one = 2  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(derived)) == derived  # noqa: S301 - our own


def test_what_a_wrong_call_raises_names_the_class() -> None:
    with pytest.raises(TypeError, match=r"Fresh\.__init__\(\) missing 1 required positional argument: 'one'"):
        fresh()()


def test_threads_that_make_it_at_once_make_it_once() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            cls, ready = fresh(), threading.Barrier(4)
            made: list[object] = []

            def make(cls: type = cls, made: list[object] = made, ready: threading.Barrier = ready) -> None:
                ready.wait()
                made.append(cls(1))

            threads = [threading.Thread(target=make) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(made) == 4
            assert len(set(made)) == 1
    finally:
        sys.setswitchinterval(before)


def test_an_event_cannot_be_changed() -> None:
    event = events.Progress(phase="push", done=1, total=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.done = 2  # type: ignore[misc]
    assert event == events.Progress(phase="push", done=1, total=2)
