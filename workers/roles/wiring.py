"""Builds the programs from their parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects
from inferbus.workers.admission import Admission
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Callback
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.bus.fleet.registry import Registry
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.clock import ServerClock
from inferbus.workers.bus.jetstream.objects import Objects
from inferbus.workers.bus.jetstream.shares import ResultShares
from inferbus.workers.bus.queue.consumers import job_queue
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.config import Settings
from inferbus.workers.engine.interface import Engine
from inferbus.workers.jobs.attempt import Envelope
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.listeners import Listeners
from inferbus.workers.jobs.observer import Observer, Observers
from inferbus.workers.jobs.retained import RetainedAnswers
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.pairing.handoff import Handoffs
from inferbus.workers.pairing.legs import Alone, Paired, RunLeg
from inferbus.workers.pairing.picker import Picker
from inferbus.workers.roles import endpoints
from inferbus.workers.roles.answering import Answering
from inferbus.workers.roles.bounded_results import BoundedResults
from inferbus.workers.roles.budget import paired_window
from inferbus.workers.roles.decode import DecodeProgram
from inferbus.workers.roles.handoff_transport import BusHandoffTransport
from inferbus.workers.roles.intake import JobIntake, LiveIntake, Tasks
from inferbus.workers.roles.peers import Peers
from inferbus.workers.roles.prefill import PrefillProgram
from inferbus.workers.roles.prefill_gate import PrefillGate
from inferbus.workers.roles.program import Program

ACCEPT_TIMEOUT: Final = 5.0
"""Seconds within which a prefill worker must accept a hand-off, or say again that it waits there."""


def job_settings(settings: Settings, subjects: Subjects) -> JobSettings:
    """The part of a worker's settings that its jobs need."""
    given, own = settings.worker.reply_prefixes, f"{settings.bus.inbox_prefix}."
    return JobSettings(
        worker=settings.worker.worker,
        subjects=subjects,
        # Hand-offs are answered in the inboxes of the worker's own fleet.
        replies=given if own in given else (*given, own),
        policy=RetryPolicy(attempts=settings.worker.max_attempts),
        window=settings.streams.duplicate_window,
        patience=settings.worker.deadline,
    )


async def program(
    role: Role,
    bus: Bus,
    engine: Engine,
    registry: Registry,
    admission: Admission,
    settings: Settings,
    observer: Observer,
    clock: ServerClock,
) -> Program:
    """The program of a role.

    Args:
        role: prefill, decode or both.
        bus: Connected.
        engine: Of that role.
        registry: Knows the prefill workers.
        admission: Bounds what it takes.
        settings: Of this worker.
        observer: Told what ends here.
        clock: By which requests expire.

    Raises:
        BusUnavailable: The consumers of jobs cannot be made.
    """
    if role == "prefill":
        return prefill(bus, engine, admission, job_settings(settings, bus.subjects), observer)
    queue = await job_queue(bus, engine.info.model, settings.worker)
    prefills = registry if role == "decode" else None
    peers = Peers(registry.workers)
    program = decode(bus, engine, prefills, queue, admission, settings, observer, clock, peers)
    program.storage.on_change(lambda: registry.note(program.storage.full))
    return program


def prefill(
    bus: Bus, engine: Engine, admission: Admission, settings: JobSettings, observer: Observer
) -> PrefillProgram:
    """The prefill program.

    Args:
        bus: Connected.
        engine: Of the role prefill.
        admission: Bounds what it takes.
        settings: Of this worker.
        observer: Told what ends here.
    """
    served = endpoints.of_prefill(bus.subjects, engine.info.model, settings.worker)
    observers = Observers(observer, endpoints.EndpointFigures(served))
    return PrefillProgram(bus, engine, admission, settings, served, observer=observers)


def decode(
    bus: Bus,
    engine: Engine,
    registry: Registry | None,
    queue: JobQueue,
    admission: Admission,
    settings: Settings,
    observer: Observer,
    clock: ServerClock,
    peers: Peers,
) -> DecodeProgram:
    """The decode program, and `both`.

    Args:
        bus: Connected.
        engine: Of the role decode or both.
        registry: Knows the prefill workers; None for `both`.
        queue: Where durable jobs are pulled from.
        admission: Bounds what it takes.
        settings: Of this worker.
        observer: Told what ends here.
        clock: By which requests expire.
        peers: The workers of the model.
    """
    ours, worker = job_settings(settings, bus.subjects), settings.worker
    served = endpoints.of_decode(bus.subjects, engine.info.model, worker)
    tasks = Tasks()
    bounded = BoundedResults(ResultShares(bus, settings.streams.owner_results), tasks)
    observers = Observers(observer, endpoints.EndpointFigures(served), bounded)
    run, gate = _legs(bus, engine, registry, queue, admission, settings)
    broker = JetStream(bus)
    listeners = Listeners(lambda gone: _probe(bus, gone), every=worker.client_gone_every)
    answering = Answering(engine, run, peers)
    retained = RetainedAnswers(broker, settled=lambda: bus.settled)
    runner = AttemptRunner(
        broker, answering, ours, listeners=listeners, observer=observers, retained=retained, now=clock.now
    )
    cancels = Cancels(broker, runner.scopes, bus.subjects)
    deliveries = Deliveries(broker, runner, cancels, ours, observer=observers, objects=Objects(bus))

    async def join(callback: Callback) -> Subscription:
        return await bus.subscribe(served[0].subject, callback, queue=served[0].queue)

    def pass_on(envelope: Envelope, worker: str) -> None:
        attempt = envelope.attempt
        subject = bus.subjects.passed(attempt.model, worker, attempt.kind)
        bus.send(subject, envelope.body, envelope.headers, reply=attempt.reply)

    return DecodeProgram(
        bus,
        ours,
        served,
        engine.info.model,
        runner=runner,
        cancels=cancels,
        live=LiveIntake(join, runner, tasks, admission, ours, now=clock.now, pass_on=pass_on),
        jobs=JobIntake(queue, deliveries, tasks, admission, ours),
        tasks=tasks,
        gate=gate,
    )


def _probe(bus: Bus, gone: Callable[[str], None]) -> str:
    """Where the server reports messages that reach nobody.

    After a server has come back, callers may just not have connected again.
    """
    return bus.probe_inbox(lambda reply: gone(reply) if bus.settled else None).subject


def _legs(
    bus: Bus,
    engine: Engine,
    registry: Registry | None,
    queue: JobQueue,
    admission: Admission,
    settings: Settings,
) -> tuple[RunLeg, PrefillGate | None]:
    """How legs run, and what pauses the queue while none can."""
    if registry is None:
        return Alone(engine), None
    signature = engine.info.signature
    if signature is None:
        raise ValueError("a decode engine needs a signature")
    handoffs = Handoffs(
        BusHandoffTransport(bus),
        worker=settings.worker.worker,
        signature=signature,
        accept_timeout=ACCEPT_TIMEOUT,
        timeout=settings.worker.prefill_timeout,
        lost=registry.drop,
    )
    picker = Picker(signature, registry.workers)

    def follow_prefill() -> None:
        # Without any, requests are still admitted: they fail at once, and say why.
        if window := paired_window(picker.fitting):
            admission.set_window(window)

    if not settings.worker.prompt_window:
        registry.on_change(follow_prefill)
        follow_prefill()
    return Paired(engine, picker, handoffs), PrefillGate(queue, registry, picker)
