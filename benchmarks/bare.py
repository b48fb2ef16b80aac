"""SGLang's engine with nothing of ours around it: what a worker is compared with.

    python -m benchmarks.bare PLAN OUT MODEL [SGLang's flags]

Tokens go through `sgl.Engine.async_generate`; chat through `OpenAIServingChat.handle_request`, which is
what SGLang's own server calls once it has read the HTTP request, down to the lines of server-sent events.
The event loop is uvloop, which SGLang sets up for those who embed it. Server arguments come from the same
reader that a worker uses, so that both engines have the same ones.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.load import LoadFailed, encode
from benchmarks.machine import Watch
from benchmarks.readings import Taken
from benchmarks.workload import Plan, Reading, Shape
from inferbus.workers.engine.sglang import options

HOST: Final = "127.0.0.1"

Ask = Callable[[bytes], Awaitable[AsyncIterator[Any]]]
"""Sends one request, as the bytes that its sender would send, and gives its messages."""


class Counted(msgspec.Struct):
    """What came back in one reading."""

    messages: int = 0
    first: list[float] = []


def read_arguments(argv: list[str], model: str) -> Any:
    """SGLang's server arguments, as a worker of the role `both` has them."""
    options.prepare_environment(options.TRANSFER_SECONDS)
    return options.read(argv, role="both", model=model).arguments


class Bare:
    """The engine and the two ways to ask it."""

    def __init__(self, arguments: Any) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self._engine = Engine(server_args=arguments)
        self._chat_handler: Any = None

    def shutdown(self) -> None:
        """Ends it."""
        self._engine.shutdown()

    async def whole(self, bodies: list[dict[str, Any]]) -> Taken:
        """Answers all of these requests for tokens, given to the engine as one list.

        Raises:
            LoadFailed: An answer was not whole.
        """
        sampling = [
            {"max_new_tokens": body["max_tokens"], "temperature": 0.0, "ignore_eos": True} for body in bodies
        ]
        started = time.perf_counter()
        answers = await self._engine.async_generate(
            input_ids=[body["token_ids"] for body in bodies], sampling_params=sampling
        )
        seconds = time.perf_counter() - started
        tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        if tokens != sum(body["max_tokens"] for body in bodies):
            raise LoadFailed(f"{tokens} tokens came of {len(bodies)} requests")
        return Taken(seconds=seconds, tokens=tokens)

    async def tokens(self, body: bytes) -> AsyncIterator[Any]:
        """Asks for tokens."""
        request = msgspec.json.decode(body)
        sampling = {
            "max_new_tokens": request["max_tokens"],
            "temperature": request["temperature"],
            "ignore_eos": request["ignore_eos"],
        }
        found: AsyncIterator[Any] = await self._engine.async_generate(
            input_ids=request["token_ids"], sampling_params=sampling, stream=True
        )
        return found

    async def chat(self, body: bytes) -> AsyncIterator[Any]:
        """Asks for a chat completion."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        if self._chat_handler is None:
            self._chat_handler = OpenAIServingChat(
                self._engine.tokenizer_manager, self._engine.template_manager
            )
        request = ChatCompletionRequest(model="default", **json.loads(body))
        response = await self._chat_handler.handle_request(request, None)
        if not hasattr(response, "body_iterator"):
            raise RuntimeError(f"SGLang refused a request: {response.body!r}")
        found: AsyncIterator[Any] = response.body_iterator
        return found


async def drive(ask: Ask, bodies: list[bytes], concurrency: int) -> Counted:
    """Sends every request, some at a time."""
    counted, left, started = Counted(), iter(bodies), time.perf_counter()

    async def one_after_another() -> None:
        # Counts from when it was due: SGLang converts a chat on the loop, and others wait for that.
        sent = started
        for body in left:
            messages = 0
            async for message in await ask(body):
                if messages == 0:
                    counted.first.append(time.perf_counter() - sent)
                    if isinstance(message, str) and message.startswith('data: {"error"'):
                        raise RuntimeError(message)
                messages += 1
            counted.messages += messages
            sent = time.perf_counter()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    return counted


async def run(bare: Bare, plan: Plan) -> list[Reading]:
    """Measures a plan."""
    asks: dict[str, Ask] = {"tokens": bare.tokens, "chat": bare.chat}

    async def reading(shape: Shape, number: int) -> Reading:
        bodies = [encode(body) for body in plan.bodies(shape, number)]
        main = os.getpid()
        with Watch({"main": main}, sessions=[os.getsid(0)]) as watch:
            counted = await drive(asks[shape.kind], bodies, shape.concurrency)
        tokens = shape.requests * plan.answer
        return Reading(
            layout="bare",
            round=0,
            number=number,
            kind=shape.kind,
            concurrency=shape.concurrency,
            requests=shape.requests,
            tokens=tokens,
            messages=counted.messages,
            seconds=watch.seconds,
            first=counted.first,
            main_us=watch.cpu["main"] / tokens * 1e6,
            others=watch.others,
            stolen=watch.stolen,
        )

    for shape in plan.warming():
        await reading(shape, -1)
    return [await reading(shape, number) for number in range(plan.passes) for shape in plan.shapes]


def main(arguments: list[str]) -> int:
    """Builds the engine as SGLang's documentation shows it, measures, writes the readings."""
    plan_file, out, model, *argv = arguments
    plan = msgspec.json.decode(Path(plan_file).read_bytes(), type=Plan)
    bare = Bare(read_arguments(argv, model))
    try:
        readings = asyncio.run(run(bare, plan))
    finally:
        bare.shutdown()
    # In one step, so that whoever waits for the file finds it whole.
    part = Path(f"{out}.part")
    part.write_bytes(msgspec.json.encode(readings))
    part.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
