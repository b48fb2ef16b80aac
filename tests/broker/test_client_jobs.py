"""Durable jobs through the client, against a real server and a worker that does what the test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from inferbus.schemas import codec
from inferbus.schemas.errors import (
    BusUnavailable,
    Cancelled,
    ContextLengthExceeded,
    InvalidRequest,
    InvalidSubject,
    Overloaded,
    PayloadTooLarge,
)
from inferbus.schemas.fleet import BUCKET, Load, WorkerInfo
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import ApiError, StreamFull
from inferbus.workers.bus.jetstream import layout, objects
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.client import (
    Client,
    Job,
    JobNotFound,
    Restarted,
    TimedOut,
    durable,
    results,
    text,
)
from inferbus.workers.config import StreamSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.answers import chat_answer
from tests.support.eventually import eventually
from tests.support.monitoring import subscribed
from tests.support.responder import Responder, chunks_of, read_into, responder

BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(sync_interval=None, monitoring=True) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setattr(durable, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(durable, "LAST_PAUSE", 0.2)
    monkeypatch.setattr(results, "FIRST_PAUSE", 0.1)
    async with Client.connect(server.url, owner="me") as found:
        await provision(found.bus, StreamSettings(), model="m")
        yield found


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[Responder]:
    async with responder(server.url) as found:
        yield found


def of(job: Job, attempt: int = 1, **more: str) -> dict[str, str]:
    """Headers of a job's chunks."""
    return {"Infer-Submission": str(job.submission), "Infer-Attempt": str(attempt), **more}


async def finish(worker: Responder, job: Job, *texts: str, attempt: int = 1) -> None:
    """Everything that a worker sends for a job, in its order."""
    chunks, subject = chunks_of(*texts, attempt=attempt), f"infer.stream.me.{job.id}"
    await worker.send(subject, *chunks, headers=of(job, attempt))
    assert job.submission is not None
    await worker.store_result("me", job.id, "".join(texts), submission=job.submission, attempt=attempt)
    await worker.end(subject, len(chunks), attempt=attempt, Submission=str(job.submission))


def lossy(client: Client, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Message], bool]) -> None:
    """Lets messages be lost between the server and this client's subscriptions, and only there."""
    subscribe = client.bus.subscribe

    async def subscribing(subject: str, callback: Callable[[Message], None], queue: str = "") -> Any:
        return await subscribe(subject, lambda m: None if lose(m) else callback(m), queue)

    monkeypatch.setattr(client.bus, "subscribe", subscribing)


async def test_a_job_is_stored_with_its_identity(client: Client) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j", job_class="interactive", deadline=60)
    stored = await JetStream(client.bus).last(layout.JOBS, "infer.jobs.m.interactive.me.chat")
    assert stored is not None
    assert job == Job(id="j", owner="me", submission=stored.sequence, model="m", duplicate=False)
    assert json.loads(stored.data) == BODY | {"stream_options": {"include_usage": True}}
    assert stored.headers["Infer-Job-Id"] == "j"
    assert stored.headers["Infer-Deadline"] == "60.0"
    assert stored.headers["Content-Type"] == "application/json"


async def test_a_job_that_wants_no_chunks_says_so(client: Client) -> None:
    await client.submit("tokens", "m", {"token_ids": [1]}, stream=False)
    stored = await JetStream(client.bus).last(layout.JOBS, "infer.jobs.m.batch.me.tokens")
    assert stored is not None
    assert json.loads(stored.data) == {"token_ids": [1], "stream": False}


async def test_submitting_an_id_again_returns_the_job_that_is_there(client: Client) -> None:
    first = await client.submit("chat", "m", BODY, job_id="j")
    second = await client.submit("chat", "m", BODY, job_id="j")
    assert (second.submission, second.duplicate) == (first.submission, True)


async def test_an_id_with_another_request_is_another_submission(client: Client) -> None:
    first = await client.submit("chat", "m", BODY, job_id="j")
    second = await client.submit("chat", "m", BODY | {"seed": 1}, job_id="j")
    assert (second.duplicate, second.submission == first.submission) == (False, False)


