"""Cuts a chunk that is too large for one message into two that say the same together."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferbus.schemas.answers import TokenChunk

_TEXTS: Final = ("content", "reasoning_content")
_TOKENS: Final = ("token_ids", "prompt_token_ids")
"""Lists of a choice, which readers put together as they do its texts."""

_AT_THE_END: Final = ("finish_reason", "matched_stop", "stop_reason")
"""Fields of a choice that belong to its last chunk."""


def halves(chunk: msgspec.Struct | bytes) -> tuple[msgspec.Struct | bytes, msgspec.Struct | bytes] | None:
    """Two chunks in place of one, or None where nothing in it can be cut.

    Args:
        chunk: From an `AnswerFormatter`: a struct, or OpenAI's object as JSON.
    """
    if isinstance(chunk, TokenChunk):
        return _token_halves(chunk)
    if not isinstance(chunk, bytes):
        return None
    frame = msgspec.json.decode(chunk)
    if len(choices := frame.get("choices") or []) != 1:
        return None
    cut = _choice_halves(choices[0])
    if cut is None:
        return None
    first, second = {**frame, "choices": [cut[0]]}, {**frame, "choices": [cut[1]]}
    first.pop("usage", None)
    return msgspec.json.encode(first), msgspec.json.encode(second)


def _token_halves(chunk: TokenChunk) -> tuple[TokenChunk, TokenChunk] | None:
    middle = len(chunk.token_ids) // 2
    if not middle:
        return None
    before, after = slice(None, middle), slice(middle, None)
    logprobs = chunk.logprobs
    cut = [
        logprobs
        and msgspec.structs.replace(
            logprobs, logprobs=logprobs.logprobs[part], top=logprobs.top and logprobs.top[part]
        )
        for part in (before, after)
    ]
    first = msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[before],
        logprobs=cut[0],
        finish_reason=None,
        matched=None,
        usage=None,
    )
    second = msgspec.structs.replace(chunk, token_ids=chunk.token_ids[after], logprobs=cut[1], warnings=[])
    return first, second


def _choice_halves(choice: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """A choice cut in everything in it that is long."""
    first = {name: value for name, value in choice.items() if name not in _AT_THE_END} | {
        "finish_reason": None
    }
    second = dict(choice)
    found = _cut_texts(first, second, ("text",))
    delta = choice.get("delta")
    if isinstance(delta, dict):
        first["delta"], second["delta"] = dict(delta), {k: v for k, v in delta.items() if k != "role"}
        found |= _cut_texts(first["delta"], second["delta"], _TEXTS)
        if calls := delta.get("tool_calls"):
            first["delta"]["tool_calls"], second["delta"]["tool_calls"], cut = _call_halves(calls)
            found |= cut
    for name in _TOKENS:
        if isinstance(tokens := choice.get(name), list):
            middle = len(tokens) // 2
            first[name], second[name] = tokens[:middle], tokens[middle:]
            found |= middle > 0
    if isinstance(logprobs := choice.get("logprobs"), dict):
        middle = max((len(value) for value in logprobs.values() if isinstance(value, list)), default=0) // 2
        first["logprobs"] = {k: v[:middle] if isinstance(v, list) else v for k, v in logprobs.items()}
        second["logprobs"] = {k: v[middle:] if isinstance(v, list) else v for k, v in logprobs.items()}
        found |= middle > 0
    return (first, second) if found else None


def _cut_texts(first: dict[str, Any], second: dict[str, Any], names: tuple[str, ...]) -> bool:
    found = False
    for name in names:
        text = first.get(name)
        if isinstance(text, str) and (middle := len(text) // 2):
            first[name], second[name] = text[:middle], text[middle:]
            found = True
        elif name in second and name in first and text:
            second[name] = ""  # Too short to be cut: the first half has it.
    return found


def _call_halves(calls: list[dict[str, Any]]) -> tuple[list[Any], list[Any], bool]:
    """Several calls apart; of a single one, its arguments. Its name and id are in the first half."""
    if middle := len(calls) // 2:
        return calls[:middle], calls[middle:], True
    function = calls[0].get("function") or {}
    arguments = function.get("arguments") or ""
    middle = len(arguments) // 2
    if not middle:
        return calls, [], False
    first = {**calls[0], "function": {**function, "arguments": arguments[:middle]}}
    second = {"index": calls[0].get("index", 0), "function": {"arguments": arguments[middle:]}}
    return [first], [second], True
