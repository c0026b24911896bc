"""Sentences about values that pydantic refuses: producers and operators have never heard of pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_PREFIX = "Value error, "
"""Begins pydantic's message for a ValueError of ours."""
_ACCEPTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "tuple": "a list, or one text with commas",
    "list": "a list",
    "literal": "{expected}",
    "enum": "{expected}",
    **dict.fromkeys(("dict", "json", "model"), "a JSON object"),
}
"""Accepted values by the type of pydantic's error, or its first word. Other errors name them."""


def accepted_text(error: ErrorDetails) -> str:
    """Return what is accepted in place of the refused value, such as `a whole number`."""
    kind = error["type"]
    match kind:
        case "too_short" | "too_long":
            return _accepted_container(is_too_short=kind == "too_short", **error["ctx"])
        case "string_too_short" | "string_too_long" | "string_pattern_mismatch" | "string_type":
            return _accepted_string(**error.get("ctx", {}))
    if ours := _ACCEPTED.get(kind) or _ACCEPTED.get(kind.partition("_")[0]):
        return ours.format(**error.get("ctx", {}))
    return error["msg"].removeprefix(_PREFIX).removeprefix("Input should be ")


def _accepted_container(
    *, is_too_short: bool, field_type: str, min_length: int = 0, max_length: int = 0, **_: object
) -> str:
    kind = "a JSON object" if field_type == "Dictionary" else "a list"
    if not is_too_short:
        return f"{kind} of {max_length} entries or fewer"
    if min_length == 1:
        return f"{kind} that is not empty"
    return f"{kind} of {min_length} entries or more"


def _accepted_string(*, min_length: int = 0, max_length: int = 0, pattern: str = "", **_: object) -> str:
    if min_length == 1:
        return "a text that is not empty"
    if min_length:
        return f"a text of {min_length} characters or more"
    if max_length:
        return f"a text of {max_length} characters or fewer"
    if "x00" in pattern:
        return "a text without control characters"
    if pattern:
        return f"a text that matches {pattern}"
    return "a text"


def refusal_text(error: ErrorDetails) -> str:
    """Return what is wrong with a value, to be read after its name, such as `must be a whole number`."""
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not known here"
        case "value_error":
            return error["msg"].removeprefix(_PREFIX)
        case _:
            return f"must be {accepted_text(error)}"
