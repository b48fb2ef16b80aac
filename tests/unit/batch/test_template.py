"""Requests made of rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch.lines import Unusable, parse
from inferbus.workers.batch.template import Filling, template


def made(
    row: Mapping[str, Any],
    mapped: Mapping[str, Any],
    fixed: Mapping[str, Any] | None = None,
    kind: Any = "chat",
) -> Any:
    """The line that a row makes, or its problem."""
    found = template(mapped, fixed, kind=kind)
    line = Filling(found, found.columns).line(7, [row[name] for name in found.columns])
    try:
        parse(7, line)
    except Unusable as error:
        return error.problem
    return msgspec.json.decode(line)


def body(row: Mapping[str, Any], mapped: Mapping[str, Any], fixed: Mapping[str, Any] | None = None) -> Any:
    return made(row, mapped, fixed)["body"]


def test_a_prompt_and_a_system_text_become_the_messages_of_a_chat() -> None:
    line = made({"q": "Why?"}, {"prompt": "q"}, {"system": "Be short.", "model": "m"})
    assert line == {
        "custom_id": "row-7",
        "url": "/v1/chat/completions",
        "body": {
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
            "model": "m",
        },
    }


def test_a_template_is_filled_wherever_it_has_placeholders() -> None:
    fixed = {
        "messages": [{"role": "user", "content": "{{a}}, {{ b }} and {{a}}"}],
        "max_tokens": "{{n}}",
        "stop": ["{{a}}", "."],
    }
    assert body({"a": "x", "b": 2, "n": 5}, {}, fixed) == {
        "messages": [{"role": "user", "content": "x, 2 and x"}],
        "max_tokens": 5,
        "stop": ["x", "."],
    }


def test_values_keep_their_types_and_a_field_without_a_value_is_left_out() -> None:
    row = {"q": "?", "n": 5, "t": 0.5, "none": None, "nan": float("nan"), "day": dt.date(2026, 1, 2)}
    mapped = {
        "prompt": "q",
        "max_tokens": "n",
        "temperature": "t",
        "seed": "none",
        "top_p": "nan",
        "user": "day",
    }
    found = body(row, mapped)
    del found["messages"]
    assert found == {"max_tokens": 5, "temperature": 0.5, "user": "2026-01-02"}


def test_structs_of_arrow_lose_the_fields_that_other_rows_have() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi", "image_url": None}], "name": None}]
    assert body({"c": chat}, {"messages": "c"}) == {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    }


def test_text_that_is_json_is_read_where_a_field_is_no_text_or_where_it_is_asked_for() -> None:
    row = {"c": '[{"role": "user", "content": "Hi"}]', "n": "5"}
    assert body(row, {"messages": "c", "max_tokens": "{{n | from_json}}", "user": "n"}) == {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 5,
        "user": "5",
    }
    assert body(row, {}, {"messages": "{{c}}"})["messages"] == [{"role": "user", "content": "Hi"}]
    line = made({"ids": "[1, 2]"}, {"token_ids": "ids"}, kind="tokens")
    assert (line["url"], line["body"]) == ("/v1/tokens", {"token_ids": [1, 2]})


def test_a_list_is_put_into_a_text_as_json_where_that_is_asked_for() -> None:
    assert body({"c": ["a", "b"]}, {"prompt": "One of {{c | to_json}}"})["messages"][0]["content"] == (
        'One of ["a","b"]'
    )


def test_numbers_are_prompts_and_ids_as_text() -> None:
    line = made({"q": 12, "id": 3, "t": True}, {"prompt": "q", "custom_id": "{{id}}/{{t}}"})
    assert (line["custom_id"], line["body"]["messages"][0]["content"]) == ("3/true", "12")


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (None, "missing_required_parameter", "column q: the row has no value"),
        (msgspec.UNSET, "missing_required_parameter", "column q: the row has none"),
        (b"\xff", "invalid_value", "column q: neither UTF-8 text"),
        ("\udcff", "invalid_value", "column q: not UTF-8 text"),
        ({"a": {1, object()}}, "invalid_value", "column q: not UTF-8 text, or no value"),
    ],
)
def test_a_row_that_makes_no_request_has_a_problem_that_names_the_column(
    value: Any, code: str, said: str
) -> None:
    problem = made({"q": value}, {"prompt": "q"})
    assert (problem.code, problem.line, problem.param) == (code, 7, "q")
    assert problem.message.startswith(said)


@pytest.mark.parametrize(
    ("mapped", "said"),
    [
        ({"prompt": "Say {{q}}"}, "a list or an object, not text"),
        ({"custom_id": "q", "prompt": "n"}, "a list or an object, not text"),
        ({"prompt": "n", "stop": "{{n | from_json}}"}, "column n: the text is not JSON"),
    ],
)
def test_a_value_of_the_wrong_type_is_told(mapped: dict[str, Any], said: str) -> None:
    assert said in made({"q": ["a"], "n": "not json"}, mapped).message


@pytest.mark.parametrize(("field", "kind"), [("messages", "chat"), ("token_ids", "tokens")])
@pytest.mark.parametrize("value", [None, "null"])
def test_a_row_without_what_a_request_needs_is_told(field: str, kind: str, value: str | None) -> None:
    problem = made({"c": value}, {field: "c"}, kind=kind)
    assert (problem.code, problem.message) == (
        "missing_required_parameter",
        "column c: the row has no value",
    )


def test_an_error_line_has_the_id_of_its_row() -> None:
    found = template({"prompt": "q", "custom_id": "id"})
    with pytest.raises(Unusable) as caught:
        parse(1, Filling(found, found.columns).line(1, [None, "mine"]))
    assert caught.value.custom_id == "mine"


@pytest.mark.parametrize(
    ("mapped", "fixed", "kind", "said"),
    [
        ({"max_tokens": "n"}, {}, "chat", "no prompt or messages"),
        ({"messages": "m"}, {}, "completions", "no prompt"),
        ({}, {"prompt": "the same"}, "chat", "names no column"),
        ({"prompt": "a"}, {"prompt": "b"}, "chat", "prompt twice"),
        ({"prompt": "{{a | upper}}"}, {}, "chat", "no filter"),
        ({"prompt": "x {{a | from_json}}"}, {}, "chat", "no filter"),
        ({"prompt": "{{a|b|c}} {{"}, {}, "chat", "cannot be read"),
        ({"prompt": "a", "custom_id": ["x"]}, {}, "chat", "custom_id must be"),
        ({"prompt": "a"}, {"tools": {1, object()}}, "chat", "tools cannot be sent as JSON"),
        ({"prompt": "a\udcff"}, {}, "chat", "not UTF-8"),
        ({"prompt": "a"}, {"system": "x" * 200_000}, "chat", "bytes; 131072 are allowed"),
    ],
)
def test_a_mapping_that_makes_no_request_is_refused_at_once(
    mapped: dict[str, Any], fixed: dict[str, Any], kind: Any, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        template(mapped, fixed, kind=kind)