async def test_another_owner_cannot_make_a_job_a_duplicate_by_its_id(
    client: Client, server: NatsServer
) -> None:
    for guessed in ("me.j", "j"):
        await JetStream(client.bus).store("infer.jobs.m.batch.you.chat", b"{}", {"Nats-Msg-Id": guessed})
    async with Client.connect(server.url, owner="you") as other:
        await other.submit("chat", "m", BODY, job_id="j")
    assert not (await client.submit("chat", "m", BODY, job_id="j")).duplicate


async def test_an_id_can_be_submitted_anew_on_purpose(client: Client) -> None:
    first = await client.submit("chat", "m", BODY, job_id="j")
    second = await client.submit("chat", "m", BODY, job_id="j", again=True)
    assert not second.duplicate
    assert second.submission != first.submission


async def test_an_id_means_its_newest_submission(client: Client, worker: Responder) -> None:
    first = await client.submit("chat", "m", BODY, job_id="j")
    await finish(worker, first, "old")
    await client.bus.js.purge_stream(layout.JOBS)
    assert (await client.result("j")).answer == chat_answer("old")
    second = await client.submit("chat", "m", BODY, job_id="j", again=True)
    assert await client.find("j") == second
    assert await client.find("j", submission=second.submission) == second
    waiting = asyncio.create_task(client.result("j"))
    reading = asyncio.create_task(client.stream("j").answer())
    await finish(worker, second, "new")
    assert (await waiting).answer == await reading == chat_answer("new")


async def test_a_job_that_nobody_submitted_is_not_waited_for(client: Client) -> None:
    await client.submit("chat", "m", BODY, job_id="other")
    with pytest.raises(JobNotFound, match="there is no job j of the owner me"):
        await client.result("j")
    with pytest.raises(JobNotFound):
        await client.stream("j").answer()
    with pytest.raises(JobNotFound, match="submission 7"):
        await client.find("other", submission=7)


async def test_two_owners_may_use_the_same_id(client: Client, server: NatsServer) -> None:
    await client.submit("chat", "m", BODY, job_id="j")
    async with Client.connect(server.url, owner="you") as other:
        assert not (await other.submit("chat", "m", BODY, job_id="j")).duplicate


@pytest.mark.parametrize("job_id", ["", "a b", "é", "x" * 200, "a\r\nb"])
async def test_an_id_that_nothing_can_carry_is_refused(client: Client, job_id: str) -> None:
    with pytest.raises((InvalidRequest, InvalidSubject)):
        await client.submit("chat", "m", BODY, job_id=job_id)


async def test_the_owner_of_live_requests_is_reserved(server: NatsServer) -> None:
    with pytest.raises(InvalidSubject):
        Client.connect(server.url, owner="live")


async def test_a_job_over_the_limit_of_objects_is_refused_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "OBJECT_BYTES", client.bus.max_payload)
    with pytest.raises(PayloadTooLarge):
        await client.submit("completions", "m", {"prompt": "x" * client.bus.max_payload})


async def test_a_full_queue_refuses_and_loses_nothing(client: Client) -> None:
    config = await client.bus.js.stream_info(layout.JOBS)
    config.config.max_msgs = 2
    await client.bus.js.update_stream(config.config)
    await client.submit("chat", "m", BODY)
    await client.submit("chat", "m", BODY)
    with pytest.raises(Overloaded, match="maximum messages exceeded"):
        await client.submit("chat", "m", BODY)
    assert (await client.bus.js.stream_info(layout.JOBS)).state.messages == 2


async def test_an_owner_with_too_many_open_jobs_is_refused_and_others_are_not(
    client: Client, server: NatsServer
) -> None:
    await provision(client.bus, StreamSettings(owner_jobs=1), adopt=True)
    await client.submit("chat", "m", BODY)
    with pytest.raises(Overloaded, match="its owner has as many open jobs as it may"):
        await client.submit("chat", "m", BODY)
    async with Client.connect(server.url, owner="you") as other:
        await other.submit("chat", "m", BODY)


async def test_without_jetstream_submitting_says_so(server: NatsServer) -> None:
    async with Client.connect(server.url) as client:
        with pytest.raises(BusUnavailable, match="no stream takes jobs"):
            await client.submit("chat", "m", BODY)


