"""One NATS account for each tenant, by the configuration that deploy/nats/tenants.conf shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.registry import Roster
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.client import Client, text
from inferbus.workers.config import BusSettings, StreamSettings
from inferbus.workers.stack.errors import ProcessExited
from inferbus.workers.stack.processes import Children
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet
from tests.support.line import Line

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nats" / "tenants.conf"
TENANTS = ("acme", "globex")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SENTENCE = "The capital of France is Paris."
PARIS = f"""
tokenizer = true
[[rules]]
user = "slow"
text = "{SENTENCE}"
delay = 0.1
[[rules]]
text = "{SENTENCE}"
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


def configuration(*, importing: str | None = None) -> str:
    """The shipped accounts with a second tenant, which imports what is `importing`'s if that is given."""
    text = CONFIGURATION.read_text().replace('include "nats.conf"', "")
    first, second = TENANTS
    tenant = text[text.index(f"  {first}: {{") : text.rindex("}")]
    another = tenant.replace(first, second).replace("$ACME_PASSWORD", "globex")
    if importing is not None:
        another = another.replace(f"infer.jobs.*.*.{second}.*", f"infer.jobs.*.*.{importing}.*")
    accounts = text[: text.rindex("}")] + another + "}\n"
    return accounts.replace("$FLEET_PASSWORD", "fleet").replace("$ACME_PASSWORD", "acme")


def login(server: NatsServer, user: str) -> BusSettings:
    return BusSettings(urls=(server.url,), user=user, password=user)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """With two tenants and a worker."""
    directory = tmp_path_factory.mktemp("tenants")
    async with (
        NatsServer(directory / "nats", sync_interval=None, extra=configuration()) as server,
        AsyncExitStack() as stack,
    ):
        bus = await Bus.connect(login(server, "fleet"), name="test fleet")
        stack.push_async_callback(bus.close)
        await provision(bus, StreamSettings())
        roster = await stack.enter_async_context(Roster(bus, MODEL))
        children = await stack.enter_async_context(Children(grace=5))
        workers = Fleet(server, bus, roster, directory, children)
        user: dict[str, Any] = {
            "nats_user": "fleet",
            "nats_password": "fleet",
            "reply_prefix": "_INBOX.,_R_.",
        }
        await workers.start("both", PARIS, **user)
        yield server


async def test_a_tenant_is_answered_live_by_a_stream_and_durably(server: NatsServer) -> None:
    async with Client.connect(login(server, "acme"), owner="acme") as client:
        assert await client.models() == [MODEL]
        whole: Any = await client.chat(MODEL, CHAT["messages"], stream=False)
        chunks = [chunk async for chunk in client.chat(MODEL, CHAT["messages"])]
        job = await client.submit("chat", MODEL, CHAT)
        result = await client.result(job, timeout=10)
        stored = [chunk async for chunk in client.stream(job)]
    assert whole["choices"][0]["message"]["content"] == SENTENCE
    assert result.status == "ok"
    assert len(chunks) == len(stored) > 5


async def test_a_tenants_live_answer_goes_on_when_its_connection_broke(server: NatsServer) -> None:
    """The server forgets where it led with the connection: the rest goes where the question came from."""
    line = Line(server)
    await line.mend()
    settings = msgspec.structs.replace(login(server, "acme"), urls=(line.url,))
    async with Client.connect(settings, owner="acme", timeout=None) as client:
        answers = [client.chat(MODEL, CHAT["messages"], user="slow") for _ in range(3)]
        seen = ["" for _ in answers]

        async def read(number: int) -> None:
            async for chunk in answers[number]:
                seen[number] += text(chunk)

        reading = asyncio.gather(*map(read, range(len(answers))))
        await eventually(lambda: all(len(each) > 3 for each in seen))
        await line.cut()
        await eventually(lambda: not client.bus.connected)
        await line.mend()
        async with asyncio.timeout(30):
            await reading
    assert seen == [SENTENCE] * 3
    await line.cut()


async def test_a_tenant_cannot_import_what_is_anothers(tmp_path: Path) -> None:
    with pytest.raises(ProcessExited) as refused:
        await NatsServer(tmp_path, extra=configuration(importing="acme")).start()
    assert "import" in "\n".join(refused.value.tail)


async def test_what_the_server_answers_a_tenant_stays_in_its_account(server: NatsServer) -> None:
    """The acknowledgement of a job goes to its reply subject: never to another tenant's job."""
    async with Client.connect(login(server, "acme"), owner="acme") as victim:
        job = await victim.submit("chat", MODEL, CHAT, job_id="victim")
        assert (await victim.result(job, timeout=10)).status == "ok"
        attacker = await nats.connect(server.url, user="globex", password="globex")
        families = ("cancel", "results", "stream", "attempts", "jobs.scripted.batch")
        for family in families:
            reply = f"infer.{family}.acme.victim"
            own = await attacker.subscribe(reply)
            await attacker.publish("infer.jobs.scripted.batch.globex.chat", b"{}", reply=reply)
            acknowledged = await own.next_msg(timeout=5)
            assert b"INFER_JOBS" in acknowledged.data
        await attacker.close()
        assert (await victim.result(job, timeout=10)).status == "ok"
    fleet = await Bus.connect(login(server, "fleet"), name="test")
    for stream in (layout.CANCEL, layout.RESULTS, layout.STREAM):
        found = await JetStream(fleet).read(stream, "infer.*.acme.victim")
        assert not [message for message in found if b"INFER_JOBS" in message.data]
    await fleet.close()


async def test_a_tenant_hears_nothing_of_another(server: NatsServer) -> None:
    spy = await nats.connect(server.url, user="globex", password="globex")
    heard = await spy.subscribe(">")
    async with Client.connect(login(server, "acme"), owner="acme") as client:
        job = await client.submit("chat", MODEL, CHAT)
        await client.result(job, timeout=10)
        assert [chunk async for chunk in client.stream(job)]
    await spy.publish("the.end", b"")
    message = await heard.next_msg(timeout=5)
    assert message.subject == "the.end"
    with pytest.raises((nats.errors.NoRespondersError, asyncio.TimeoutError)):
        await spy.request(f"$JS.API.DIRECT.GET.INFER_RESULTS.infer.results.acme.{job.id}", timeout=2)
    await spy.close()
