"""The grammars and stop patterns that a request may hold."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from inferbus.schemas.errors import InvalidRequest, NotSupported
from inferbus.schemas.requests import AnyRequest, parse
from inferbus.workers.engine.sglang import grammars

SECRET = "my secret words"


def request(**fields: Any) -> AnyRequest:
    """A completion request."""
    return parse("completions", {"prompt": "x"} | fields)


def refused(asked: AnyRequest) -> InvalidRequest:
    """Why a request is refused."""
    with pytest.raises(InvalidRequest) as caught:
        grammars.check(asked)
    assert SECRET not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_regex": r"\n\n"},
        {"stop_regex": [r"\d{1,3}\.$", "[.!?] {0,4}"]},
        {"regex": r"\w+( \w+)*"},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_ordinary_requests_are_taken(fields: dict[str, Any]) -> None:
    grammars.check(request(**fields))


@pytest.mark.parametrize(
    ("stops", "reason"),
    [
        (r"(?:.|.)*\Z.", "ambiguous"),
        (["x", r"a+b"], "any length"),
        ([r"a{100}", r"b{100}"], "positions"),
        (r"(unclosed", "no regular expression"),
        ([f"[{letter}-\U0001f000]" for letter in "abcdefghi"], "classes"),
        (f"(?=a){SECRET}", "regular language"),
    ],
)
def test_a_stop_pattern_that_may_stall_the_engine_is_the_callers_fault(stops: Any, reason: str) -> None:
    error = refused(request(stop_regex=stops))
    assert error.param == "stop_regex"
    assert reason in error.message


@pytest.mark.parametrize("field", ["ebnf", "structural_tag"])
def test_a_grammar_that_no_rule_can_judge_needs_an_operators_trust(field: str) -> None:
    with pytest.raises(NotSupported, match="--trust-grammars") as caught:
        grammars.check(request(**{field: 'root ::= root root | "a"'}))
    assert caught.value.param == field


@pytest.mark.parametrize("kind", [{"type": "structural_tag"}, {}], ids=["named", "unnamed"])
def test_a_structural_tag_in_a_response_format_is_one_too(kind: dict[str, str]) -> None:
    form = kind | {"format": {"type": "grammar", "grammar": 'root ::= root root | "a"'}}
    with pytest.raises(NotSupported, match="--trust-grammars"):
        grammars.check(request(response_format=form))


def test_an_ambiguous_regex_is_refused_and_named() -> None:
    assert refused(request(regex=r"(.{0,10}){0,10}")).param == "regex"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 100, "pattern": r"^\w+( \w+)*$"},
        "born": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "children": {"type": "array", "items": {"$ref": "#"}},
        # Named like keywords, which they are not here.
        "pattern": {"type": "string"},
        "anyOf": {"enum": [{"pattern": "("}, "a"]},
    },
    "required": ["name"],
}
DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"items": DEEP}
FAN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": {}}

BAD_SCHEMAS: dict[str, tuple[Any, str]] = {
    "itself": ({"$ref": "#"}, "refers to itself"),
    "each other": (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        },
        "refers to itself",
    ),
    "one of itself": ({"anyOf": [{"$ref": "#"}, {"type": "integer"}]}, "refers to itself"),
    "below an object": (
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"oneOf": [{"$ref": "#/$defs/x"}]}}},
        "refers to itself",
    ),
    "deep": (DEEP, "deep"),
    "fan": ({"$ref": "#/$defs/d0", "$defs": FAN}, "alternatives"),
    "wide": ({"anyOf": [{"maxLength": i} for i in range(40)]}, "alternatives"),
    "nested alternatives": ({"anyOf": [{"oneOf": [{}] * 8}] * 8}, "alternatives"),
    "properties": ({"properties": {f"p{i}": True for i in range(300)}}, "properties"),
    "many": ({"$defs": {f"d{i}": {} for i in range(2100)}}, "schemas"),
    "large": ({"enum": [f"{i:0100}" for i in range(2000)]}, "bytes"),
    "pattern": ({"items": {"type": "string", "pattern": r"(.{0,10}){0,10}"}}, "ambiguous"),
    "pattern property": ({"patternProperties": {r"(a*)*": {}}}, "ambiguous"),
    "hidden pattern": ({"default": {"pattern": r"(a*)*"}, "$ref": "#/default"}, "ambiguous"),
    "many patterns": ({"$defs": {f"d{i}": {"pattern": ".{0,200}"} for i in range(10)}}, "positions"),
    "elsewhere": ({"$ref": "https://example.org/schema"}, "$ref"),
    "nowhere": ({"$ref": "#/$defs/a"}, "$ref"),
    "anchor": ({"$ref": "#a", "$anchor": "a"}, "$ref"),
    "no schema": ({"items": {"anyOf": [5]}}, "something else"),
}


def test_a_recursive_schema_with_something_in_between_is_taken() -> None:
    grammars.check_schema(PERSON, "json_schema")


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS.values(), ids=BAD_SCHEMAS)
def test_a_schema_that_may_stall_the_engine_is_refused_wherever_it_comes(schema: Any, reason: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": SECRET, "schema": schema}}
    for error, param in (
        (refused(request(json_schema=json.dumps(schema))), "json_schema"),
        (refused(request(response_format=form)), "response_format.json_schema.schema"),
    ):
        assert error.param == param
        assert reason in error.message


def test_a_tools_parameters_are_checked_as_a_schema() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}, tool]}
    asked = parse("chat", body)
    grammars.check(asked)
    with pytest.raises(InvalidRequest) as caught:
        grammars.check_tools(asked)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("text", ["{no json", "[" * 5000, '{"a": "\\ud800"}'], ids=["text", "deep", "half"])
def test_a_schema_as_text_that_is_no_json_is_refused(text: str) -> None:
    assert refused(request(json_schema=text)).param == "json_schema"


def test_what_the_engine_gets_of_a_schema_is_what_was_checked() -> None:
    asked = request(json_schema='{"pattern": "(a*)*", "pattern": "a"}')
    grammars.check(asked)
    assert asked.sampling.json_schema == '{"pattern":"a"}'


def test_the_pattern_for_stop_strings_matches_nothing() -> None:
    [pattern] = grammars.with_window(["ab", "世界"], None)
    assert not any(re.search(pattern, text) for text in ("", "x", "x" * 40, "ab\ncd\n"))
    assert "6" in pattern


def test_patterns_of_the_request_are_kept() -> None:
    assert grammars.with_window("stop", "a+")[0] == "a+"
    assert len(grammars.with_window("stop", ["a"] * 32)) == 32
