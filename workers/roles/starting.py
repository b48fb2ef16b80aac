"""Announces a worker while its engine loads.

Loading takes minutes, and the main thread with its event loop all that time: SGLang wants both. So this runs
in a thread of its own, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Final

import msgspec
import structlog
import uvloop

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet import registry
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.config import Settings
from inferbus.workers.engine.progress import Progress
from inferbus.workers.observe import defects

log = structlog.get_logger()

RETRY_PAUSE: Final = 2.0


class Starting:
    """A worker's announcement while the block runs: `starting`, and what its engine does.

    Entering makes the streams, and takes the worker's id.

    Args:
        settings: Of the worker.
        info: Its announcement.
        progress: Of its engine.

    Raises:
        BusUnavailable: From entering: no connection, no streams, or not permitted.
        WorkerExists: From entering: another process has this worker's id.
    """

    def __init__(self, settings: Settings, info: WorkerInfo, progress: Progress) -> None:
        self._settings = settings
        self._info = info
        self._progress = progress
        self._announced: Future[None] = Future()
        self._last: Callable[[Bus], None] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="starting", daemon=True)

    def failed(self, reason: str) -> None:
        """Makes the reason of a failed start the last announcement, for operators to find."""
        info = msgspec.structs.replace(self._info, state="failed", reason=reason)
        self._last = lambda bus: registry.announce(bus, info)

    def loaded(self, model: str) -> None:
        """The engine is up; its model's name was not known until now where the announcement has another."""
        if model != self._info.model:
            self._last = lambda bus: registry.withdraw(bus, self._info)

    async def __aenter__(self) -> Starting:
        self._thread.start()
        await asyncio.wrap_future(self._announced)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        await asyncio.to_thread(self._thread.join)

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        ended = asyncio.create_task(asyncio.to_thread(self._ended.wait))
        while not ended.done():
            try:
                await self._announce(ended)
            except InferbusError as error:
                if not self._announced.done():
                    self._announced.set_exception(error)
                    self._ended.set()
                    break
                # The engine loads on: the worker connects again once it is up.
                log.warning("starting.not_announced", reason=error.message)
                await asyncio.wait({ended}, timeout=RETRY_PAUSE)
            except Exception as error:  # a supervision point: the other thread waits for this one
                if self._announced.done():
                    defects.exception("starting.defect")
                else:
                    self._announced.set_exception(error)
                    self._ended.set()
                break
        await ended

    async def _announce(self, ended: asyncio.Task[bool]) -> None:
        info, worker = self._info, self._settings.worker
        settings, name = self._settings.bus, f"inferbus {info.role} {worker.worker} starting"
        bus = await Bus.connect(settings, name=name, inbox_prefix=settings.subjects.worker_inboxes)
        try:
            await provision(bus, self._settings.streams)
            async with registry.holding(bus, info):
                if not self._announced.done():
                    self._announced.set_result(None)
                while not ended.done():
                    await asyncio.wait({ended}, timeout=worker.announce_interval)
                    if bus.closed.is_set():
                        raise BusUnavailable(bus.failure or "the connection is closed")
                    registry.announce(bus, msgspec.structs.replace(info, reason=self._progress.text))
                if self._last is not None:
                    self._last(bus)
        finally:
            await bus.close()
