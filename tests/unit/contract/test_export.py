"""The JSON Schema files: current, complete, and true of what is accepted and sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferbus.schemas import codec, export
from inferbus.schemas.answers import TokenChunk, Usage
from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.requests import parse
from inferbus.schemas.sampling import ALIASES, FIELDS
from inferbus.schemas.subjects import GENERATED, Kind


def schema(name: str) -> dict[str, Any]:
    return msgspec.json.decode((export.FOLDER / f"{name}.json").read_bytes(), type=dict[str, Any])


def test_the_files_are_current() -> None:
    assert export.stale() == []


def test_the_command_finds_what_is_not_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export.write(tmp_path)
    assert export.stale(tmp_path) == []
    (tmp_path / "chunk.tokens.json").write_text("{}")
    (tmp_path / "old.json").write_text("{}")
    assert export.stale(tmp_path) == ["chunk.tokens.json", "old.json"]
    export.write(tmp_path)
    assert export.stale(tmp_path) == []
    assert export.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_the_module_runs_as_a_program() -> None:
    subprocess.run(
        [sys.executable, "-m", "inferbus.schemas.export", "--check"], check=True, capture_output=True
    )


@pytest.mark.parametrize("kind", GENERATED)
def test_every_name_of_a_sampling_parameter_can_be_seen(kind: Kind) -> None:
    found = schema(f"request.{kind}")
    for name in (*FIELDS, *ALIASES):
        assert name in found["properties"]
        assert name in found["$defs"]["Sampling"]["properties"]
    assert {"sampling_params", "sampling_options", "stop_conditions"} <= found["properties"].keys()
    assert not {"sampling", "warnings"} & found["properties"].keys()


@pytest.mark.parametrize("name", sorted(export.export()))
def test_every_file_names_itself_and_its_dialect(name: str) -> None:
    found = schema(name.removesuffix(".json"))
    assert found["title"] == name.removesuffix(".json")
    assert found["$schema"] == export.DIALECT


BODIES: list[tuple[Kind, dict[str, Any]]] = [
    (
        "tokens",
        {"token_ids": [1], "max_tokens": 16.0, "n": None, "sampling_params": {"top_p": 0.5, "stop": "x"}},
    ),
    (
        "tokens",
        {"token_ids": [1], "stop_conditions": {"stop_token_ids_hidden": [1]}, "sampling_options": None},
    ),
    ("tokens", {"token_ids": []}),
    ("tokens", {"token_ids": [1], "temperature": 3}),
    ("tokens", {"token_ids": [-1]}),
    ("chat", {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True}}),
    ("chat", {"messages": []}),
    ("chat", {"messages": [{"role": "user", "content": "a"}], "tools": [1]}),
    ("completions", {"prompt": ["a"], "logprobs": 5}),
    ("completions", {"prompt": [1, 2], "logit_bias": {"5": 1}}),
    ("completions", {"prompt": ["a", "b"]}),
    ("completions", {"prompt": "", "max_tokens": 0}),
]


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=str)
def test_a_request_is_valid_by_the_schema_if_it_is_accepted(kind: Kind, body: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    try:
        parse(kind, body)
    except InvalidRequest:
        accepted = False
    else:
        accepted = True
    assert jsonschema.Draft202012Validator(schema(f"request.{kind}")).is_valid(body) == accepted


def test_a_chunk_is_valid_by_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    usage = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    chunk = TokenChunk(job="j", attempt=1, seq=0, index=0, token_ids=[1], finish_reason="stop", usage=usage)
    jsonschema.Draft202012Validator(schema("chunk.tokens")).validate(msgspec.json.decode(codec.encode(chunk)))
