"""What each user of deploy/nats/users.conf can do to others, row by row of the table in SECURITY.md.

The victim is the owner `globex`; the attacker is the client `acme`, who may do whatever that user may.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client as Connection

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.registry import Roster
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import StreamSettings
from inferbus.workers.stack.processes import Children
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet
from tests.support.users import OWNERS, WORKER, configuration, login

VICTIM = OWNERS[1]
SCRIPT = "[[rules]]\nuser = 'slow'\nlength = 100\ndelay = 0.02\n"
QUICK = {"token_ids": [5], "max_tokens": 3}
SLOW = {"token_ids": [5], "user": "slow"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Lab:
    """A server with the shipped users, a second client, and a worker."""

    def __init__(self, server: NatsServer, bus: Bus) -> None:
        self.server = server
        self.bus = bus
        self.jetstream = JetStream(bus)

    @asynccontextmanager
    async def victim(self) -> AsyncIterator[Client]:
        async with Client.connect(login(self.server, VICTIM), owner=VICTIM) as client:
            yield client

    @asynccontextmanager
    async def actor(self, user: str) -> AsyncIterator[Actor]:
        refusals: list[str] = []

        async def note(error: Exception) -> None:
            refusals.append(str(error))

        connection = await nats.connect(
            self.server.url, user=user, password=user, inbox_prefix=f"_INBOX_{user}".encode(), error_cb=note
        )
        try:
            yield Actor(connection, refusals)
        finally:
            await connection.close()


class Actor:
    """Somebody with one user's rights and no manners."""

    def __init__(self, connection: Connection, refusals: list[str]) -> None:
        self.connection = connection
        self._refusals = refusals

    async def may_publish(self, subject: str, data: bytes = b"", **options: Any) -> bool:
        self._refusals.clear()
        await self.connection.publish(subject, data, **options)
        await self._settled()
        return not self._refusals

    async def may_subscribe(self, subject: str) -> bool:
        self._refusals.clear()
        subscription = await self.connection.subscribe(subject)
        await self._settled()
        allowed = not self._refusals
        if allowed:
            await subscription.unsubscribe()
        return allowed

    async def _settled(self) -> None:
        """The server has said what it refuses. nats-py's first PING may overtake what is to be refused."""
        await self.connection.flush()
        await self.connection.flush()

    async def has_acknowledged_to(self, subject: str, *, data: bytes = b"{}") -> None:
        """Has the server acknowledge a job of one's own on a subject of somebody else's."""
        assert await self.may_publish(f"infer.jobs.{MODEL}.batch.acme.tokens", data, reply=subject)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    directory = tmp_path_factory.mktemp("attacks")
    async with (
        NatsServer(directory / "nats", sync_interval=None, extra=configuration()) as server,
        AsyncExitStack() as stack,
    ):
        bus = await Bus.connect(login(server, "root"), name="test fleet")
        stack.push_async_callback(bus.close)
        await provision(bus, StreamSettings())
        roster = await stack.enter_async_context(Roster(bus, MODEL))
        children = await stack.enter_async_context(Children(grace=5))
        await Fleet(server, bus, roster, directory, children).start("both", SCRIPT, **WORKER)
        yield Lab(server, bus)


READS = (
    "infer.stream.globex.*",
    "infer.results.globex.*",
    "infer.request.>",
    "infer.jobs.>",
    "infer.cancel.>",
    "infer.alive.>",
    "infer.read.>",
    "infer.remove.>",
    "infer.files.globex.>",
    "infer.prefill.>",
    "infer.passed.>",
    "infer.in.>",
    "_INBOX_globex.>",
    "_INBOX.>",
    "infer.inbox.>",
    "$KV.>",
    "$JS.EVENT.>",
    "$SYS.>",
    ">",
)


@pytest.mark.parametrize("subject", READS)
async def test_a_client_hears_nothing_that_is_not_its_own(lab: Lab, subject: str) -> None:
    async with lab.actor("acme") as attacker:
        assert not await attacker.may_subscribe(subject)