async def test_a_stream_shows_chunks_as_they_come(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    got: list[str] = []
    stream = client.stream(job)
    reading = asyncio.create_task(read_into(got, stream))
    chunks = chunks_of("a", "b")
    await worker.send(f"infer.stream.me.{job.id}", *chunks[:2], headers=of(job))
    await eventually(lambda: "".join(got) == "a")
    await worker.send(f"infer.stream.me.{job.id}", *chunks[2:], headers=of(job))
    await worker.end(f"infer.stream.me.{job.id}", len(chunks), Submission=str(job.submission))
    await reading
    assert "".join(got) == "ab"
    assert (stream.status, stream.worker) == ("ok", "d1")


async def test_a_stream_can_be_read_from_its_beginning_after_the_end(
    client: Client, worker: Responder
) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j")
    await finish(worker, job, "The ", "end")
    for target in (job, job.id):
        stream = client.stream(target)
        assert [text(event) async for event in stream if text(event)] == ["The ", "end"]
        assert await stream.answer() == chat_answer("The end")


async def test_a_chunk_lost_on_the_way_is_read_from_the_stored_stream(
    client: Client, worker: Responder, monkeypatch: pytest.MonkeyPatch, server: NatsServer
) -> None:
    job = await client.submit("chat", "m", BODY)
    lossy(client, monkeypatch, lambda message: b'"seq":2,' in message.data)
    got: list[str] = []
    stream = client.stream(job)
    reading = asyncio.create_task(read_into(got, stream))
    await subscribed(server, f"infer.stream.me.{job.id}")
    await finish(worker, job, "a", "b", "c")
    await reading
    assert got == ["", "a", "b", "c", "", ""]


async def test_chunks_that_were_read_reach_the_reader_although_the_result_cannot_be_read(
    client: Client, worker: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await client.submit("chat", "m", BODY)
    lossy(client, monkeypatch, lambda message: b'"seq":2,' in message.data)
    got: list[str] = []
    reading = asyncio.create_task(read_into(got, client.stream(job)))
    chunks, subject = chunks_of("a", "b", "c"), f"infer.stream.me.{job.id}"
    await worker.send(subject, *chunks[:2], headers=of(job))
    await eventually(lambda: got == ["", "a"])
    await client.bus.js.delete_stream(layout.RESULTS)
    await worker.send(subject, *chunks[2:], headers=of(job))
    await eventually(lambda: got[:4] == ["", "a", "b", "c"])
    await provision(client.bus, StreamSettings(), model="m")
    assert job.submission is not None
    await worker.store_result("me", job.id, "abc", submission=job.submission)
    await reading
    assert "".join(got) == "abc"


async def test_what_was_read_reaches_the_reader_before_the_error_that_ends_its_stream(
    client: Client, worker: Responder
) -> None:
    job = await client.submit("chat", "m", BODY)
    await worker.send(f"infer.stream.me.{job.id}", *chunks_of("a", "b"), headers=of(job))
    await client.bus.js.delete_stream(layout.RESULTS)
    got: list[str] = []
    with pytest.raises(BusUnavailable):
        await read_into(got, client.stream(job))
    assert "".join(got) == "ab"


async def test_a_lost_tail_is_noticed_after_a_silence(
    client: Client, worker: Responder, monkeypatch: pytest.MonkeyPatch, server: NatsServer
) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j")
    lossy(client, monkeypatch, lambda message: message.subject.startswith("infer.stream"))
    stream = client.stream(job)
    reading = asyncio.create_task(stream.answer())
    await subscribed(server, f"infer.stream.me.{job.id}")
    await finish(worker, job, "a", "b")
    assert await reading == chat_answer("ab")


async def test_what_the_stream_holds_no_more_comes_from_the_result(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    got: list[str] = []
    stream = client.stream(job)
    reading = asyncio.create_task(read_into(got, stream))
    await worker.send(f"infer.stream.me.{job.id}", *chunks_of("The ", "end")[:2], headers=of(job))
    await eventually(lambda: "".join(got) == "The ")
    await client.bus.js.purge_stream(layout.STREAM)
    assert job.submission is not None
    await worker.store_result("me", job.id, "The end", submission=job.submission)
    await reading
    assert "".join(got) == "The end"
    assert (stream.status, stream.worker) == ("ok", "d1")


async def test_a_worker_that_takes_over_is_not_noticed(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    subject = f"infer.stream.me.{job.id}"
    await worker.send(subject, *chunks_of("a", "b", "c")[:3], headers=of(job))
    rest = [chunk | {"seq": seq} for seq, chunk in enumerate(chunks_of("c", attempt=2)[1:])]  # type: ignore[operator]
    await worker.send(subject, rest[0], headers=of(job, 2, **{"Infer-Continues": "1:3"}))
    await worker.send(subject, *rest[1:], headers=of(job, 2))
    await worker.end(subject, len(rest), attempt=2, Submission=str(job.submission))
    events = [event async for event in client.stream(job)]
    assert "".join(text(event) for event in events) == "abc"
    assert not any(isinstance(event, Restarted) for event in events)


async def test_an_earlier_submission_of_the_same_id_is_not_heard(
    client: Client, worker: Responder, server: NatsServer
) -> None:
    first = await client.submit("chat", "m", BODY, job_id="j")
    await finish(worker, first, "old")
    second = await client.submit("chat", "m", BODY, job_id="j", again=True)
    stream, waiting = client.stream(second), asyncio.create_task(client.result(second))
    reading = asyncio.create_task(stream.answer())
    await subscribed(server, "infer.stream.me.j")
    await client.bus.js.purge_stream(layout.RESULTS)
    await finish(worker, second, "new")
    assert await reading == chat_answer("new")
    assert (await waiting).answer == chat_answer("new")


async def test_a_reader_that_is_cancelled_while_it_subscribes_leaves_no_subscription(
    client: Client, server: NatsServer
) -> None:
    job = await client.submit("chat", "m", BODY)
    for steps in range(1, 30):
        readings = [asyncio.create_task(client.stream(job).answer()), asyncio.create_task(client.result(job))]
        for _ in range(steps):
            await asyncio.sleep(0)
        for reading in readings:
            reading.cancel()
        await asyncio.wait(readings)
    await subscribed(server, f"infer.stream.me.{job.id}", 0)
    await subscribed(server, f"infer.results.me.{job.id}", 0)


async def test_what_the_server_sends_on_somebodys_behalf_ends_no_reader(
    client: Client, worker: Responder, server: NatsServer
) -> None:
    """Acknowledgements, stored messages, errors and status lines, all sent to the job's subject."""
    job = await client.submit("chat", "m", BODY, job_id="j")
    earlier = await client.submit("chat", "m", BODY, job_id="other")
    await finish(worker, earlier, "another answer")
    stream, got = client.stream(job), list[str]()
    reading = asyncio.create_task(read_into(got, stream))
    await subscribed(server, "infer.stream.me.j")
    chunks, own = chunks_of("mine"), "infer.stream.me.j"
    await worker.send(own, *chunks[:2], headers=of(job))
    await eventually(lambda: "".join(got) == "mine")
    spoofed = {"Infer-Status": "ok", "Infer-Chunks": "2", "Infer-Attempt": "1"}
    await worker.nc.publish("infer.jobs.m.batch.you.chat", b"{}", reply=own)
    await worker.nc.publish("infer.cancel.you.x", b"", reply=own, headers=spoofed | of(job))
    for subject in ("infer.results.me.other", "infer.stream.me.other"):
        stream_name = layout.RESULTS if "results" in subject else layout.STREAM
        await worker.nc.publish(f"$JS.API.DIRECT.GET.{stream_name}.{subject}", b"", reply=own)
    await worker.nc.publish(f"$JS.API.DIRECT.GET.{layout.CANCEL}.infer.cancel.you.x", b"", reply=own)
    await worker.nc.publish("$JS.API.STREAM.INFO.nothing", b"", reply=own)
    await worker.nc.publish("nobody.there", b"", reply=own)
    await worker.nc.publish(own, b"", headers=spoofed)
    await worker.nc.publish(own, b'{"error": {"code": "x", "message": "y", "retryable": false}}')
    await eventually(lambda: stream.ignored >= 9)
    assert not reading.done()
    await worker.send(own, *chunks[2:], headers=of(job))
    await worker.end(own, len(chunks), Submission=str(job.submission))
    await reading
    assert "".join(got) == "mine"
    assert "".join([text(event) for event in [e async for e in client.stream(job, timeout=5)]]) == "mine"


async def test_leaving_a_stream_early_leaves_the_job_alone(
    client: Client, worker: Responder, server: NatsServer
) -> None:
    job = await client.submit("chat", "m", BODY)
    await worker.send(f"infer.stream.me.{job.id}", *chunks_of("a")[:2], headers=of(job))
    async for _ in client.stream(job):
        await subscribed(server, f"infer.stream.me.{job.id}")
        break
    await subscribed(server, f"infer.stream.me.{job.id}", 0)
    other = await client.submit("chat", "m", BODY)
    await client.cancel(other)
    assert (await worker.cancel()).subject == f"infer.cancel.me.{other.id}"


async def test_a_cancel_names_the_submission_it_aims_at(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j")
    await client.cancel(job)
    assert (await worker.cancel()).headers["Infer-Submission"] == str(job.submission)
    await client.cancel("j")
    assert "Infer-Submission" not in ((await worker.cancel()).headers or {})
    assert await JetStream(client.bus).last(layout.CANCEL, "infer.cancel.me.j") is not None


async def test_a_cancel_that_is_refused_says_so_and_those_before_it_stay(client: Client) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j")
    await client.cancel(job)
    first = await JetStream(client.bus).last(layout.CANCEL, "infer.cancel.me.j")
    for _ in range(layout.CANCELS_KEPT - 1):
        await client.cancel("j")
    with pytest.raises(Overloaded, match=r"the cancel was refused, .* too many cancels of this id"):
        await client.cancel("j")
    assert (await JetStream(client.bus).read(layout.CANCEL, "infer.cancel.me.j"))[0] == first


async def test_nobody_pushes_the_cancels_of_others_out(client: Client) -> None:
    """Large marks of another owner made room for themselves, and a cancelled job ran."""
    await client.bus.js.purge_stream(layout.CANCEL)
    config = (await client.bus.js.stream_info(layout.CANCEL)).config
    config.max_bytes = 4096
    await client.bus.js.update_stream(config)
    await client.cancel("j")
    with pytest.raises(ApiError, match="message size exceeds"):
        await JetStream(client.bus).store("infer.cancel.other.big", b"x" * 2000)
    filling = [JetStream(client.bus).store(f"infer.cancel.other.{number}", b"") for number in range(100)]
    with pytest.raises(StreamFull):
        await asyncio.gather(*filling)
    with pytest.raises(Overloaded, match="the cancel was refused, the job goes on: there is no room"):
        await client.cancel("k")
    assert await JetStream(client.bus).last(layout.CANCEL, "infer.cancel.me.j") is not None


async def test_cancelling_a_stream_cancels_its_job(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    stream = client.stream(job)
    await stream.cancel()
    assert (await worker.cancel()).subject == f"infer.cancel.me.{job.id}"
    await worker.end(f"infer.stream.me.{job.id}", 0, "cancelled", Submission=str(job.submission))
    assert [event async for event in stream] == []
    assert stream.status == "cancelled"


async def test_a_result_is_waited_for(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY, job_id="j")
    waiting = asyncio.create_task(client.result(job))
    assert job.submission is not None
    await worker.store_result("me", job.id, "Paris", submission=job.submission)
    result = await waiting
    assert result.answer == chat_answer("Paris")
    assert (result.status, result.worker, result.attempt) == ("ok", "d1", 1)


async def test_a_result_that_is_an_error_raises_its_class(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    assert job.submission is not None
    error = {"code": "context_length_exceeded", "message": "too long"}
    await worker.store_result(
        "me", job.id, {"error": error, "job": job.id, "attempt": 1}, submission=job.submission
    )
    with pytest.raises(ContextLengthExceeded, match="too long"):
        await client.result(job)
    with pytest.raises(ContextLengthExceeded, match="too long"):
        await client.stream(job).answer()


async def test_a_cancelled_job_raises_cancelled_to_who_waits(client: Client, worker: Responder) -> None:
    job = await client.submit("chat", "m", BODY)
    assert job.submission is not None
    error = {"code": "cancelled", "message": "cancelled by its owner"}
    await worker.store_result(
        "me", job.id, {"error": error, "job": job.id, "attempt": 1}, submission=job.submission
    )
    with pytest.raises(Cancelled):
        await client.result(job)


async def test_waiting_for_a_result_has_an_end(client: Client) -> None:
    job = await client.submit("chat", "m", BODY)
    with pytest.raises(TimedOut, match="the job goes on"):
        await client.result(job, timeout=0.1)
    with pytest.raises(TimedOut, match="the job goes on"):
        await client.stream(job, timeout=0.1).answer()


async def test_workers_are_listed_and_models_with_someone_ready(client: Client) -> None:
    def info(worker: str, model: str, **more: Any) -> WorkerInfo:
        fields = {"role": "both", "state": "ready", "kinds": ["chat"]} | more
        return WorkerInfo(
            worker=worker, model=model, tokenizer=True, engine="e", version="0", host="h", started=0.0,
            load=Load(slots=1), **fields,
        )  # fmt: skip

    assert await client.workers() == []
    infos = [info("b", "m"), info("a", "m", role="prefill", kinds=[]), info("c", "n", state="failed")]
    for each in infos:
        key = f"$KV.{BUCKET}.{each.model}.{each.worker}"
        await JetStream(client.bus).store(key, codec.encode(each))
    await JetStream(client.bus).store(f"$KV.{BUCKET}.n.gone", b"", {"KV-Operation": "DEL"})
    assert [(w.worker, w.state) for w in await client.workers()] == [
        ("b", "ready"),
        ("a", "ready"),
        ("c", "failed"),
    ]
    assert await client.models() == ["m"]


@pytest.mark.faults
async def test_a_server_that_dies_and_forgets_the_stream_costs_the_reader_nothing(
    client: Client, worker: Responder, server: NatsServer
) -> None:
    """The stored stream was in the server's memory, and is gone with it; the result is on its disk."""
    job = await client.submit("chat", "m", BODY)
    got: list[str] = []
    reading = asyncio.create_task(read_into(got, client.stream(job)))
    chunks, subject = chunks_of(*"abcdefgh"), f"infer.stream.me.{job.id}"
    await worker.send(subject, *chunks[:4], headers=of(job))
    await eventually(lambda: "".join(got) == "abc")
    await server.kill()
    await server.restart()
    await eventually(lambda: worker.nc.is_connected and client.bus.connected, within=20)
    await worker.send(subject, *chunks[6:], headers=of(job))
    assert "".join(got) == "abc"
    assert job.submission is not None
    await worker.store_result("me", job.id, "abcdefgh", submission=job.submission)
    await worker.end(subject, len(chunks), Submission=str(job.submission))
    await asyncio.wait_for(reading, 20)
    assert "".join(got) == "abcdefgh"


@pytest.mark.faults
async def test_a_job_submitted_while_the_server_is_away_is_stored_once(
    client: Client, server: NatsServer
) -> None:
    await server.kill()
    submitting = asyncio.create_task(client.submit("chat", "m", BODY))
    await eventually(lambda: not client.bus.connected)
    await server.restart()
    job = await submitting
    assert not job.duplicate
    assert (await client.bus.js.stream_info(layout.JOBS)).state.messages == 1


async def test_a_job_whose_acknowledgement_was_lost_is_stored_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, lost = client.bus.request, list[Message]()

    async def requesting(*arguments: Any, **options: Any) -> Message:
        answer = await request(*arguments, **options)
        if not lost:
            lost.append(answer)
            raise BusUnavailable("no answer")
        return answer

    monkeypatch.setattr(client.bus, "request", requesting)
    assert not (await client.submit("chat", "m", BODY)).duplicate
    assert (await client.bus.js.stream_info(layout.JOBS)).state.messages == 1
