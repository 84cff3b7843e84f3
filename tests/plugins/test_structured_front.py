"""What of a request's `structured` option is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.core.errors import RequestError
from headrace.core.interfaces import GrammarSpec
from headrace.plugins.structured.front import MAX_DEPTH, MAX_TEXT, spec_of
from headrace.plugins.structured.options import StructuredOption


def spec(**given: Any) -> GrammarSpec:
    return spec_of(StructuredOption.model_validate(given))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_each_form_becomes_a_description() -> None:
    assert spec(json={"type": "integer"}) == GrammarSpec("json", '{"type": "integer"}', 1)
    assert spec(json='{ "type":"integer" }', whitespace=0) == GrammarSpec("json", '{"type": "integer"}', 0)
    assert spec(json_object=True, whitespace=3) == GrammarSpec("json", '{"type": "object"}', 3)
    assert spec(regex="a+") == GrammarSpec("regex", "a+")
    assert spec(choice=["ja", "né"]) == GrammarSpec("choice", '["ja", "né"]')
    assert spec(grammar='start: "a"') == GrammarSpec("grammar", 'start: "a"')


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "exactly one of json"),
        ({"json_object": False}, "none"),
        ({"json": {}, "regex": "a"}, "json, regex"),
        ({"jsn": {}}, "jsn"),
        ({"regex": 5}, "regex"),
        ({"choice": "yes"}, "choice"),
        ({"regex": "a", "whitespace": 2}, "whitespace"),
        ({"json": {}, "whitespace": 65}, "whitespace"),
        ({"regex": "a", "opening_id": 1}, "opening_id needs after_ids"),
        ({"regex": "a", "after_ids": [1] * 65}, "after_ids"),
        ({"regex": "a", "after_ids": ["b"]}, "after_ids"),
    ],
)
def test_a_form_must_be_one_and_of_its_type(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        StructuredOption.model_validate(given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"json": "not a schema"}, "is a text that is no JSON"),
        ({"json": "[1]"}, r"which is an object, got \[1\]"),
        ({"json": nested(MAX_DEPTH)}, "nested more than 64 deep"),
        ({"json": "[" * 200_000}, "nested more than 64 deep"),
        ({"json": {"enum": [float("nan")]}}, "what JSON cannot say"),
        ({"json": {"enum": [{1, 2}]}}, "what JSON cannot say"),
        ({"json": {"enum": ["\ud800"]}}, "half of a surrogate pair"),
        ({"choice": []}, "at least one text"),
        ({"choice": ["a", ""]}, "none that is empty"),
        ({"regex": ""}, "is empty"),
        ({"regex": "a\\"}, "single backslash"),
        ({"regex": "a\0b"}, "NUL character at 1"),
        ({"regex": "a" * (MAX_TEXT + 1)}, f"at most {MAX_TEXT}"),
        ({"grammar": " \n"}, "is empty"),
    ],
)
def test_what_is_plainly_wrong_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told) as raised:
        spec(**given)
    assert raised.value.param == "structured"


def test_what_is_just_right_is_taken() -> None:
    assert spec(json=nested(MAX_DEPTH - 1)).kind == "json"
    assert spec(regex="a\\\\").text == "a\\\\"
    assert spec(choice=['q"uote', "l\nine"]).text == '["q\\"uote", "l\\nine"]'
