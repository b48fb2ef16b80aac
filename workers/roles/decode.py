"""The decode program, and `both`: takes requests and jobs, and answers them.

It owns a job from end to end. Beside prefill workers it is the one that picks
one of them, draws the room and starts both legs; as `both` it runs prompt and
answer on its own engine, and nothing else differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from inferbus.schemas import headers
from inferbus.schemas.errors import CallerError, Draining, InferbusError
from inferbus.schemas.subjects import CLASSES
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.fleet.registry import Registry
from inferbus.workers.bus.fleet.services import Endpoint
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.config import WorkerSettings
from inferbus.workers.engine.interface import Engine
from inferbus.workers.jobs.attempt import Attempts, Outcome
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.job import Envelope
from inferbus.workers.jobs.reply import Reply, Served, error_body
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.observe.metrics import Metrics
from inferbus.workers.pairing.handoff import Handoffs
from inferbus.workers.pairing.legs import Alone, Paired, RunLeg
from inferbus.workers.pairing.picker import Picker
from inferbus.workers.roles.answering import Answering
from inferbus.workers.roles.handoff_transport import BusHandoffTransport
from inferbus.workers.roles.intake import JobIntake, LiveIntake, Subscription, Tasks
from inferbus.workers.roles.prefill_gate import PrefillGate
from inferbus.workers.roles.program import finished_within
from inferbus.workers.roles.slots import Slots

log = structlog.get_logger()

ACCEPT_TIMEOUT: Final = 5.0
"""Seconds within which a prefill worker must say that it takes a hand-off."""

QUEUE_GROUP: Final = "workers"


class Decode:
    """Answers the requests and jobs of one model.

    Args:
        bus: Connected.
        engine: Of the role decode or both.
        registry: Knows the prefill workers; None for `both`.
        queue: Where durable jobs are pulled from.
        settings: Of this worker.
        slots: Bound what it takes.
        window: Seconds within which a second submission of a job is dropped.
        metrics: Count what ends here.
    """

    def __init__(
        self,
        bus: Bus,
        engine: Engine,
        registry: Registry | None,
        queue: JobQueue,
        *,
        settings: WorkerSettings,
        slots: Slots,
        window: float,
        metrics: Metrics | None = None,
    ) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._served = Served(worker=settings.worker)
        self._tasks = Tasks()
        self._running: list[asyncio.Task[None]] = []
        self._forget_connection: Callable[[], None] = lambda: None
        self._supply: PrefillGate | None = None
        self._supplying: asyncio.Task[None] | None = None
        self._attempts = Attempts(
            self._jetstream,
            Answering(engine, self._legs(registry, queue)),
            worker=settings.worker,
            probe_every=settings.client_gone_every,
            patience=settings.deadline,
        )
        self._cancels = Cancels(self._jetstream, self._attempts.scopes, bus.subjects)
        deliveries = Deliveries(
            self._jetstream,
            self._attempts,
            self._cancels,
            subjects=bus.subjects,
            policy=RetryPolicy(attempts=settings.max_attempts),
            replies=settings.reply_prefixes,
            worker=settings.worker,
            window=window,
        )
        if metrics is not None:
            deliveries.settled = metrics.settled
        model = engine.info.model
        self.endpoints = (
            Endpoint("requests", bus.subjects.requests_of(model), queue=QUEUE_GROUP),
            *(
                Endpoint(name, bus.subjects.jobs_of(model, name))
                for name in CLASSES
                if name in settings.classes
            ),
        )
        self._attempts.ended = self._count
        self._live = LiveIntake(
            self._join,
            self._attempts,
            self._tasks,
            slots,
            subjects=bus.subjects,
            replies=settings.reply_prefixes,
            refuse=self._refuse,
        )
        self._jobs = JobIntake(queue, deliveries, self._tasks, slots)

    def slots_changed(self) -> None:
        """To be called whenever a slot was taken or freed."""
        self._live.slots_changed()

    async def start(self) -> None:
        """Begins to take requests."""
        self._attempts.probe = self._bus.probe_inbox(self._attempts.gone).subject
        await self._bus.subscribe(self._bus.subjects.all("cancel"), self._cancel_arrived)
        await self._bus.subscribe(self._bus.subjects.all("alive"), self._asked)
        self._forget_connection = self._bus.on_change(self._connection_changed)
        if self._supply is not None:
            await self._supply.look()
            self._supplying = asyncio.create_task(self._supply.run())
        await self._live.join()
        self._running = [asyncio.create_task(self._live.run()), asyncio.create_task(self._jobs.run())]

    async def drain(self, *, grace: float, hurry: asyncio.Event) -> None:
        """Takes nothing more, lets what runs finish within `grace` seconds, hands back the rest."""
        self._live.drain()
        if self._supplying is not None:
            self._supplying.cancel()
        await self._jobs.drain()
        await asyncio.gather(*self._running)
        if not await finished_within(self._tasks.settled(), grace=grace, hurry=hurry):
            left = self._attempts.scopes.end_all(Draining("this worker is shutting down"))
            log.warning("drain.handing_back", running=left)
            await self._tasks.settled()
        # Cancels that came by meanwhile are of no concern any more; nothing is begun for them after this.
        self._forget_connection()
        await self._tasks.settled()

    def _legs(self, registry: Registry | None, queue: JobQueue) -> RunLeg:
        signature = self._engine.info.signature
        if registry is None:
            return Alone(self._engine)
        if signature is None:
            raise ValueError("a decode engine needs a signature")
        handoffs = Handoffs(
            BusHandoffTransport(self._bus),
            worker=self._settings.worker,
            signature=signature,
            accept_timeout=ACCEPT_TIMEOUT,
            timeout=self._settings.prefill_timeout,
            lost=registry.drop,
        )
        picker = Picker(signature, registry.workers)
        self._supply = PrefillGate(queue, registry, picker)
        return Paired(self._engine, picker, handoffs)

    async def _join(self, callback: Callback) -> Subscription:
        """All kinds: a kind that this model cannot serve deserves a better answer than silence."""
        return await self._bus.subscribe(self.endpoints[0].subject, callback, queue=QUEUE_GROUP)

    def _count(self, outcome: Outcome, seconds: float) -> None:
        name = outcome.job.job_class or "requests"
        endpoint = next(each for each in self.endpoints if each.name == name)
        endpoint.record(seconds, outcome.error.code if outcome.error else None)
        if self._metrics is not None:
            self._metrics.ended(outcome, seconds)

    def _cancel_arrived(self, message: Message) -> None:
        self._cancels.arrived(message.subject, message.headers)

    def _asked(self, message: Message) -> None:
        """Somebody has not heard of a job for a while: the worker that has it says so."""
        subjects = self._bus.subjects
        try:
            key = subjects.parse_key(message.subject, "alive")
            reply = subjects.check_reply(
                message.reply, owner=key.owner, prefixes=self._settings.reply_prefixes
            )
        except CallerError as error:
            log.warning("alive.ignored", code=error.code)
            return
        if self._attempts.scopes.find(key):
            self._bus.send(reply, b"", {headers.WORKER: self._settings.worker})

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._tasks.start(self._cancels.catch_up())

    def _refuse(self, envelope: Envelope, error: InferbusError) -> None:
        reply = Reply(self._jetstream, envelope.job, self._served)
        reply.whole(error_body(envelope.job, error))
        reply.end("error")
        if self._metrics is not None:
            self._metrics.refused(envelope.job, error)
