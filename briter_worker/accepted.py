"""Sentences about values that pydantic refuses: producers and operators have never heard of pydantic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_PREFIX = "Value error, "
"""What pydantic puts before the message of a ValueError of ours."""
_ACCEPTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "{le} or less",
    "less_than": "less than {lt}",
    "string": "a text",
    "tuple": "a list, or one text with commas",
    "list": "a list",
    "too": "a list that is not empty",
    "literal": "{expected}",
    "enum": "{expected}",
    **dict.fromkeys(("dict", "json", "model"), "a JSON object"),
}
"""Accepted values by the type of pydantic's error, or its first word. Other errors name them."""


def accepted_text(error: ErrorDetails) -> str:
    """Return what is accepted in place of the refused value, such as `a whole number`."""
    kind = error["type"]
    if ours := _ACCEPTED.get(kind) or _ACCEPTED.get(kind.partition("_")[0]):
        return ours.format(**error.get("ctx", {}))
    return error["msg"].removeprefix(_PREFIX).removeprefix("Input should be ")


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
