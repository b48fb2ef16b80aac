"""Worker, clients of two owners and operator, each with the permissions of deploy/nats/users.conf."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam
from structlog.testing import capture_logs

from inferbus.schemas.headers import JOB_ID, REMOVE
from inferbus.workers.batch.runs import Options, begin
from inferbus.workers.batch.runs import run as run_batch
from inferbus.workers.batch.state import Batches
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.fleet.registry import Roster
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.client import Client, JobNotFound, reads, text
from inferbus.workers.client.keys import KeyBucket
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import StreamSettings
from inferbus.workers.stack.processes import Children
from inferbus.workers.stack.server import NatsServer
from tests.support.batches import read, write
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet
from tests.support.gateway import gateway
from tests.support.line import Line
from tests.support.responder import read_into
from tests.support.users import OWNERS, WORKER, configuration, login

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SCRIPT = """
tokenizer = true
[[rules]]
user = "bad"
[rules.fault]
do = "fail"
[[rules]]
user = "slow"
text = "The capital of France is Paris."
delay = 0.1
[[rules]]
text = "The capital of France is Paris."
"""
PARIS = "The capital of France is Paris."

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """With a worker that has the permissions of one."""
    directory = tmp_path_factory.mktemp("users")
    async with (
        NatsServer(directory / "nats", sync_interval=None, extra=configuration()) as server,
        AsyncExitStack() as stack,
    ):
        bus = await Bus.connect(login(server, "root"), name="test")
        stack.push_async_callback(bus.close)
        await provision(bus, StreamSettings())
        roster = await stack.enter_async_context(Roster(bus, MODEL))
        children = await stack.enter_async_context(Children(grace=5))
        fleet = Fleet(server, bus, roster, directory, children)
        worker = await fleet.start("both", SCRIPT, max_attempts=1, **WORKER)
        yield server
        assert not fleet.events(worker, "bus.not_permitted")


@pytest_asyncio.fixture(loop_scope="module")
async def acme(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(login(server, "acme"), owner="acme") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def globex(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(login(server, "globex"), owner="globex") as client:
        yield client


async def run(server: NatsServer, user: str, *arguments: str, given: str = "") -> tuple[int, str]:
    """A command's exit code and what it printed."""
    env = {
        "INFERBUS_NATS_URL": server.url,
        "INFERBUS_NATS_USER": user,
        "INFERBUS_NATS_PASSWORD": user,
        "INFERBUS_NATS_INBOX_PREFIX": f"_INBOX_{user}",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
    } | ({"INFERBUS_OWNER": user} if user in OWNERS else {})
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "inferbus.workers.cli", *arguments],
        env=env,
        input=given,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return done.returncode, done.stdout + done.stderr


async def stored(client: Client, job: str) -> list[Any]:
    """The stored messages of a job, once its end mark is one of them: it follows the result."""
    async with asyncio.timeout(10):
        while True:
            messages = (await reads.chunks(client.bus, client.owner, job)).messages
            if messages and not messages[-1].data:
                return messages


async def test_a_client_does_everything_of_its_own_with_its_permissions(acme: Client) -> None:
    assert await acme.models() == [MODEL]
    assert "".join([text(chunk) async for chunk in acme.chat(MODEL, CHAT["messages"])]) == PARIS
    job = await acme.submit("chat", MODEL, CHAT, job_id="own")
    result: Any = await acme.result(job, timeout=10)
    assert result.answer["choices"][0]["message"]["content"] == PARIS
    assert await acme.find("own") == job.__class__(id="own", owner="acme", submission=job.submission)
    # After the end: nothing but what is stored.
    for which in (job, "own"):
        stream = acme.stream(which)
        assert "".join([text(event) async for event in stream]) == PARIS
        assert stream.replayed
    await acme.cancel(job)
    with pytest.raises(JobNotFound):
        await acme.find("nothing")


async def test_a_live_answer_goes_on_with_a_clients_permissions(server: NatsServer) -> None:
    line = Line(server)
    await line.mend()
    settings = msgspec.structs.replace(login(server, "acme"), urls=(line.url,))
    async with Client.connect(settings, owner="acme", timeout=None) as client:
        seen: list[str] = []
        reading = asyncio.create_task(read_into(seen, client.chat(MODEL, CHAT["messages"], user="slow")))
        await eventually(lambda: len("".join(seen)) > 3)
        await line.cut()
        await eventually(lambda: not client.bus.connected)
        await line.mend()
        async with asyncio.timeout(30):
            await reading
    assert "".join(seen) == PARIS
    await line.cut()


