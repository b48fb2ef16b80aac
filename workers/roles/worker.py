"""One worker process from start to exit, whatever its role.

    reach NATS, make the streams   nothing answers, or not allowed    exit 3
    start the engine               it cannot, or a port is taken      announce why, exit 1
    announce, take work            NATS gone for good                 exit 3
                                   engine does not answer any more    exit 1
    SIGTERM or SIGINT              drain within the grace period, a second signal hurries; exit 0

SGLang ends this whole process when one of its own processes dies; jobs then
come back by redelivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

import structlog
import uvloop

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.fleet import Role
from inferbus.workers.admission import Admission
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.registry import Registry
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import Settings
from inferbus.workers.engine.interface import Engine
from inferbus.workers.engine.launch import launch
from inferbus.workers.jobs.observer import Observer
from inferbus.workers.observe import logs, metrics
from inferbus.workers.observe.metrics import Metrics
from inferbus.workers.roles import description, wiring
from inferbus.workers.roles.budget import budget
from inferbus.workers.roles.description import Description
from inferbus.workers.roles.signals import StopSignals, restored

log = structlog.get_logger()

EXIT_OK: Final = 0
EXIT_ENGINE: Final = 1
EXIT_NATS: Final = 3

PROVISION_PAUSE: Final = 1.0
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
    logs.configure(cache=True, worker=settings.worker.worker, role=role)
    # uvloop is what SGLang runs on as well, and takes a third off a chunk's way.
    with restored(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
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
        self._description = Description(role, settings.worker)

    async def main(self) -> int:
        try:
            async with self._connected() as bus:
                await provision(bus, self._settings.streams)
        except BusUnavailable as error:
            log.error("worker.failed", reason=error.message)
            return EXIT_NATS
        # The engine takes the event loop for itself while it loads, too long for a connection to be kept.
        try:
            metrics.check(self._settings.worker)
            engine = await launch(self._role, self._settings.worker, self._engine_argv, self._scripted)
        except metrics.Unserved as error:
            return await self._unserved(error)
        except InferbusError as error:
            log.exception("worker.failed", reason=error.message)
            await self._announce_failure(error.message)
            return EXIT_ENGINE
        try:
            async with (
                metrics.serving(self._settings.worker, engine.info, role=self._role) as measured,
                self._connected() as bus,
            ):
                return await self._serve(bus, engine, measured)
        except BusUnavailable as error:
            log.error("worker.failed", reason=error.message)
            return EXIT_NATS
        except metrics.Unserved as error:
            return await self._unserved(error)
        finally:
            await engine.close()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Bus]:
        name = f"inferbus {self._role} {self._settings.worker.worker}"
        settings = self._settings.bus
        bus = await Bus.connect(settings, name=name, inbox_prefix=settings.subjects.worker_inboxes)
        try:
            yield bus
        finally:
            await bus.close()

    async def _serve(self, bus: Bus, engine: Engine, measured: Metrics | None) -> int:
        settings, info = self._settings.worker, engine.info
        admission = Admission(budget(self._role, info.capacity, settings))
        described = self._description.starting(info, admission)
        load = functools.partial(description.load, engine, admission)
        async with Registry(bus, described, settings=settings, load=load) as registry:
            if measured is not None:
                measured.watch(lambda: registry.info.load, bus)
            program = await wiring.program(
                self._role, bus, engine, registry, admission, self._settings, measured or Observer()
            )
            # After the engine is up: SGLang takes SIGTERM for itself while it starts.
            self._signals.catch()
            replies = wiring.job_settings(self._settings, bus.subjects).replies
            # Before it takes anything: a server that does not answer for a moment fails this start.
            async with description.service(bus, described, program, replies=replies):
                await program.start()
                await registry.announce("ready")
                log.info("worker.ready", model=info.model, slots=admission.budget.slots, engine=info.name)
                async with asyncio.TaskGroup() as group:
                    provisioning = group.create_task(self._provision_again(bus))
                    code = await self._until_stopped(bus, engine)
                    provisioning.cancel()
            if code == EXIT_OK:
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

    async def _provision_again(self, bus: Bus) -> None:
        """After every reconnection: streams in memory do not outlive their server."""
        back = asyncio.Event()
        bus.on_change(lambda connected: back.set() if connected else None)
        while True:
            await back.wait()
            back.clear()
            try:
                await provision(bus, self._settings.streams)
            except BusUnavailable as error:
                log.warning("streams.not_provisioned", reason=error.message)
                await asyncio.sleep(PROVISION_PAUSE)
                back.set()

    async def _until_stopped(self, bus: Bus, engine: Engine) -> int:
        """Waits for a signal, the end of the connection, or an engine that answers no more."""
        ends = {
            asyncio.create_task(self._signals.stop.wait()): EXIT_OK,
            asyncio.ensure_future(bus.closed.wait()): EXIT_NATS,
            asyncio.create_task(self._engine_lost(engine)): EXIT_ENGINE,
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
            misses = 0 if await engine.healthy() else misses + 1
        log.error("engine.lost")

    async def _unserved(self, error: metrics.Unserved) -> int:
        log.error("worker.failed", reason=error.message)
        await self._announce_failure(error.message)
        return EXIT_ENGINE

    async def _announce_failure(self, reason: str) -> None:
        """Leaves the reason in the registry, where operators look for this worker."""
        with contextlib.suppress(BusUnavailable):
            async with self._connected() as bus:
                await Registry.announce_once(bus, self._description.failed(reason))