WRITES = (
    f"infer.prefill.{MODEL}.w1",
    f"infer.passed.{MODEL}.w1.tokens",
    "infer.worker.w1.x",
    f"$JS.ACK.INFER_JOBS.{MODEL}-batch.1.2.2.1700000000000000000.0",
    "$JS.API.STREAM.DELETE.INFER_JOBS",
    "$JS.API.STREAM.PURGE.INFER_JOBS",
    "$JS.API.STREAM.INFO.INFER_RESULTS",
    f"$JS.API.CONSUMER.DELETE.INFER_JOBS.{MODEL}-batch",
    f"$JS.API.CONSUMER.MSG.NEXT.INFER_JOBS.{MODEL}-batch",
    "$JS.API.CONSUMER.CREATE.INFER_STREAM.spy",
    "$KV.INFER_WORKERS.scripted.w1",
    "$KV.INFER_KEYS.stolen",
    "infer.in.key.keys.stolen",
    "$JS.API.DIRECT.GET.KV_INFER_KEYS",
    "$JS.API.DIRECT.GET.KV_INFER_KEYS.$KV.INFER_KEYS.web",
    "$JS.API.STREAM.INFO.KV_INFER_KEYS",
    "infer.in.key.results.globex.run",
    "infer.results.globex.run",
    "infer.stream.globex.run",
    "infer.attempts.globex.run.1",
    "infer.cancel.globex.run",
    "infer.alive.globex.run",
    "infer.read.globex.run",
    "infer.remove.globex.run",
    "infer.files.globex.batch.output.0",
    "$KV.INFER_BATCHES.globex.batch.state",
    "$JS.API.DIRECT.GET.INFER_FILES.infer.files.globex.batch.output.0",
    "$JS.API.DIRECT.GET.KV_INFER_BATCHES",
    "$JS.API.DIRECT.GET.KV_INFER_BATCHES.$KV.INFER_BATCHES.globex.batch.state",
    "infer.objects.globex.x.0",
    f"infer.jobs.{MODEL}.batch.globex.tokens",
    f"infer.dead.{MODEL}.tokens",
    "_INBOX_globex.live1",
    "infer.inbox.x",
    "$SRV.PING",
    "$JS.API.STREAM.MSG.GET.INFER_RESULTS",
    "$JS.API.DIRECT.GET.INFER_RESULTS",
    "$JS.API.DIRECT.GET.INFER_STREAM",
    "$JS.API.DIRECT.GET.INFER_JOBS",
    "$JS.API.DIRECT.GET.INFER_RESULTS.infer.results.globex.done",
)


@pytest.mark.parametrize("subject", WRITES)
async def test_a_client_publishes_to_nothing_that_is_not_its_own(lab: Lab, subject: str) -> None:
    async with lab.actor("acme") as attacker:
        assert not await attacker.may_publish(subject, b"{}" if "API" in subject else b"")


async def test_an_operator_does_not_write_what_only_workers_write(lab: Lab) -> None:
    async with lab.actor("operator") as actor:
        for subject in ("infer.results.globex.x", "infer.in.key.results.globex.x", "$KV.INFER_WORKERS.a.b"):
            assert not await actor.may_publish(subject)
        assert not await actor.may_publish("$JS.API.STREAM.DELETE.INFER_JOBS")


