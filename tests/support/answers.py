"""Answers for tests of the client: as a worker would send them."""

from __future__ import annotations

from typing import Any

from inferbus.schemas.headers import Continuation
from inferbus.workers.client.assembler import Event, Restarted
from inferbus.workers.client.messages import Chunk, ChunkMessage, EndMark, Result

USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def chat(delta: dict[str, Any] | None, *, index: int = 0, finish: str | None = None, **more: Any) -> Chunk:
    """A chat chunk; `delta` None for the usage chunk."""
    choices = [] if delta is None else [{"index": index, "delta": delta, "finish_reason": finish}]
    return {
        "job": "j",
        "attempt": 1,
        "seq": 0,
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }


def chat_answer(text: str, *, attempt: int = 1) -> dict[str, Any]:
    """A whole chat answer."""
    return {
        "job": "j",
        "attempt": attempt,
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def pieces(
    attempt: int, texts: list[str], *, continues: Continuation | None = None, role: bool = True
) -> list[ChunkMessage]:
    """One attempt's chunks, to the end: role, texts, finish, usage."""
    chunks = [chat({"role": "assistant", "content": ""})] if role else []
    chunks += [chat({"content": text}) for text in texts]
    chunks += [chat({}, finish="stop"), chat(None, usage=USAGE)]
    return [
        ChunkMessage(
            attempt=attempt,
            seq=seq,
            chunk={**chunk, "attempt": attempt, "seq": seq},  # type: ignore[dict-item]
            continues=continues if seq == 0 else None,
        )
        for seq, chunk in enumerate(chunks)
    ]


def end(attempt: int, messages: int, status: Any = "ok") -> EndMark:
    """An end mark."""
    return EndMark(attempt=attempt, status=status, messages=messages, worker="d1", prefill_worker="p1")


def result(text: str, *, attempt: int = 1) -> Result:
    """A stored result."""
    return Result(
        attempt=attempt,
        status="ok",
        submission=1,
        worker="d1",
        prefill_worker="p1",
        answer=chat_answer(text, attempt=attempt),
    )


def seen(events: list[Event]) -> str:
    """What a user who follows the rules ends up with."""
    text = ""
    for event in events:
        if isinstance(event, Restarted):
            text = ""
        elif isinstance(event, dict):
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text
