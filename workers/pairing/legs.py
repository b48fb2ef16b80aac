"""The legs of a request: one a choice, each on this engine alone or paired with a prefill worker."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Final

import msgspec
import structlog

from inferbus.schemas.errors import (
    EngineFailed,
    InferbusError,
    PrefillFailed,
    PrefillUnavailable,
    TransferFailed,
)
from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers import tracing
from inferbus.workers.engine.interface import Delta, Engine, Leg, Prompt, Rendezvous
from inferbus.workers.pairing.handoff import Handoffs, OpenHandoff
from inferbus.workers.pairing.picker import Picker

log = structlog.get_logger()

ROOMS: Final = 2**63
TRIES: Final = 3
"""Prefill workers that a leg is offered to before the attempt as a whole fails."""


class RunningLeg(msgspec.Struct, frozen=True, kw_only=True):
    """A leg that the engine is at work on.

    Attributes:
        deltas: What the engine adds from now on.
        first: What it added before that; None where the leg was not waited for.
        prefill: The prefill worker that computed the prompt; None where this engine does.
        cached_tokens: How many of the prompt's tokens that worker had in its prefix cache.
    """

    deltas: AsyncGenerator[Delta, None]
    first: Delta | None = None
    prefill: str | None = None
    cached_tokens: int | None = None


RunLeg = Callable[[Leg, str], AbstractAsyncContextManager[RunningLeg]]
"""Runs one leg of a job while the block runs; what is unfinished when the block ends is aborted.

Raises `InferbusError`, on entering and from the deltas.
"""


def generate(
    prompt: Prompt, run: Callable[[Leg], AsyncGenerator[Delta, None]]
) -> AsyncGenerator[Delta, None]:
    """All choices of a request, their deltas as they come; closing it ends every leg.

    Args:
        prompt: The request.
        run: Gives the deltas of one leg.

    Raises:
        InferbusError: Of the first leg that fails, which ends the others.
    """
    streams = [run(prompt.leg(index, rid=new_rid())) for index in range(prompt.choices)]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """Deltas as they come, but choice 0 begins: openai's stream helper takes no other beginning.

    Not a task group: one in a generator cancels the task that reads it, outside of the generator.
    """
    arrived: asyncio.Queue[Delta | asyncio.Task[None]] = asyncio.Queue()
    room = asyncio.Semaphore(2 * len(streams))
    begun = asyncio.Event()

    async def forward(index: int, stream: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(stream):
            async for delta in stream:
                if index:
                    await begun.wait()
                await room.acquire()
                arrived.put_nowait(delta)
                begun.set()

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        # Whatever ends it: an end that is not noticed would leave the request waiting for ever.
        task.add_done_callback(arrived.put_nowait)
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if isinstance(item, Delta):
                room.release()
                yield item
            elif item.cancelled():
                raise EngineFailed("the engine cancelled a leg")
            else:
                item.result()
                left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_rid() -> str:
    """An engine request id: of fixed length, since SGLang aborts every request whose id begins with it."""
    return secrets.token_hex(16)


class Alone:
    """Legs on this engine, prompt and answer alike."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def __call__(self, leg: Leg, job: str) -> AsyncIterator[RunningLeg]:
        """Runs one leg; see `RunLeg`."""
        with tracing.span("generate", current=False):
            async with aclosing(self._engine.generate(leg)) as deltas:
                yield RunningLeg(deltas=deltas)


