"""Generation of a whole request: one leg a choice, each on this engine alone or paired with prefill."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
import structlog

from inferbus.schemas.errors import InferbusError, PrefillFailed, PrefillUnavailable, TransferFailed
from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.engine.interface import Delta, Engine, Leg, Prompt, Rendezvous
from inferbus.workers.jobs.reply import Served
from inferbus.workers.pairing.handoff import Handoffs, Prefilling
from inferbus.workers.pairing.picker import Picker

log = structlog.get_logger()

ROOMS: Final = 2**63
TRIES: Final = 3
"""Prefill workers that a leg is offered to before the attempt as a whole fails."""

RunLeg = Callable[[Leg, str, Served], AsyncGenerator[Delta, None]]
"""Runs one leg of a job and notes who served it."""


def generate(prompt: Prompt, run: RunLeg, *, job: str, served: Served) -> AsyncGenerator[Delta, None]:
    """All choices of a request, their deltas as they come; closing it ends every leg.

    Raises:
        InferbusError: The first leg that fails ends the others.
    """
    legs = [prompt.leg(index, rid=new_rid()) for index in range(prompt.choices)]
    streams = [run(leg, job, served) for leg in legs]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(maxsize=2 * len(streams))

    async def forward(stream: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(stream):
            try:
                async for delta in stream:
                    await queue.put(delta)
            except InferbusError as error:
                await queue.put(error)
            else:
                await queue.put(None)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
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

    def __call__(self, leg: Leg, job: str, served: Served) -> AsyncGenerator[Delta, None]:
        """Runs one leg."""
        return self._engine.generate(leg)


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

    async def __call__(self, leg: Leg, job: str, served: Served) -> AsyncGenerator[Delta, None]:
        """Runs one leg; tried again on another prefill worker as long as no token has gone out."""
        failures: dict[str, InferbusError] = {}
        while True:
            worker = self._pick(leg, failures)
            started = False
            try:
                with self._picker.using(worker.worker):
                    async with aclosing(self._pair(self._meeting(leg, worker), worker, job)) as deltas:
                        async for delta in deltas:
                            if not started and leg.index == 0:
                                served.prefill = worker.worker
                            started = True
                            yield delta
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
        """The next worker; where none is left, the failure of the one before tells more than that."""
        try:
            return self._picker.pick(leg.token_ids, passed_over=frozenset(failures))
        except PrefillUnavailable as error:
            for failure in reversed(failures.values()):
                raise failure from error
            raise

    def _meeting(self, leg: Leg, worker: WorkerInfo) -> Leg:
        if worker.bootstrap is None:
            raise PrefillUnavailable(f"prefill worker {worker.worker} announced no bootstrap address")
        rendezvous = Rendezvous(bootstrap=worker.bootstrap, room=self._room())
        return msgspec.structs.replace(leg, rendezvous=rendezvous)

    async def _pair(self, leg: Leg, worker: WorkerInfo, job: str) -> AsyncGenerator[Delta, None]:
        """Both legs at once: prefill blocks until decode connects, so neither may wait for the other.

        The first delta is held back until prefill says that it has sent the cache: a decode engine whose
        prefill failed has been seen to generate from garbage (sgl-project/sglang#30233).
        """
        async with (
            self._handoffs.offer(worker, leg, job=job) as prefilling,
            aclosing(self._engine.generate(leg)) as deltas,
        ):
            first = await _first(deltas, prefilling)
            done = await prefilling.done()
            if first is None:
                return
            first.cached_tokens = done.cached_tokens
            yield first
            async for delta in deltas:
                delta.cached_tokens = done.cached_tokens
                yield delta


async def _first(deltas: AsyncGenerator[Delta, None], prefilling: Prefilling) -> Delta | None:
    """The first delta, unless prefill fails before it; that failure is then the leg's."""
    decoding = asyncio.ensure_future(anext(deltas, None))
    failing = asyncio.ensure_future(prefilling.done())
    try:
        await asyncio.wait((decoding, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        return await decoding
    except TransferFailed as error:
        raise await _cause(error, prefilling) from error
    finally:
        for task in (decoding, failing):
            task.cancel()
        await asyncio.gather(decoding, failing, return_exceptions=True)


async def _cause(error: TransferFailed, prefilling: Prefilling) -> InferbusError:
    """Prefill's own account of a transfer that failed, where it gives one soon."""
    try:
        async with asyncio.timeout(0.2):
            await prefilling.done()
    except InferbusError as problem:
        return problem
    except TimeoutError:
        pass
    return TransferFailed(f"prefill worker {prefilling.worker.worker}: {error.message}")
