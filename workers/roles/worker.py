"""One worker process from start to exit, whatever its role.

    reach NATS, make the streams   nothing answers, or not allowed    exit 3
    announce that it starts        its id is another worker's         exit 1
    start the engine               it cannot, or a port is taken      announce why, exit 1
    announce, take work            NATS gone for good                 exit 3
                                   NATS refuses the login for long    drain, exit 3
                                   engine does not answer any more    exit 1
                                   another worker took over its id    drain, exit 1
    SIGTERM or SIGINT              drain within the grace period, a second signal hurries; exit 0

SGLang ends this whole process when one of its own processes dies; jobs then
come back by redelivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import structlog
import uvloop

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.fleet import Role
from inferbus.workers import tracing
from inferbus.workers.admission import Admission
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.condition import examine
from inferbus.workers.bus.fleet.registry import Registry, WorkerExists
from inferbus.workers.bus.jetstream import clock as clocks
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import Settings
from inferbus.workers.engine.interface import Engine
from inferbus.workers.engine.launch import launch, model_name
from inferbus.workers.engine.progress import Progress
from inferbus.workers.jobs.observer import Observer
from inferbus.workers.observe import endpoint, logs, metrics
from inferbus.workers.observe.health import Health
from inferbus.workers.observe.metrics import Metrics
from inferbus.workers.roles import description, pod, wiring
from inferbus.workers.roles.budget import budget
from inferbus.workers.roles.description import Description
from inferbus.workers.roles.signals import StopSignals, restored
from inferbus.workers.roles.starting import Starting

log = structlog.get_logger()

EXIT_OK: Final = 0
EXIT_ENGINE: Final = 1
EXIT_NATS: Final = 3

PROVISION_INTERVAL: Final = 4.0
PROVISION_PAUSE: Final = 1.0
"""Seconds between looks at the streams; and after a look that failed."""
EXAMINE_INTERVAL: Final = 30.0
HEALTH_INTERVAL: Final = 5.0
HEALTH_MISSES: Final = 3


def run(
    role: Role, settings: Settings, engine_argv: Sequence[str] = (), *, scripted: Path | None = None
) -> int:
    """Runs a worker until it is told to stop, or cannot go on; returns the process's exit code.

    Args:
        role: prefill, decode or both.
        settings: Resolved.
        engine_argv: SGLang's own flags.
        scripted: A script to replay instead of running SGLang.
    """
    level = "DEBUG" if settings.worker.verbose else "INFO"
    logs.configure(level=level, cache=True, worker=settings.worker.worker, role=role)
    # uvloop is what SGLang runs on as well, and takes a third off a chunk's way.
    traces: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if settings.worker.tracing:
        traces = tracing.exporting(service=f"inferbus-{role}", instance=settings.worker.worker)
    with traces, restored(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Worker(role, settings, engine_argv, scripted).main())


class _Worker:
    def __init__(
        self, role: Role, settings: Settings, engine_argv: Sequence[str], scripted: Path | None
    ) -> None:
        self._role = role
        self._settings = settings
        self._engine_argv = engine_argv
        self._scripted = scripted
        self._signals = StopSignals()
        model = model_name(settings.worker, engine_argv, scripted)
        self._description = Description(role, settings.worker, model)
        self._progress = Progress()
        self._health = Health(lambda: self._progress.text)

    async def main(self) -> int:
        try:
            async with contextlib.AsyncExitStack() as running:
                started = await self._start(running)
                if started is None:
                    return EXIT_ENGINE
                bus = await running.enter_async_context(self._connected())
                return await self._serve(bus, *started)
        except BusUnavailable as error:
            log.error("worker.failed", reason=error.message)
            return EXIT_NATS
        except WorkerExists as error:
            # Not announced: the entry is the other one's.
            log.error("worker.failed", reason=error.message)
            return EXIT_ENGINE

    async def _start(self, running: contextlib.AsyncExitStack) -> tuple[Engine, Metrics | None] | None:
        """The engine, and where metrics go, both ended by `running`; None where it cannot start."""
        settings, progress = self._settings.worker, self._progress
        async with Starting(self._settings, self._description.loading(), progress) as starting:
            try:
                port = await running.enter_async_context(endpoint.serving(settings, self._health))
                if port is not None:
                    metrics.check()
                engine = await launch(self._role, settings, self._engine_argv, self._scripted, progress)
                running.push_async_callback(engine.close)
                starting.loaded(engine.info.model)
                if port is None:
                    return engine, None
                return engine, metrics.serve(port, engine.info, role=self._role)
            except InferbusError as error:
                log.error("worker.failed", reason=error.message)
                log.debug("worker.failed", exc_info=True)
                starting.failed(error.message)
                return None

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Bus]:
        name = f"inferbus {self._role} {self._settings.worker.worker}"
        settings = self._settings.bus
        bus = await Bus.connect(
            # While a refused worker drains, its login may be accepted again: answers can be delivered then.
            settings,
            name=name,
            inbox_prefix=settings.subjects.worker_inboxes,
            keeps_trying=True,
        )
        try:
            yield bus
        finally:
            await bus.close()

    async def _serve(self, bus: Bus, engine: Engine, measured: Metrics | None) -> int:
        settings, info = self._settings.worker, engine.info
        admission = Admission(budget(self._role, info.capacity, settings))
        described = self._description.loaded(info, admission)
        load = functools.partial(description.load, engine, admission)
        async with (
            self._health.watched(),
            clocks.following(bus) as clock,
            Registry(bus, described, settings=settings, load=load) as registry,
        ):
            if measured is not None:
                measured.watch(lambda: registry.info.load, bus, clock)
            program = await wiring.program(
                self._role, bus, engine, registry, admission, self._settings, measured or Observer(), clock
            )
            # After the engine is up: SGLang takes SIGTERM for itself while it starts.
            self._signals.catch()
            replies = wiring.job_settings(self._settings, bus.subjects).replies
            # Before it takes anything: a server that does not answer for a moment fails this start.
            async with (
                description.service(bus, described, program, replies=replies),
                pod.marked(settings.pod, lambda: admission.busy),
            ):
                await program.start()
                await registry.announce("ready")
                log.info("worker.ready", model=info.model, slots=admission.budget.slots, engine=info.name)
                self._health.serving(lambda: bus.connected)
                async with asyncio.TaskGroup() as group:
                    provisioning = group.create_task(self._keep_streams(bus, info.model))
                    examining = group.create_task(self._examine(bus, registry, measured))
                    code = await self._until_stopped(bus, engine, registry)
                    provisioning.cancel()
                    examining.cancel()
                self._health.draining()
            if code == EXIT_OK or registry.replaced.is_set() or bus.refused.is_set():
                await registry.announce("draining")
                log.info("worker.draining", busy=admission.busy)
                await program.drain(grace=settings.grace, hurry=self._signals.hurry)
                try:
                    await bus.flush()
                except BusUnavailable as error:
                    # What must not be lost is confirmed one by one, and comes back where it was not.
                    log.warning("drain.not_flushed", reason=error.message)
        log.info("worker.stopped", code=code)
        return code

    async def _keep_streams(self, bus: Bus, model: str) -> None:
        """Makes streams that are gone again, every few seconds: somebody removed them, or their server.

        Streams in memory do not outlive their server, so it looks after every reconnection as well.
        """
        back = asyncio.Event()
        bus.on_change(lambda connected: back.set() if connected else None)
        told: str | None = None
        while True:
            pause = PROVISION_PAUSE if told else PROVISION_INTERVAL
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.75, 1.25)):  # noqa: S311
                    await back.wait()
            back.clear()
            if not bus.connected:
                continue
            try:
                await provision(bus, self._settings.streams, model=model)
                told = None
            except BusUnavailable as error:
                if error.message != told:
                    log.warning("streams.not_provisioned", reason=error.message)
                told = error.message

    async def _examine(self, bus: Bus, registry: Registry, measured: Metrics | None) -> None:
        """Logs once what is wrong with the fleet, and has metrics show how full its streams are."""
        told: set[str] = set()
        while self._role != "prefill":
            condition = await examine(bus, registry.workers())
            if measured is not None:
                measured.room = condition.room
            # The numbers of a stream that fills change all the time.
            lines = {each.text.partition(":")[0]: each.text for each in condition.troubles}
            for what in lines.keys() - told:
                log.warning("fleet.trouble", reason=lines[what])
            told = set(lines)
            await asyncio.sleep(EXAMINE_INTERVAL)

    async def _until_stopped(self, bus: Bus, engine: Engine, registry: Registry) -> int:
        """Waits for a signal, the end of the connection or of the login, a lost engine, or a successor."""
        ends = {
            asyncio.create_task(self._signals.stop.wait()): EXIT_OK,
            asyncio.create_task(bus.closed.wait()): EXIT_NATS,
            asyncio.create_task(bus.refused.wait()): EXIT_NATS,
            asyncio.create_task(self._engine_lost(engine)): EXIT_ENGINE,
            asyncio.create_task(registry.replaced.wait()): EXIT_ENGINE,
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return min(ends[end] for end in done)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _engine_lost(self, engine: Engine) -> None:
        misses = 0
        while misses < HEALTH_MISSES:
            await asyncio.sleep(HEALTH_INTERVAL)
            healthy = await engine.healthy()
            misses = 0 if healthy else misses + 1
            self._health.engine_answered(healthy)
        self._health.engine_lost()
        log.error("engine.lost")
