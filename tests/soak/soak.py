"""One soak, from its first job to its verdict."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.client import Client
from inferbus.workers.config import StreamSettings
from tests.soak import report
from tests.soak.audit import Audit
from tests.soak.chaos import Chaos
from tests.soak.fleet import PLACES, Fleet
from tests.soak.jobs import Orders
from tests.soak.ledger import Ledger, Problem
from tests.soak.traffic import Traffic, clients
from tests.support.eventually import eventually

STARTING: Final = 60.0
SETTLING: Final = 180.0
"""Seconds for everything to come to its end once nothing is broken any more: a job that always fails is tried
for half a minute, and one that kills its workers for as long."""

READING: Final = 120.0
"""Seconds for those who read late."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one soak.

    Attributes:
        seconds: For which jobs are handed in and things are broken.
        seed: Of everything that is left to chance.
        rate: Jobs a second, at most.
    """

    seconds: float = 600.0
    seed: int = msgspec.field(default_factory=lambda: secrets.randbelow(1_000_000))
    rate: float = 200.0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Settings:
        """As `SOAK_SECONDS`, `SOAK_SEED` and `SOAK_RATE` say."""
        variables = {name: f"SOAK_{name.upper()}" for name in cls.__struct_fields__}
        given = {name: environment[key] for name, key in variables.items() if environment.get(key)}
        return msgspec.convert(given, cls, strict=False)


class Soak:
    """See the module.

    Args:
        settings: How long, how much, and from which seed.
        console: For the tables.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._directory = Path(tempfile.mkdtemp(prefix="inferbus-soak-"))
        self._ledger = Ledger()
        self._fleet = Fleet(self._directory, settings.seed)
        self._chaos = Chaos(self._fleet, settings.seed)

    async def run(self) -> list[Problem]:
        """Runs it, prints what came of it, and returns what is not as it must be."""
        settings = self._settings
        self._say(f"soak of {settings.seconds:g} s, SOAK_SEED={settings.seed}, SOAK_RATE={settings.rate:g}")
        async with self._fleet as fleet, clients(fleet.server.url) as users:
            client = next(iter(users.values()))
            await provision(client.bus, StreamSettings())
            for place in fleet.places:
                place.open()
            await self._at_rest(client, within=STARTING)
            traffic = Traffic(users, Orders(settings.seed), self._ledger)
            await asyncio.gather(
                traffic.run(settings.seconds, settings.rate), self._chaos.run(settings.seconds)
            )
            self._say(f"{len(self._ledger.submissions):,} jobs were accepted; waiting for their ends")
            await self._within(SETTLING, traffic.settled(), "somebody still waits for something")
            await self._at_rest(client, within=SETTLING)
            await self._within(READING, traffic.read_late(), "somebody still reads")
            audit = Audit(client.bus, self._ledger, fleet)
            await audit.reconcile()
        audit.check_workers()
        report.show(self._console, ledger=self._ledger, audit=audit, chaos=self._chaos, fleet=fleet)
        self._conclude()
        return self._ledger.problems

    async def _at_rest(self, client: Client, *, within: float) -> None:
        """Waits until no job is to be given out or acknowledged, and an idle worker is in every place.

        Not until the queue is empty: a server that is killed may keep a job that it knows as acknowledged,
        and gives it to nobody. Whether every job has its result is looked at afterwards.
        """
        seen = ""

        async def at_rest() -> bool:
            nonlocal seen
            try:
                consumers = await browse.consumers(client.bus, layout.JOBS)
                queued = sum(each["num_pending"] + each["num_ack_pending"] for each in consumers)
                workers = await client.workers()
            except BusUnavailable as error:
                seen = error.message
                return False
            # One that was killed stays listed until its announcement expires.
            busy = {
                each.worker: each.load.busy + each.load.running for each in workers if each.state == "ready"
            }
            seen = f"{queued} jobs in the queue; workers, and how busy they are: {busy}"
            return queued == 0 and busy == dict.fromkeys(self._fleet.names, 0) and len(busy) == PLACES

        try:
            await eventually(at_rest, within=within)
        except AssertionError:
            self._ledger.wrong("lost", f"not at rest after {within:g} s: {seen}")

    async def _within(self, seconds: float, work: Awaitable[None], problem: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            self._ledger.wrong("lost", f"{problem} after {seconds:g} s")

    def _conclude(self) -> None:
        problems, seed = self._ledger.problems, self._settings.seed
        if not problems:
            shutil.rmtree(self._directory)
            self._say(f"[green]zero lost, zero doubled[/], seed {seed}")
            return
        jobs = sorted({problem.job for problem in problems if problem.job is not None})
        self._say(f"[red]{len(problems)} problems[/] with SOAK_SEED={seed}: {', '.join(jobs)}")
        self._say(f"the logs of all workers are in {self._directory}")

    def _say(self, markup: str) -> None:
        self._console.print(markup, highlight=False, soft_wrap=True)
