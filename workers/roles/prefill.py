"""The prefill program: takes hand-offs, computes a prompt's KV cache, has SGLang send it, reports that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

import structlog
from structlog.contextvars import bind_contextvars

from inferbus.schemas import codec, handoff
from inferbus.schemas.errors import (
    CallerError,
    Draining,
    InferbusError,
    InternalError,
    InvalidReplySubject,
    NotSupported,
    Overloaded,
    PrefillFailed,
)
from inferbus.workers import tracing
from inferbus.workers.admission import Admission, Permit, class_of
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.fleet.services import Endpoint
from inferbus.workers.engine.interface import Delta, Engine, Leg, Rendezvous
from inferbus.workers.jobs.observer import Observer
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.observe import defects
from inferbus.workers.roles.program import finished_within

log = structlog.get_logger()


class PrefillProgram:
    """Serves hand-offs.

    Args:
        bus: Connected.
        engine: Of the role prefill.
        admission: Bounds what it takes.
        settings: Of this worker.
        endpoints: What it serves: hand-offs to it.
        observer: Told what ends here.

    Attributes:
        endpoints: See above.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        admission: Admission,
        settings: JobSettings,
        endpoints: Sequence[Endpoint],
        *,
        observer: Observer | None = None,
    ) -> None:
        self.endpoints = endpoints
        self._bus = bus
        self._engine = engine
        self._admission = admission
        self._worker = settings.worker
        self._replies = settings.replies
        self._observer = observer or Observer()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._aborted: set[str] = set()
        self._draining = False

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
        if message.forwarded:
            return
        try:
            # A union is a type to msgspec, and none to mypy.
            received: handoff.ToPrefill = codec.decode(message.data, handoff.ToPrefill, codec.MSGPACK)  # type: ignore[arg-type]
        except CallerError as error:
            log.warning("handoff.unreadable", reason=error.message)
            return
        match received:
            case handoff.Abort(rid=rid):
                self._abort(rid)
            case handoff.Prefill():
                try:
                    reply = self._bus.subjects.check_handoff_reply(message.reply, prefixes=self._replies)
                except InvalidReplySubject:
                    log.warning("handoff.unanswerable", job=received.job, decode=received.worker)
                    return
                self._take(received, reply)

    def _abort(self, rid: str) -> None:
        if rid in self._running:
            self._aborted.add(rid)
            self._engine.abort(rid)
            self._running[rid].cancel()

    def _take(self, request: handoff.Prefill, reply: str) -> None:
        admitted = self._admit(request)
        if isinstance(admitted, InferbusError):
            refusal = admitted
            self._answer(reply, handoff.Refused(worker=self._worker, error=refusal.body()))
            log.warning("handoff.refused", job=request.job, decode=request.worker, code=refusal.code)
            self._observer.turned_away(refusal.code)
            return
        task = asyncio.create_task(self._run(request, reply, admitted))
        self._running[request.rid] = task
        # Not in the task itself: one that is aborted before its first step never comes to its `finally`.
        task.add_done_callback(lambda _: self._ended(request.rid, admitted))

    def _ended(self, rid: str, permit: Permit) -> None:
        permit.close()
        self._aborted.discard(rid)
        self._running.pop(rid, None)
        self._engine.abort(rid)

    def _admit(self, request: handoff.Prefill) -> Permit | InferbusError:
        """A permit for this hand-off, or why it is not taken."""
        if self._draining:
            return Draining("this worker is shutting down")
        if request.signature != self._engine.info.signature:
            return NotSupported("the decode worker's engine does not fit this one")
        if request.rid in self._running:
            return PrefillFailed("this request id is running here already")
        priority = request.options.get("priority")
        permit = self._admission.take(class_of(priority if isinstance(priority, int) else None))
        return permit or Overloaded("all slots are busy")

    async def _turn(self, request: handoff.Prefill, reply: str, permit: Permit) -> None:
        """Waits until the engine has room for the prompt; nothing of it is held on either side until then."""
        entering = asyncio.create_task(permit.enter(len(request.token_ids), 0))
        try:
            # It may be its turn at once.
            await asyncio.wait((entering,), timeout=0)
            while not entering.done():
                self._answer(reply, handoff.Queued(worker=self._worker))
                await asyncio.wait((entering,), timeout=handoff.QUEUED_EVERY)
            await entering
        finally:
            entering.cancel()

    async def _run(self, request: handoff.Prefill, reply: str, permit: Permit) -> None:
        described = {"inferbus.job": request.job, "inferbus.decode_worker": request.worker}
        with tracing.span("prefill", kind="server", parent=request.trace, attributes=described) as span:
            await self._serve(request, reply, permit, span)

    async def _serve(self, request: handoff.Prefill, reply: str, permit: Permit, span: tracing.Span) -> None:
        started = time.monotonic()
        bind_contextvars(job=request.job)
        answer: handoff.FromPrefill
        try:
            with tracing.span("admission"):
                await self._turn(request, reply, permit)
            self._answer(reply, handoff.Accepted(worker=self._worker))
            async with asyncio.timeout(request.timeout):
                with tracing.span("compute"):
                    last = await self._compute(request)
            if last is not None and last.transfer is not None:
                tracing.past("transfer", last.transfer.seconds, {"inferbus.bytes": last.transfer.bytes})
            answer = handoff.Done(
                worker=self._worker,
                cached_tokens=(last.cached_tokens or 0) if last is not None else 0,
                seconds=time.monotonic() - started,
                transfer=last.transfer if last is not None else None,
            )
            log.info("handoff.done", **_facts(request, answer))
        except TimeoutError:
            answer = self._failed(request, PrefillFailed("the decode engine never connected for the cache"))
        except InferbusError as problem:
            answer = self._failed(request, problem)
        except asyncio.CancelledError:
            if request.rid not in self._aborted:
                raise
            answer = self._failed(request, PrefillFailed("aborted"))
        except Exception:  # a supervision point: a defect must not take the worker down
            defects.exception("handoff.defect", job=request.job)
            answer = self._failed(request, InternalError("inferbus failed; the worker's log says how"))
        code = answer.error.code if isinstance(answer, handoff.Failed) else None
        transfer = answer.transfer if isinstance(answer, handoff.Done) else None
        if code is not None:
            span.failed(code)
        self._answer(reply, answer)
        self._observer.handed_off(time.monotonic() - started, code, transfer)

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
    """Fields of the log event of a hand-off that is done."""
    facts: dict[str, object] = {"job": request.job, "decode": request.worker, "seconds": done.seconds}
    if done.transfer is not None:
        facts |= {"transfer_seconds": done.transfer.seconds, "transfer_bytes": done.transfer.bytes}
    return facts
