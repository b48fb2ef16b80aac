"""Which tool call parser an engine is started with."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pytest

from inferbus.schemas.fleet import Role
from inferbus.workers.engine.sglang import parsers

RECENT = ("auto", "qwen25", "mistral")


def chosen(argv: Sequence[str], *, role: Role = "both", choices: Sequence[str] = RECENT) -> str | None:
    """The parser with these flags, where SGLang offers these choices."""
    options = argparse.ArgumentParser()
    options.add_argument("--tool-call-parser", choices=list(choices))
    options.add_argument("--skip-tokenizer-init", action="store_true")
    parsers.offer_none(options)
    values = options.parse_args(argv)
    given = {"tool_call_parser"} if "--tool-call-parser" in argv else set()
    parsers.choose(options, values, given, role)
    parser: str | None = values.tool_call_parser
    return parser


@pytest.mark.parametrize("role", ["both", "decode"])
def test_sglang_looks_for_the_parser_where_none_is_named(role: Role) -> None:
    assert chosen([], role=role) == "auto"


def test_a_parser_that_is_named_wins() -> None:
    assert chosen(["--tool-call-parser", "qwen25"]) == "qwen25"


def test_none_switches_it_off() -> None:
    assert chosen(["--tool-call-parser", "none"]) is None


def test_a_version_that_cannot_look_for_one_is_not_asked_to() -> None:
    assert chosen([], choices=["qwen25"]) is None


def test_a_worker_that_formats_no_answers_looks_for_none() -> None:
    assert chosen([], role="prefill") is None
    assert chosen(["--skip-tokenizer-init"]) is None
