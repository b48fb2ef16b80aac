"""Tool calls, and the text around them, alike in a stream and in one piece.

SGLang's formatters differ where an answer is cut off inside a call, by a stop string
or by its length. The stream has sent the beginning of the call, completes its
arguments to valid JSON that the model never wrote, and ends with `tool_calls`; the
answer in one piece has no such call. Here both hold the call as far as the model
wrote it, and `tool_calls` is the finish reason only if every call is complete.

They also differ in the text: in one piece it ends with the first call (qwen25). Here
it is the stream's.
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
        return corrected

    def completed(self, body: bytes) -> bytes:
        """An answer in one piece, with the text, and the calls that were cut off, of its stream."""
        if not self._calls:
            return body
        answer = msgspec.json.decode(body)
        for choice in answer["choices"]:
            index, message = choice["index"], choice["message"]
            if index in self._calls:
                message["content"] = self._content.get(index) or None
            if index in self._calls and index in self._cut:
                message["tool_calls"] = list(self._calls[index].values())
                choice["finish_reason"] = self._reason(index)
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
