"""Grammars and stop patterns on a real engine: what is refused, what works, and what the log says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferbus.schemas.errors import CallerError, InvalidRequest
from inferbus.schemas.requests import parse
from inferbus.workers.engine.interface import Delta
from tests.support.engine_suite import rid
from tests.support.remote_engine import RemoteEngine

SECRET = "quetzalcoatl"


async def run(engine: RemoteEngine, **fields: Any) -> list[Delta]:
    """The deltas of a completion."""
    body = {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 1, "seed": 3} | fields
    prompt = await engine.prepare(parse("completions", body))
    return [delta async for delta in engine.generate(prompt.leg(0, rid=rid()))]


ATTACKS: list[tuple[str, dict[str, Any]]] = [
    ("stop_regex", {"stop_regex": r"(?:.|.)*\Z.", "ignore_eos": True}),
    ("stop_regex", {"stop_regex": [r"(a*)*b"], "ignore_eos": True}),
    ("regex", {"regex": r"(.{0,30}){0,30}"}),
    ("ebnf", {"ebnf": 'root ::= root root root | root root | [a-z] | ""'}),
    ("json_schema", {"json_schema": '{"$ref": "#"}'}),
    ("json_schema", {"json_schema": json.dumps({"type": "string", "pattern": r"(.{0,30})*"})}),
    (
        "response_format.json_schema.schema",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"allOf": [{"$ref": "#"}]}},
            }
        },
    ),
]


@pytest.mark.parametrize(("param", "fields"), ATTACKS, ids=lambda value: str(value)[:60])
async def test_what_would_stall_the_engine_is_refused_and_named(
    engine: RemoteEngine, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(CallerError) as caught:
        await run(engine, **fields)
    assert caught.value.param == param
    assert await run(engine, max_tokens=2)


async def test_a_stop_pattern_ends_an_answer(engine: RemoteEngine) -> None:
    deltas = await run(engine, regex="ABC1234567XYZ", stop_regex=r"\d{4,5}")
    assert deltas[-1].finish is not None
    assert (deltas[-1].finish.reason, deltas[-1].finish.matched) == ("stop", r"\d{4,5}")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("json_schema", {"json_schema": json.dumps({"type": SECRET, "enum": []})}),
        (
            "json_schema",
            {"json_schema": json.dumps({"type": "object", "required": ["a"], "not": {SECRET: 1}})},
        ),
    ],
    ids=["empty enum", "unsupported keyword"],
)
async def test_a_schema_that_the_engine_cannot_use_is_the_callers_fault_and_not_logged(
    engine: RemoteEngine, param: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await run(engine, **fields)
    assert caught.value.param == param
    assert SECRET not in caught.value.message
    assert SECRET not in engine.log.read_text(errors="replace")