class Paired:
    """Legs whose prompt a prefill worker computes.

    Args:
        engine: The decode engine.
        picker: Knows the prefill workers.
        handoffs: Reaches them.
        room: Draws a room: random, so that decode workers need not agree on one.
        rid: Draws a request id for a second try.
    """

    def __init__(
        self,
        engine: Engine,
        picker: Picker,
        handoffs: Handoffs,
        *,
        room: Callable[[], int] = lambda: random.SystemRandom().randrange(1, ROOMS),
        rid: Callable[[], str] = new_rid,
    ) -> None:
        self._engine = engine
        self._picker = picker
        self._handoffs = handoffs
        self._room = room
        self._rid = rid

    @asynccontextmanager
    async def __call__(self, leg: Leg, job: str) -> AsyncIterator[RunningLeg]:
        """Runs one leg; see `RunLeg`. Tried on another prefill worker until the first token is there."""
        failures: dict[str, InferbusError] = {}
        while True:
            worker = self._pick(leg, failures)
            started = False
            try:
                async with self._pair(leg, worker, job) as running:
                    started = True
                    yield running
                return
            except (PrefillUnavailable, PrefillFailed, TransferFailed) as error:
                failures[worker.worker] = error
                if started or len(failures) == TRIES:
                    raise
                log.warning(
                    "leg.retried", job=job, prefill=worker.worker, code=error.code, reason=error.message
                )
                leg = msgspec.structs.replace(leg, rid=self._rid())

    def _pick(self, leg: Leg, failures: dict[str, InferbusError]) -> WorkerInfo:
        """The next worker; where none is left, the failure of the last one is more precise."""
        try:
            return self._picker.pick(leg.token_ids, passed_over=frozenset(failures))
        except PrefillUnavailable as error:
            for failure in reversed(failures.values()):
                raise failure from error
            raise

    @asynccontextmanager
    async def _pair(self, leg: Leg, worker: WorkerInfo, job: str) -> AsyncIterator[RunningLeg]:
        """Both legs at once, as soon as prefill has room for the prompt.

        Its engine blocks until decode connects, so neither leg may wait for the other then. Before that a
        leg would hold KV cache for a prompt that waits.

        The first delta is held back until prefill reports that it has sent the cache: a decode engine whose
        prefill failed has been seen to generate from garbage (sgl-project/sglang#30233).
        """
        described = {"inferbus.prefill_worker": worker.worker}
        with (
            self._picker.using(worker.worker),
            tracing.span("prefill", kind="client", current=False, attributes=described) as prefill,
        ):
            leg = self._meeting(leg, worker)
            async with (
                self._handoffs.offer(worker, leg, job=job, trace=prefill.headers) as open_handoff,
                aclosing(self._engine.generate(leg)) as deltas,
            ):
                await open_handoff.accepted()
                first = await _first(deltas, open_handoff)
                done = await open_handoff.done()
                prefill.end()
                with tracing.span("decode", current=False):
                    yield RunningLeg(
                        deltas=deltas, first=first, prefill=worker.worker, cached_tokens=done.cached_tokens
                    )

    def _meeting(self, leg: Leg, worker: WorkerInfo) -> Leg:
        if worker.bootstrap is None:
            raise PrefillUnavailable(f"prefill worker {worker.worker} announced no bootstrap address")
        rendezvous = Rendezvous(bootstrap=worker.bootstrap, room=self._room())
        return msgspec.structs.replace(leg, rendezvous=rendezvous)


async def _first(deltas: AsyncGenerator[Delta, None], open_handoff: OpenHandoff) -> Delta | None:
    """The first delta, unless prefill fails before it; that failure is then the leg's."""
    decoding = asyncio.ensure_future(anext(deltas, None))
    failing = asyncio.ensure_future(open_handoff.done())
    try:
        await asyncio.wait((decoding, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        return await decoding
    except TransferFailed as error:
        raise await _cause(error, open_handoff) from error
    finally:
        for task in (decoding, failing):
            task.cancel()
        await asyncio.gather(decoding, failing, return_exceptions=True)


async def _cause(error: TransferFailed, open_handoff: OpenHandoff) -> InferbusError:
    """Prefill's own error for a transfer that failed, where it comes soon."""
    try:
        async with asyncio.timeout(0.2):
            await open_handoff.done()
    except InferbusError as problem:
        return problem
    except TimeoutError:
        pass
    return TransferFailed(f"prefill worker {open_handoff.worker.worker}: {error.message}")
