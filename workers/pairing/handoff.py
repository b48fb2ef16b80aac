"""The decode side of a hand-off: asks a prefill worker for a KV cache and follows what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

import structlog

from inferbus.schemas import codec, handoff
from inferbus.schemas.errors import (
    CallerError,
    InferbusError,
    PrefillFailed,
    PrefillUnavailable,
    from_body,
)
from inferbus.schemas.fleet import Signature, WorkerInfo
from inferbus.workers.engine.interface import Leg

log = structlog.get_logger()


class HandoffTransport(Protocol):
    """How a hand-off travels."""

    def request(self, worker: WorkerInfo, body: bytes, answers: asyncio.Queue[bytes | None]) -> str:
        """Sends a request; its answers go into the queue, None if no worker got it. Returns a ticket."""
        ...

    def send(self, worker: WorkerInfo, body: bytes) -> None:
        """Sends a message that has no answer."""
        ...

    def close(self, ticket: str) -> None:
        """No further answers are wanted."""
        ...


class OpenHandoff:
    """A hand-off under way."""

    def __init__(
        self, worker: WorkerInfo, accepted: asyncio.Event, outcome: asyncio.Future[handoff.Done]
    ) -> None:
        self.worker = worker
        self._accepted = accepted
        self._outcome = outcome

    async def accepted(self) -> None:
        """Waits until prefill has room for the prompt: it hands it to its engine now.

        Raises:
            PrefillUnavailable: The worker did not take it, or went away while it waited there.
            PrefillFailed: It failed already.
            CallerError: Its engine refused the prompt.
        """
        accepting = asyncio.ensure_future(self._accepted.wait())
        try:
            await asyncio.wait((accepting, self._outcome), return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                self._outcome.result()
        finally:
            accepting.cancel()

    async def done(self) -> handoff.Done:
        """Waits until prefill has sent the cache.

        Raises:
            PrefillUnavailable: The worker did not take it, or not in time.
            PrefillFailed: It took it and failed.
            CallerError: Its engine refused the prompt.
        """
        return await asyncio.shield(self._outcome)


class Handoffs:
    """Makes hand-offs.

    Args:
        transport: How they travel.
        worker: This decode worker's id.
        signature: Of its engine.
        accept_timeout: Seconds within which a worker must accept a hand-off, or say again that it waits.
        timeout: Seconds from then on within which it must have sent the cache. SGLang itself lets a prefill
            wait for ever for a decode that never connects (NIXL's sender ignores its bootstrap timeout).
        lost: Called with a worker that is not there any more.
    """

    def __init__(
        self,
        transport: HandoffTransport,
        *,
        worker: str,
        signature: Signature,
        accept_timeout: float,
        timeout: float,
        lost: Callable[[WorkerInfo], None] = lambda worker: None,
    ) -> None:
        self._transport = transport
        self._worker = worker
        self._signature = signature
        self._accept_timeout = accept_timeout
        self._timeout = timeout
        self._lost = lost

    @asynccontextmanager
    async def offer(
        self, worker: WorkerInfo, leg: Leg, *, job: str, trace: Mapping[str, str] | None = None
    ) -> AsyncIterator[OpenHandoff]:
        """Hands a leg to a prefill worker; whatever is unfinished when the block ends is aborted there.

        Args:
            worker: The prefill worker.
            leg: With a rendezvous.
            job: For logs.
            trace: The context of the worker's spans.
        """
        if leg.rendezvous is None:
            raise ValueError("a leg that is handed off needs a rendezvous")
        answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        body = codec.encode(
            handoff.Prefill(
                rid=leg.rid,
                room=leg.rendezvous.room,
                token_ids=leg.token_ids,
                sampling=leg.sampling,
                options=leg.options,
                worker=self._worker,
                job=job,
                signature=self._signature,
                timeout=self._timeout,
                trace=dict(trace or {}),
            ),
            codec.MSGPACK,
        )
        ticket = self._transport.request(worker, body, answers)
        accepted = asyncio.Event()
        outcome = asyncio.ensure_future(self._follow(worker, answers, accepted))
        try:
            yield OpenHandoff(worker, accepted, outcome)
        finally:
            self._transport.close(ticket)
            problem = outcome.exception() if outcome.done() else None
            if problem is not None:
                log.warning("handoff.failed", job=job, prefill=worker.worker, reason=str(problem))
            if problem is not None or not outcome.done():
                outcome.cancel()
                self._transport.send(worker, codec.encode(handoff.Abort(rid=leg.rid), codec.MSGPACK))

    async def _follow(
        self, worker: WorkerInfo, answers: asyncio.Queue[bytes | None], accepted: asyncio.Event
    ) -> handoff.Done:
        first: handoff.FromPrefill = handoff.Queued(worker=worker.worker)
        try:
            while isinstance(first, handoff.Queued):
                async with asyncio.timeout(self._accept_timeout):
                    first = self._read(worker, await answers.get())
        except TimeoutError:
            raise PrefillUnavailable(f"prefill worker {worker.worker} did not answer a hand-off") from None
        if not isinstance(first, handoff.Accepted):
            return self._ended(worker, first)
        accepted.set()
        try:
            async with asyncio.timeout(self._timeout):
                return self._ended(worker, self._read(worker, await answers.get()))
        except TimeoutError:
            raise PrefillFailed(
                f"prefill worker {worker.worker} did not finish in {self._timeout:g} s"
            ) from None

    def _read(self, worker: WorkerInfo, body: bytes | None) -> handoff.FromPrefill:
        if body is None:
            self._lost(worker)
            raise PrefillUnavailable(f"prefill worker {worker.worker} is not there any more")
        try:
            # A union is a type to msgspec, and none to mypy.
            answer: handoff.FromPrefill = codec.decode(body, handoff.FromPrefill, codec.MSGPACK)  # type: ignore[arg-type]
            return answer
        except CallerError:
            raise PrefillFailed(
                f"prefill worker {worker.worker} sent an answer that cannot be read"
            ) from None

    def _ended(self, worker: WorkerInfo, answer: handoff.FromPrefill) -> handoff.Done:
        match answer:
            case handoff.Done():
                return answer
            case handoff.Refused(error=error):
                raise _fault(from_body(error), PrefillUnavailable, worker)
            case handoff.Failed(error=error):
                raise _fault(from_body(error), PrefillFailed, worker)
        raise PrefillFailed(f"prefill worker {worker.worker} accepted a hand-off twice")


def _fault(error: InferbusError, kind: type[InferbusError], worker: WorkerInfo) -> InferbusError:
    """The caller's fault stays the caller's; everything else is this leg's, which the message names."""
    if isinstance(error, CallerError):
        return error
    return kind(f"prefill worker {worker.worker}: {error.message}")