async def test_an_acknowledgement_does_not_cancel_a_running_job(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        job = await victim.submit("tokens", MODEL, SLOW)
        reader = aiter(victim.stream(job))
        await anext(reader)
        await attacker.has_acknowledged_to(f"infer.cancel.globex.{job.id}")
        await attacker.connection.publish("infer.cancel.acme.x", b"", reply=f"infer.cancel.globex.{job.id}")
        result = await victim.result(job, timeout=20)
    assert result.status == "ok"


async def test_an_acknowledgement_does_not_cancel_a_queued_job(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        await attacker.has_acknowledged_to("infer.cancel.globex.later")
        await eventually(lambda: _stored(lab, layout.CANCEL, "infer.cancel.globex.later"))
        job = await victim.submit("tokens", MODEL, QUICK, job_id="later")
        assert (await victim.result(job, timeout=20)).status == "ok"


async def _stored(lab: Lab, stream: str, subject: str) -> bool:
    return await lab.jetstream.last(stream, subject) is not None


async def test_an_acknowledgement_is_no_result(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        running = await victim.submit("tokens", MODEL, SLOW)
        done = await victim.submit("tokens", MODEL, QUICK)
        before = await victim.result(done, timeout=20)
        for job in (running, done):
            await attacker.has_acknowledged_to(f"infer.results.globex.{job.id}")
        assert await victim.result(done, timeout=20) == before
        assert (await victim.result(running, timeout=20)).status == "ok"
        found = await lab.jetstream.read(layout.RESULTS, "infer.results.globex.*")
    assert all(b'"stream"' not in each.data for each in found)


async def test_an_acknowledgement_does_not_end_a_reader(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        job = await victim.submit("tokens", MODEL, SLOW)
        tokens: list[int] = []
        async for chunk in victim.stream(job):
            tokens += chunk.token_ids  # type: ignore[union-attr]
            if len(tokens) in (10, 50):
                await attacker.has_acknowledged_to(f"infer.stream.globex.{job.id}")
        again = [t async for chunk in victim.stream(job) for t in chunk.token_ids]  # type: ignore[union-attr]
    assert len(tokens) == 100
    assert again == tokens


async def test_a_result_of_ones_own_is_not_taken_for_anothers(lab: Lab) -> None:
    """The server sends what a direct get asks for to any reply subject."""
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        async with Client.connect(login(lab.server, "acme"), owner="acme") as client:
            own = await client.submit("tokens", MODEL, {"token_ids": [666], "max_tokens": 3}, job_id="same")
            await client.result(own, timeout=20)
        job = await victim.submit("tokens", MODEL, SLOW, job_id="same")
        for family in ("results", "stream", "cancel"):
            await attacker.may_publish(
                "$JS.API.DIRECT.GET.INFER_RESULTS.infer.results.acme.same",
                reply=f"infer.{family}.globex.same",
            )
        result = await victim.result(job, timeout=20)
        tokens = [t async for chunk in victim.stream(job) for t in chunk.token_ids]  # type: ignore[union-attr]
    assert result.status == "ok"
    assert len(tokens) == 100
    assert 667 not in tokens


async def test_an_acknowledgement_is_no_dead_letter_no_attempt_and_no_announcement(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        for subject in (
            f"infer.dead.{MODEL}.tokens",
            "infer.attempts.globex.x.1",
            f"$KV.INFER_WORKERS.{MODEL}.w1",
            f"$KV.INFER_WORKERS.{MODEL}.ghost",
        ):
            await attacker.has_acknowledged_to(subject)
        await attacker.connection.flush()
        assert [letter async for letter in Operator(lab.bus).dead_letters()] == []
        assert await lab.jetstream.last(layout.RESULTS, "infer.attempts.globex.x.1") is None

        async def only_the_worker() -> bool:
            return [each.worker for each in await victim.workers()] == ["w1"]

        await eventually(only_the_worker)


async def test_a_job_that_the_server_forwarded_does_not_run_as_its_owners(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        before = len(await lab.jetstream.read(layout.RESULTS, "infer.results.globex.*"))
        await attacker.may_publish(
            "$JS.API.DIRECT.GET.INFER_RESULTS.infer.results.acme.same",
            reply=f"infer.jobs.{MODEL}.batch.globex.tokens",
        )
        job = await victim.submit("tokens", MODEL, QUICK)
        await victim.result(job, timeout=20)
        found = (await lab.jetstream.read(layout.RESULTS, "infer.results.globex.*"))[before:]
    assert [each.headers["Infer-Status"] for each in found if each.headers["Infer-Status"] == "ok"] == ["ok"]


async def test_a_guessed_job_id_does_not_swallow_anothers_job(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        for guess in ("line-17", "globex.line-17", "globex:line-17"):
            body = json.dumps(QUICK).encode()
            names = {"Nats-Msg-Id": guess, "Infer-Job-Id": "x"}
            await attacker.may_publish(f"infer.jobs.{MODEL}.batch.acme.tokens", body, headers=names)
        job = await victim.submit("tokens", MODEL, QUICK, job_id="line-17")
        assert not job.duplicate
        assert (await victim.result(job, timeout=20)).status == "ok"


REPLIES = (
    "$JS.API.STREAM.DELETE.INFER_JOBS",
    f"infer.jobs.{MODEL}.batch.globex.chat",
    f"$KV.INFER_WORKERS.{MODEL}.w1",
    "$SYS.REQ.SERVER.PING",
    "infer.cancel.globex.run",
    "infer.results.globex.run",
    "infer.stream.globex.run",
    f"infer.request.{MODEL}.tokens",
    f"infer.prefill.{MODEL}.w1",
    "infer.inbox.x.y",
)


@pytest.mark.parametrize("how", ["live", "durable", "alive", "read", "service"])
async def test_a_worker_publishes_to_no_subject_that_its_caller_may_not(lab: Lab, how: str) -> None:
    heard: list[str] = []
    spy = await nats.connect(lab.server.url, user="worker", password="worker")
    for subject in REPLIES:
        if not subject.startswith(("$SYS", "$JS.API")):
            await spy.subscribe(subject, cb=_noting(heard))
    async with lab.actor("acme") as attacker:
        for reply in REPLIES:
            body = json.dumps(QUICK).encode()
            if how == "live":
                await attacker.may_publish(f"infer.request.{MODEL}.tokens", body, reply=reply)
            elif how == "durable":
                subject = f"infer.jobs.{MODEL}.interactive.acme.tokens"
                await attacker.may_publish(subject, body, headers={"Infer-Reply-To": reply})
            elif how == "alive":
                await attacker.may_publish("infer.alive.live.x", reply=reply)
            elif how == "read":
                await attacker.may_publish("infer.read.acme.same", reply=reply)
            else:
                await attacker.may_publish("$SRV.PING", reply=reply)
        async with lab.victim() as victim:
            job = await victim.submit("tokens", MODEL, QUICK)
            await victim.result(job, timeout=20)
            assert await victim.models() == [MODEL]
    await spy.flush()
    allowed = {f"infer.request.{MODEL}.tokens", f"$KV.INFER_WORKERS.{MODEL}.w1"}
    assert set(heard) <= allowed
    assert heard.count(f"infer.request.{MODEL}.tokens") == (len(REPLIES) if how == "live" else 0)
    await spy.close()


def _noting(heard: list[str]) -> Any:
    async def note(message: Any) -> None:
        heard.append(message.subject)

    return note


async def test_a_live_request_is_not_cancelled_by_an_acknowledgement(lab: Lab) -> None:
    async with lab.victim() as victim, lab.actor("acme") as attacker:
        stream = victim.tokens(MODEL, [5], job_id="mine", user="slow")
        tokens: list[int] = []
        async for chunk in stream:
            tokens += chunk.token_ids
            if len(tokens) == 10:
                await attacker.has_acknowledged_to("infer.cancel.live.mine")
    assert len(tokens) == 100