async def test_a_late_reader_gets_the_stored_chunks_from_a_worker(acme: Client) -> None:
    job = await acme.submit("chat", MODEL, CHAT)
    messages = await stored(acme, job.id)
    page = await reads.chunks(acme.bus, "acme", job.id)
    assert len(page.messages) == len(messages) > 5
    assert (await reads.chunks(acme.bus, "acme", job.id, page.next)).messages == []


async def test_a_queued_job_is_found_by_its_id(acme: Client, server: NatsServer) -> None:
    async with Client.connect(login(server, "operator")) as client:
        await Operator(client.bus).pause(MODEL)
        try:
            first = await acme.submit("chat", MODEL, CHAT, job_id="queued")
            assert await acme.find("queued") == first
            again = await acme.submit("chat", MODEL, CHAT, job_id="queued", again=True)
            assert (await acme.find("queued")).submission == again.submission
            assert (await acme.find("queued", submission=first.submission)).submission == first.submission
        finally:
            await Operator(client.bus).resume(MODEL)


async def test_a_batch_runs_goes_on_and_leaves_nothing_with_a_clients_permissions(
    acme: Client, globex: Client, server: NatsServer, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            {
                "custom_id": str(n),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": MODEL} | CHAT,
            }
            for n in range(20)
        ],
    )
    async with Client.connect(login(server, "operator")) as client:
        await Operator(client.bus).pause(MODEL)
        try:
            running = asyncio.create_task(run_batch(acme, await begin(acme, source, Options(shared=True))))
            found = await eventually(lambda: queued(acme))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        finally:
            await Operator(client.bus).resume(MODEL)
    record = await run_batch(acme, await begin(acme, source, Options()))
    assert (record.status, record.counts.succeeded) == ("completed", 20)
    lines = read(Path(record.output))
    assert {each["response"]["request_id"] for each in lines} >= found, "what was queued is not sent again"
    subjects = acme.bus.subjects
    async with Client.connect(login(server, "root")) as root:
        left = await JetStream(root.bus).read(layout.RESULTS, subjects.results_of("acme"))
        assert not [each for each in left if record.id in each.subject]
        assert [kept.record.id for kept in await Batches(acme.bus, "acme").all()] == [record.id]
        assert await Batches(globex.bus, "globex").all() == []
        await Batches(acme.bus, "acme").remove(record)
        assert await JetStream(root.bus).read(layout.FILES, subjects.all("files")) == []


async def test_a_removal_that_does_not_say_what_is_refused(acme: Client) -> None:
    answer = await acme.bus.request(acme.bus.subjects.remove("acme", "x"), b"", {REMOVE: "everything"})
    assert b"invalid_request" in answer.data


async def queued(client: Client) -> set[str]:
    """The queued jobs of the batch that a file began."""
    (kept,) = await Batches(client.bus, client.owner).all()
    jobs = await reads.through_a_worker(client.bus, "jobs", client.owner, kept.record.id)
    return {each.headers[JOB_ID] for each in jobs}


async def test_nothing_of_another_owner_can_be_read(acme: Client, globex: Client) -> None:
    job = await acme.submit("chat", MODEL, CHAT, job_id="secret")
    await acme.result(job, timeout=10)
    bus, subjects = globex.bus, globex.bus.subjects
    key = ("acme", "secret")
    with pytest.raises(NotPermitted, match=r"infer\.results\.acme"):
        await JetStream(bus).last(layout.RESULTS, subjects.result(*key))
    for stream, subject in (
        (layout.STREAM, subjects.stream(*key)),
        (layout.RESULTS, subjects.result(*key)),
        (layout.JOBS, subjects.jobs_of_owner("acme")),
        (layout.CANCEL, subjects.cancel(*key)),
        (layout.DEAD, subjects.all("dead")),
    ):
        with pytest.raises(NotPermitted):
            await JetStream(bus).page(stream, subject)
        with pytest.raises(NotPermitted):
            await JetStream(bus).get(stream, {"last_by_subj": subject})
    with pytest.raises(reads.Unreadable):
        await reads.chunks(bus, *key)
    for subject in (subjects.stream(*key), subjects.result(*key), "_INBOX_acme.>", "infer.>"):
        with pytest.raises(NotPermitted):
            await bus.subscribe(subject, lambda _: None)


async def test_a_worker_sends_nothing_to_where_a_reader_must_not_write(acme: Client, globex: Client) -> None:
    await acme.submit("chat", MODEL, CHAT, job_id="kept")
    before = await stored(acme, "kept")
    await globex.submit("chat", MODEL, CHAT, job_id="mine")
    await stored(globex, "mine")
    request = {"Infer-Read": "chunks", "Infer-From": "1"}
    for reply in (
        "infer.stream.acme.kept",
        "infer.stream.globex.mine",
        "infer.results.acme.kept",
        "infer.jobs.scripted.batch.acme.chat",
        "$JS.API.STREAM.DELETE.INFER_DEAD",
    ):
        globex.bus.send("infer.read.globex.mine", b"", request, reply=reply)
    assert await stored(globex, "mine")
    assert len(await stored(acme, "kept")) == len(before)


