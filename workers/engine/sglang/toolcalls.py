"""Tool calls, and the text around them, alike in a stream and in one piece.

SGLang parses an answer twice: as it is generated, for a stream, and at its end, for an answer in one piece.
The two differ. In one piece, text before a call loses its last blank, text behind it is left out, and there
is no `matched_stop`; a call of a tool that is not there leaves other text behind; a call's random id is
another one. And where an answer is cut off inside a call, by a stop string or by its length, the stream has
sent the beginning of the call, completes its arguments to valid JSON that the model never wrote, and ends
with `tool_calls`; the answer in one piece has no such call.

A durable job has both, its chunks and its result, and somebody may have acted on the chunks already. So the
answer in one piece is what its stream said. Both hold a call that was cut off as far as the model wrote it,
and `tool_calls` is the finish reason only if every call is complete.
"""

from __future__ import annotations

from typing import Any

import msgspec

from inferbus.workers.engine.interface import Finish


def cut_off(reason: str, matched: int | str | None) -> bool:
    """Whether an answer ended where the model did not end it."""
    return reason == "length" or isinstance(matched, str)


class SentCalls:
    """The content and calls that the chunks of one answer have held."""

    def __init__(self) -> None:
        self._content: dict[int, str] = {}
        self._calls: dict[int, dict[int, dict[str, Any]]] = {}
        self._cut: dict[int, str] = {}
        self._ends: dict[int, dict[str, Any]] = {}

    def end(self, index: int, finish: Finish) -> None:
        """Notes how the engine ended a choice; to be called before the chunk that says so is read."""
        if cut_off(finish.reason, finish.matched):
            self._cut[index] = finish.reason

    def read(self, chunk: dict[str, Any]) -> bool:
        """Takes note of a streamed chunk; returns whether its finish reason was corrected."""
        corrected = False
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta") or {}
            self._content[index] = self._content.get(index, "") + (delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                self._add(self._calls.setdefault(index, {}), call)
            if choice.get("finish_reason") == "tool_calls" and index in self._cut:
                choice["finish_reason"] = self._reason(index)
                corrected = True
            if choice.get("finish_reason"):
                self._ends[index] = {name: choice.get(name) for name in ("finish_reason", "matched_stop")}
        return corrected

    def completed(self, body: bytes) -> bytes:
        """An answer in one piece, with the text, the calls and the ends of its stream."""
        answer = msgspec.json.decode(body)
        for choice in answer["choices"]:
            index, message = choice["index"], choice["message"]
            calls = self._calls.get(index)
            message["content"] = self._content.get(index, "")
            message["tool_calls"] = list(calls.values()) if calls else None
            choice |= self._ends.get(index, {})
        return msgspec.json.encode(answer)

    def _reason(self, index: int) -> str:
        reason = self._cut[index]
        calls = self._calls.get(index, {}).values()
        complete = all(_is_json(call["function"]["arguments"]) for call in calls)
        return "tool_calls" if calls and complete and reason == "stop" else reason

    @staticmethod
    def _add(calls: dict[int, dict[str, Any]], part: dict[str, Any]) -> None:
        position, function = part.get("index") or 0, part.get("function") or {}
        call = calls.setdefault(
            position,
            {
                "id": part.get("id"),
                "index": position,
                "type": "function",
                "function": {"name": function.get("name"), "arguments": ""},
            },
        )
        call["function"]["arguments"] += function.get("arguments") or ""


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
