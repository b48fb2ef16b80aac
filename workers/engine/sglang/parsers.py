"""The tool call parser, which turns the text of a call into a call.

Each family of models writes calls in a form of its own. SGLang knows most of them by
their chat templates: its choice `auto` finds the parser. A worker asks for that where
the user names none, since calls come as plain text without a parser.

The reasoning parser stays the user's choice: it moves text out of `content`, and with it
no chat can be continued by another worker.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Container
from typing import Final

from inferbus.schemas.fleet import Role

FIELD: Final = "tool_call_parser"
AUTO: Final = "auto"
NONE: Final = "none"
"""Ours: no parser, and none looked for."""

_DETECTION: Final = "sglang.srt.parser.template_detection"


def offer_none(parser: argparse.ArgumentParser) -> None:
    """Adds `none` to the values of SGLang's option."""
    for action in _options(parser):
        action.choices = [*(action.choices or ()), NONE]


def choose(
    parser: argparse.ArgumentParser, values: argparse.Namespace, given: Container[str], role: Role
) -> None:
    """Sets `auto` where it is of use, and takes `none` out again.

    Args:
        parser: SGLang's own, which says whether this version can detect one.
        values: The options; changed here.
        given: The names of those that the user gave.
        role: Of the worker. Prefill formats no answers.
    """
    if getattr(values, FIELD, None) == NONE:
        setattr(values, FIELD, None)
    if FIELD in given or role == "prefill" or getattr(values, "skip_tokenizer_init", False):
        return
    if any(AUTO in (action.choices or ()) for action in _options(parser)):
        setattr(values, FIELD, AUTO)
        # It warns of an `auto` that nobody gave; the worker has a warning of its own.
        logging.getLogger(_DETECTION).addFilter(_not_of_tool_calls)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.dest == FIELD]


def _not_of_tool_calls(record: logging.LogRecord) -> bool:
    return "could not detect tool-call parser" not in record.getMessage()