async def test_the_commands_of_a_client_work_and_others_name_the_permission(server: NatsServer) -> None:
    body = '{"messages":[{"role":"user","content":"hi"}]}'
    for arguments, given in (
        (("chat", MODEL, "hi"), ""),
        (("chat", "hi"), ""),
        (("workers",), ""),
        (("submit", "chat", MODEL, "--job-id", "command"), body),
        (("result", "command", "--timeout", "10"), ""),
        (("stream", "command", "--timeout", "10"), ""),
        (("cancel", "command"), ""),
    ):
        code, told = await run(server, "acme", *arguments, given=given)
        assert code == 0, (arguments, told)
    for arguments in (("jobs", "ls"), ("dead", "ls"), ("pause", MODEL)):
        code, told = await run(server, "acme", *arguments)
        assert (code, "not permitted to publish to $JS.API." in told) == (3, True), (arguments, told)


async def test_the_gateway_does_everything_for_the_owner_of_each_key_with_its_permissions(
    server: NatsServer,
) -> None:
    batch = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL} | CHAT,
    }
    async with Client.connect(login(server, "root")) as root:
        keys = KeyBucket(root.bus)
        made = {owner: await keys.add(owner, owner) for owner in OWNERS}
        with capture_logs() as logs:
            async with gateway(login(server, "gateway"), stored_keys=True) as url:
                for key in made.values():
                    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
                        await _everything(client, json.dumps(batch).encode())
        # A worker removes for it what it may not purge.
        refused = [each["subject"] for each in logs if each["event"] == "bus.not_permitted"]
        assert not [each for each in refused if not each.startswith("$js.api.stream.purge.")]
        for owner in OWNERS:
            await keys.remove(owner)


async def _everything(client: openai.AsyncOpenAI, batch: bytes) -> None:
    """What OpenAI's API has, and then all there is of durable requests."""
    await eventually(lambda: _listed(client))
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)
    assert "".join([each.choices[0].delta.content or "" async for each in stream if each.choices]) == PARIS
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nobody", messages=messages)
    for _ in range(2):
        named = await client.chat.completions.create(
            model=MODEL, messages=messages, extra_headers={"Idempotency-Key": "once"}
        )
        assert named.choices[0].message.content == PARIS
    job = await client.get("/jobs/once", cast_to=httpx.Response)
    assert job.json()["status"] == "completed"
    assert "Paris" in (await client.get("/jobs/once/stream", cast_to=httpx.Response)).text
    await client.delete("/jobs/once", cast_to=httpx.Response)
    shown = (await client.get("../status", cast_to=httpx.Response)).json()
    assert shown["workers"]
    assert shown["queues"]
    file = await client.files.create(file=("in.jsonl", batch), purpose="batch")
    begun = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = await eventually(lambda: _ended(client, begun.id), within=30)
    assert (await client.files.content(done.output_file_id)).text.count("Paris") == 1
    assert [each.id async for each in client.batches.list()] == [begun.id]
    assert {each.id async for each in client.files.list()} >= {file.id, done.output_file_id}
    for each in (done.output_file_id, file.id):
        await client.files.delete(each)


async def _listed(client: openai.AsyncOpenAI) -> bool:
    """Whether the key is known, and a worker there."""
    try:
        return [each.id async for each in client.models.list()] == [MODEL]
    except openai.APIStatusError:
        return False


async def _ended(client: openai.AsyncOpenAI, batch: str) -> Any:
    found = await client.batches.retrieve(batch)
    return found if found.status == "completed" else None


async def test_an_operator_does_what_the_documents_say(acme: Client, server: NatsServer) -> None:
    bad = await acme.submit("chat", MODEL, CHAT | {"user": "bad"}, job_id="bad")
    with pytest.raises(Exception, match=r".+"):
        await acme.result(bad, timeout=10)
    for arguments in (
        ("workers",),
        ("jobs", "ls"),
        ("jobs", "show", "acme", "bad"),
        ("jobs", "show", "bad"),
        ("jobs", "cancel", "acme", "nothing"),
        ("pause", MODEL),
        ("resume", MODEL),
        ("dead", "ls"),
        ("dead", "purge", "--all", "--yes"),
        ("keys", "add", "web", "--owner", "acme"),
        ("keys", "ls"),
        ("keys", "rm", "web"),
    ):
        code, told = await run(server, "operator", *arguments)
        assert code == 0, (arguments, told)
