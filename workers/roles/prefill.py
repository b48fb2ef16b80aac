"""The prefill program: takes hand-offs, computes a prompt's KV cache, lets SGLang send it, says so."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import msgspec
import structlog
from structlog.contextvars import bind_contextvars

from inferbus.schemas import codec, handoff
from inferbus.schemas.errors import (
    Draining,
    InferbusError,
    InternalError,
    InvalidReplySubject,
    NotSupported,
    Overloaded,
    PrefillFailed,
)
from inferbus.schemas.subjects import LIVE_OWNER
from inferbus.workers.bus.connection import Bus
from inferbus.workers.bus.message import Message
from inferbus.workers.bus.services import Endpoint
from inferbus.workers.engine.interface import Delta, Engine, Leg, Rendezvous
from inferbus.workers.observe.metrics import Metrics
from inferbus.workers.roles.program import finished_within
from inferbus.workers.roles.slots import Slots

log = structlog.get_logger()


class Prefill:
    """Serves hand-offs.

    Args:
        bus: Connected.
        engine: Of the role prefill.
        slots: How many it takes at once.
        worker: This worker's id.
        replies: Prefixes of subjects that answers may go to.
        metrics: Count what ends here.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        slots: Slots,
        *,
        worker: str,
        replies: tuple[str, ...],
        metrics: Metrics | None = None,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._slots = slots
        self._worker = worker
        self._replies = replies
        self._metrics = metrics
        self._running: dict[str, asyncio.Task[None]] = {}
        self._aborted: set[str] = set()
        self._draining = False
        subject = bus.subjects.prefill(engine.info.model, worker)
        self.endpoints = (Endpoint("prefill", subject),)

    def slots_changed(self) -> None:
        """Nothing depends on it here: decode workers see the load in the registry, and a refusal at once."""

    async def start(self) -> None:
        """Begins to take hand-offs."""
        await self._bus.subscribe(self.endpoints[0].subject, self._received)

    async def drain(self, *, grace: float, hurry: asyncio.Event) -> None:
        """Refuses hand-offs, lets what runs finish within `grace` seconds, aborts the rest."""
        self._draining = True
        if not await finished_within(self._settled(), grace=grace, hurry=hurry):
            log.warning("drain.aborting", running=len(self._running))
            for rid in list(self._running):
                self._abort(rid)
            await self._settled()

    async def _settled(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running.values()))

    def _received(self, message: Message) -> None:
        try:
            order = msgspec.msgpack.decode(message.data, type=handoff.ToPrefill)
        except msgspec.DecodeError:
            log.warning("handoff.unreadable")
            return
        match order:
            case handoff.Abort(rid=rid):
                self._abort(rid)
            case handoff.Prefill():
                try:
                    reply = self._bus.subjects.check_reply(
                        message.reply, owner=LIVE_OWNER, prefixes=self._replies
                    )
                except InvalidReplySubject:
                    log.warning("handoff.unanswerable", job=order.job, decode=order.worker)
                    return
                self._take(order, reply)

    def _abort(self, rid: str) -> None:
        if rid in self._running:
            self._aborted.add(rid)
            self._engine.abort(rid)
            self._running[rid].cancel()

    def _take(self, request: handoff.Prefill, reply: str) -> None:
        refusal = self._refusal(request)
        if refusal is not None:
            self._answer(reply, handoff.Refused(worker=self._worker, error=refusal.body()))
            log.warning("handoff.refused", job=request.job, decode=request.worker, code=refusal.code)
            if self._metrics is not None:
                self._metrics.turned_away(refusal.code)
            return
        self._answer(reply, handoff.Accepted(worker=self._worker))
        task = asyncio.create_task(self._run(request, reply))
        self._running[request.rid] = task
        # Not in the task itself: one that is aborted before its first step never comes to its `finally`.
        task.add_done_callback(lambda _: self._ended(request.rid))

    def _ended(self, rid: str) -> None:
        self._engine.abort(rid)
        self._aborted.discard(rid)
        self._running.pop(rid, None)
        self._slots.free()

    def _refusal(self, request: handoff.Prefill) -> InferbusError | None:
        """Why this hand-off is not taken, or None: then a slot is held for it."""
        if self._draining:
            return Draining("this worker is shutting down")
        if request.signature != self._engine.info.signature:
            return NotSupported("the decode worker's engine does not fit this one")
        if request.rid in self._running:
            return PrefillFailed("this request id is running here already")
        if not self._slots.take_live():
            return Overloaded("all slots are busy")
        return None

    async def _run(self, request: handoff.Prefill, reply: str) -> None:
        started = time.monotonic()
        bind_contextvars(job=request.job)
        answer: handoff.FromPrefill
        try:
            async with asyncio.timeout(request.timeout):
                last = await self._compute(request)
            meta = last.meta if last is not None else {}
            answer = handoff.Done(
                worker=self._worker,
                cached_tokens=meta.get("cached_tokens") or 0,
                seconds=time.monotonic() - started,
                input_logprobs=meta.get("input_token_logprobs"),
                transfer=last.transfer if last is not None else None,
            )
            log.info("handoff.done", **_facts(request, answer))
        except TimeoutError:
            answer = self._failed(request, PrefillFailed("the decode engine never came for the cache"))
        except InferbusError as problem:
            answer = self._failed(request, problem)
        except asyncio.CancelledError:
            if request.rid not in self._aborted:
                raise
            answer = self._failed(request, PrefillFailed("aborted"))
        except Exception:  # a supervision point: a defect must not take the worker down
            log.exception("handoff.defect", job=request.job)
            answer = self._failed(request, InternalError("inferbus failed; the worker's log says how"))
        code = answer.error.code if isinstance(answer, handoff.Failed) else None
        seconds = time.monotonic() - started
        self.endpoints[0].record(seconds, code)
        self._answer(reply, answer)
        if self._metrics is not None:
            transfer = answer.transfer if isinstance(answer, handoff.Done) else None
            self._metrics.handed_off(seconds, code, transfer)

    async def _compute(self, request: handoff.Prefill) -> Delta | None:
        leg = Leg(
            rid=request.rid,
            index=0,
            token_ids=request.token_ids,
            sampling=request.sampling,
            options=request.options,
            rendezvous=self._rendezvous(request.room),
        )
        last: Delta | None = None
        async with aclosing(self._engine.generate(leg)) as deltas:
            async for delta in deltas:
                last = delta
        return last

    def _rendezvous(self, room: int) -> Rendezvous | None:
        """At this worker's own bootstrap server; a scripted engine may have none."""
        bootstrap = self._engine.info.bootstrap
        return None if bootstrap is None else Rendezvous(bootstrap=bootstrap, room=room)

    def _failed(self, request: handoff.Prefill, error: InferbusError) -> handoff.Failed:
        log.warning("handoff.failed", job=request.job, decode=request.worker, code=error.code)
        return handoff.Failed(worker=self._worker, error=error.body())

    def _answer(self, reply: str, answer: handoff.FromPrefill) -> None:
        self._bus.send(reply, codec.encode(answer, codec.MSGPACK))


def _facts(request: handoff.Prefill, done: handoff.Done) -> dict[str, object]:
    """What the log says of a hand-off that is done."""
    facts: dict[str, object] = {"job": request.job, "decode": request.worker, "seconds": done.seconds}
    if done.transfer is not None:
        facts |= {"transfer_seconds": done.transfer.seconds, "transfer_bytes": done.transfer.bytes}
    return facts
