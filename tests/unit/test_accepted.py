"""The sentence about a refused value says what is wrong with this one."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError

from briter_worker.accepted import refusal_text


class Model(BaseModel):
    """Values with each kind of limit."""

    contents: dict[str, str] = Field({}, min_length=1, max_length=2)
    paths: list[str] = Field([], min_length=1, max_length=2)
    pair: tuple[int, ...] = Field((), min_length=2)
    slug: str = Field("", min_length=1, max_length=3, pattern=r"^[^\x00-\x1f]*$")
    key: str = Field("", min_length=2)
    commit: str = Field("", pattern="^[0-9a-f]*$")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"contents": {}}, "must be a JSON object that is not empty"),
        ({"contents": {"a": "", "b": "", "c": ""}}, "must be a JSON object of 2 entries or fewer"),
        ({"contents": []}, "must be a JSON object"),
        ({"paths": []}, "must be a list that is not empty"),
        ({"paths": ["a", "b", "c"]}, "must be a list of 2 entries or fewer"),
        ({"paths": {}}, "must be a list"),
        ({"pair": [1]}, "must be a list of 2 entries or more"),
        ({"slug": ""}, "must be a text that is not empty"),
        ({"slug": "abcd"}, "must be a text of 3 characters or fewer"),
        ({"slug": "\0"}, "must be a text without control characters"),
        ({"slug": 7}, "must be a text"),
        ({"key": "a"}, "must be a text of 2 characters or more"),
        ({"commit": "x"}, "must be a text that matches ^[0-9a-f]*$"),
    ],
)
def test_what_is_wrong_is_said_of_the_value_that_was_sent(value: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Model.model_validate(value)
    (error,) = refused.value.errors()
    assert refusal_text(error) == text
