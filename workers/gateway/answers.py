"""Answers of the bus as OpenAI has them: chunks and whole answers, without the fields of the contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from inferbus.schemas.errors import InferbusError, ModelNotFound, NotSupported, NoWorker, Overloaded
from inferbus.workers.client import AnswerStream, Client, LiveStream, Restarted
from inferbus.workers.client.messages import Answer
from inferbus.workers.client.models import never_served, of_its_model, serving, unserved
from inferbus.workers.gateway.errors import Restarts
from inferbus.workers.gateway.requests import Asked

_OWN: Final = frozenset({"job", "attempt", "seq"})
"""Fields that the contract adds to OpenAI's objects; the job's id is in a header of the response."""


def bare(answer: Answer) -> dict[str, Any]:
    """An object of OpenAI's without the contract's own fields."""
    if not isinstance(answer, dict):
        named = ((name, getattr(answer, name)) for name in answer.__struct_fields__)
        answer = {name: value for name, value in named if name != "warnings" or value}
    return {name: value for name, value in answer.items() if name not in _OWN}


async def chunks(open_stream: Callable[[], AnswerStream[Any]]) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of an answer; closing this closes the stream, and it is opened by the first step.

    Args:
        open_stream: Opens it.

    Raises:
        Restarts: Chunks that were sent are void. No event of OpenAI's API says that.
        InferbusError: The answer is an error.
    """
    begun = False
    async with open_stream() as stream:
        async for event in stream:
            if not isinstance(event, Restarted):
                begun = True
                yield bare(event)
            elif begun:
                raise Restarts("the answer began anew on another worker; fetch it again")


async def on_its_model(client: Client, asked: Asked) -> Asked:
    """A request whose model is `model:adapter`, as one to the model; its body goes on naming the adapter.

    Raises:
        BusUnavailable: NATS does not say which models are served.
    """
    if ":" not in asked.model:
        return asked
    return msgspec.structs.replace(asked, model=of_its_model(asked.model, serving(await client.workers())))


async def live_chunks(client: Client, asked: Asked, job_id: str) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a live answer; see `chunks`. Closing this before its end cancels the request."""
    answer = chunks(lambda: _send(client, asked, job_id))
    try:
        async for chunk in answer:
            yield chunk
    except NoWorker as error:
        raise await _explained(error, client, asked) from None
    finally:
        await answer.aclose()


async def live_answer(client: Client, asked: Asked, job_id: str) -> dict[str, Any]:
    """A live answer in one piece. Cancelling this cancels the request.

    Raises:
        InferbusError: The answer is an error.
    """
    try:
        async with _send(client, asked, job_id) as stream:
            return bare(await stream.answer())
    except NoWorker as error:
        raise await _explained(error, client, asked) from None


def _send(client: Client, asked: Asked, job_id: str) -> LiveStream[Any]:
    return client.request(asked.kind, asked.model, asked.body, job_id=job_id, traceparent=asked.traceparent)


async def _explained(error: NoWorker, client: Client, asked: Asked) -> InferbusError:
    """Why nobody took a request: the bus does not say."""
    model, kind = asked.model, asked.kind
    try:
        workers = await client.workers()
        served = serving(workers)
        if model in served:
            if not any(kind in each.kinds for each in workers if each.model == model):
                return NotSupported(f"no worker of the model {model!r} serves {kind}", param="model")
            return Overloaded(f"all workers of the model {model!r} are busy")
        if await never_served(client.bus, model):
            return ModelNotFound(unserved(model, served), param="model")
        return NoWorker(unserved(model, served), param="model")
    except InferbusError:
        return error
