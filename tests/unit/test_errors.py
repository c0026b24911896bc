"""Failures: their classes, their fixes, and that both are safe to show."""

from __future__ import annotations

import errno

import pytest

from briter_worker.errors import (
    Failure,
    FailureClass,
    FailureCode,
    LockLostError,
    PublishError,
    RefusedError,
    SnoozedError,
    is_environment,
    os_error_fix,
    os_error_text,
)

ADDRESS = "https://u:cAnArY0123456789@h/"
CODES = {
    FailureClass.REFUSED: (
        "nopaths malformed unreadable unknown-type too-large rejected conflict outdated plugin"
    ),
    FailureClass.TRANSIENT: "lost-race unsettled killed-worker internal",
}


@pytest.mark.parametrize("code", FailureCode)
def test_a_code_is_an_environment_failure_unless_it_is_listed_otherwise(code: FailureCode) -> None:
    named = [each for each, codes in CODES.items() if code.value in codes.split()]
    assert [code.failure_class] == (named or [FailureClass.ENVIRONMENT])
    assert is_environment(code.value) == (not named)


def test_an_unknown_code_is_no_environment_failure() -> None:
    assert not is_environment(None)
    assert not is_environment("of a later version")


def test_the_message_and_the_fix_of_a_failure_are_apart_and_safe_to_show() -> None:
    error = PublishError(FailureCode.AUTH, f"{ADDRESS}\x1b[2J", f"ask {ADDRESS}\n")
    assert (error.code, error.message, error.fix) == (
        FailureCode.AUTH,
        "https://***@h/",
        "ask https://***@h/",
    )
    assert str(error) == error.message
    assert error.failure == Failure(FailureCode.AUTH, "https://***@h/", "ask https://***@h/")


def test_an_error_of_the_system_names_the_path_and_the_fix() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/storage")
    assert os_error_text(full) == "No space left on device (/storage)"
    assert os_error_text(full, with_path=False) == "No space left on device"
    assert os_error_fix(full) == "free some space"
    assert os_error_text(OSError("of our own")) == "of our own"
    assert os_error_fix(OSError("of our own")) == ""
    error = PublishError.from_os("the index could not be written", full)
    assert error.message == "the index could not be written: No space left on device (/storage)"
    assert (error.code, error.fix) == (FailureCode.DISK, "free some space")


def test_what_a_plugin_raises_is_safe_to_show() -> None:
    refused = RefusedError(f"see {ADDRESS}", "add a category")
    assert (refused.code, refused.message) == (FailureCode.PLUGIN, "see https://***@h/")
    assert refused.fix == "add a category"
    snoozed = SnoozedError(7.0, f"see {ADDRESS}")
    assert (snoozed.until, snoozed.text) == (7.0, "see https://***@h/")


def test_a_lost_lock_has_a_fix() -> None:
    assert LockLostError().fix == "start the worker again, and leave worker.lock alone"
