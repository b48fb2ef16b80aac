"""The decode program, and `both`: takes requests and jobs, and answers them.

It owns a job from end to end. Beside prefill workers it is the one that picks
one of them, draws the room and starts both legs; as `both` it runs prompt and
answer on its own engine. All else is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from inferbus.schemas.errors import Draining
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.fleet.services import Endpoint
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.runner import AttemptRunner
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.jobs.storage import Storage
from inferbus.workers.roles.alive import Alive
from inferbus.workers.roles.intake import JobIntake, LiveIntake, Tasks
from inferbus.workers.roles.prefill_gate import PrefillGate
from inferbus.workers.roles.program import finished_within
from inferbus.workers.roles.reads import QUEUE_GROUP as READERS
from inferbus.workers.roles.reads import Reads
from inferbus.workers.roles.removals import Removals

log = structlog.get_logger()


class DecodeProgram:
    """Answers the requests and jobs of one model; `wiring.decode` builds it.

    Args:
        bus: Connected.
        settings: Of this worker.
        endpoints: What it serves.
        model: Its name.
        runner: Makes the attempts.
        cancels: End them.
        live: Takes live requests.
        jobs: Takes durable jobs.
        tasks: What runs.
        gate: Pauses jobs while there is no prefill worker; None for `both`.

    Attributes:
        endpoints: See above.
    """

    def __init__(
        self,
        bus: Bus,
        settings: JobSettings,
        endpoints: Sequence[Endpoint],
        model: str,
        *,
        runner: AttemptRunner,
        cancels: Cancels,
        live: LiveIntake,
        jobs: JobIntake,
        tasks: Tasks,
        gate: PrefillGate | None,
    ) -> None:
        self.endpoints = endpoints
        self._bus = bus
        self._model = model
        self._settings = settings
        self._runner = runner
        self._cancels = cancels
        self._live = live
        self._jobs = jobs
        self._tasks = tasks
        self._gate = gate
        self._intakes: list[asyncio.Task[None]] = []
        self._reads = Reads(bus, settings, tasks)
        self._alive = Alive(bus, settings, runner)
        self._removals = Removals(bus, settings, tasks)
        self._watching_gate: asyncio.Task[None] | None = None
        self._forget_connection: Callable[[], None] = lambda: None

    @property
    def storage(self) -> Storage:
        """Where finished answers may have to wait."""
        return self._jobs.storage

    async def start(self) -> None:
        """Begins to take requests."""
        await self._bus.subscribe(self._settings.subjects.all("cancel"), self._cancel_arrived)
        await self._bus.subscribe(self._settings.subjects.all("alive"), self._alive.asked)
        self._forget_connection = self._bus.on_change(self._connection_changed)
        if self._gate is not None:
            await self._gate.update()
            self._watching_gate = asyncio.create_task(self._gate.run())
        await self._bus.subscribe(self._settings.subjects.all("read"), self._reads.asked, queue=READERS)
        await self._bus.subscribe(self._settings.subjects.all("remove"), self._removals.asked, queue=READERS)
        passed = self._settings.subjects.passed(self._model, self._settings.worker, "*")
        await self._bus.subscribe(passed, self._live.passed_on)
        await self._live.join()
        self._intakes = [asyncio.create_task(self._live.run()), asyncio.create_task(self._jobs.run())]

    async def drain(self, *, grace: float, hurry: asyncio.Event) -> None:
        """Takes nothing more, lets what runs finish within `grace` seconds, hands back the rest."""
        self._live.drain()
        if self._watching_gate is not None:
            self._watching_gate.cancel()
        await self._jobs.drain()
        await asyncio.gather(*self._intakes)
        if not await finished_within(self._tasks.settled(), grace=grace, hurry=hurry):
            self.storage.abandon()
            left = self._runner.scopes.end_all(Draining("this worker is shutting down"))
            log.warning("drain.handing_back", running=left)
            await self._tasks.settled()
        # Nothing is left that a missed cancel could end; no task is started for one after this.
        self._forget_connection()
        await self._tasks.settled()

    def _cancel_arrived(self, message: Message) -> None:
        # See `cancel.hits`: no acknowledgement is a cancel.
        if not message.data and not message.forwarded:
            self._cancels.arrived(message.subject, message.headers)

    def _connection_changed(self, connected: bool) -> None:
        if connected:
            self._tasks.start(self._cancels.catch_up())
