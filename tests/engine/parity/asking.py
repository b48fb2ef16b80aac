"""Asks both sides."""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

import httpx
from nats.aio.client import Client

from tests.engine.parity.cases import MODEL, Case
from tests.engine.parity.told import Told
from tests.support.asking import Answer, result

PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
WITHIN: Final = 60.0


async def ask_http(http: httpx.AsyncClient, case: Case, *, stream: bool) -> Told:
    """SGLang's server."""
    try:
        return await _ask_http(http, PATHS[case.kind], case.body | {"stream": stream})
    except httpx.TransportError:
        return Told(error={"message": "the connection was closed"})


async def _ask_http(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Told:
    async with http.stream("POST", path, json=body) as answer:
        if "text/event-stream" not in answer.headers["content-type"]:
            whole = json.loads(await answer.aread())
            return Told(error=whole) if answer.is_error else Told(whole=whole)
        lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return _told([json.loads(line) for line in lines[:-1]], stream=True)


async def ask_bus(nc: Client, case: Case, *, stream: bool) -> Told:
    """A worker, live."""
    answer = await Answer.on(nc, nc.new_inbox())
    body = json.dumps(case.body | {"stream": stream}).encode()
    await nc.publish(f"infer.request.{MODEL}.{case.kind}", body, reply=answer.subject)
    await answer.ended(within=WITHIN)
    await answer.subscription.unsubscribe()
    return _told(answer.chunks, stream=stream)


async def ask_job(nc: Client, case: Case) -> dict[str, Told]:
    """A worker, durably: the chunks, and the result as the whole answer."""
    job = secrets.token_hex(8)
    answer = await Answer.on(nc, f"infer.stream.acme.{job}")
    headers = {"Infer-Job-Id": job}
    await nc.jetstream().publish(
        f"infer.jobs.{MODEL}.batch.acme.{case.kind}", json.dumps(case.body).encode(), headers=headers
    )
    await answer.ended(within=WITHIN)
    await answer.subscription.unsubscribe()
    # Of a job, chunks carry their tokens beside the text.
    chunks = [
        {name: value for name, value in chunk.items() if name != "token_ids"} for chunk in answer.chunks
    ]
    whole = _told([json.loads((await result(nc, job)).data)], stream=False)
    return {"stream": _told(chunks, stream=True), "whole": whole}


def _told(messages: list[dict[str, Any]], *, stream: bool) -> Told:
    error = next((message["error"] for message in messages if "error" in message), None)
    if error is not None:
        return Told(error=error)
    if stream:
        return Told(chunks=messages)
    (whole,) = messages
    return Told(whole=whole)
