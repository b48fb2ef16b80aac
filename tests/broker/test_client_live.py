"""Live requests through the client, against a real server and a worker that does what the test says."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest
from nats.aio.msg import Msg

from inferbus.schemas.answers import TokenAnswer, TokenChunk, Usage
from inferbus.schemas.errors import (
    BusUnavailable,
    Cancelled,
    InferbusError,
    InvalidRequest,
    NoWorker,
    PayloadTooLarge,
)
from inferbus.workers.bus.connection import bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.client import AnswerLost, Client, ConnectionLost, Stats, TimedOut, bulk, live, text
from inferbus.workers.client.liveness import MAX_UNANSWERED
from inferbus.workers.stack.server import NatsServer
from tests.support.answers import USAGE, chat_answer
from tests.support.eventually import eventually
from tests.support.responder import Responder, chunks_of, read_into, responder, tokens_of

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer() as found:
        yield found


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[Responder]:
    async with responder(server.url) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url, timeout=5) as found:
        yield found


async def test_a_chat_streams_and_tells_who_served_it(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO, max_tokens=5, job_id="j", deadline=30)
    request = await worker.request()
    assert request.subject == "infer.request.m.chat"
    assert json.loads(request.data) == {
        "messages": HELLO,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert request.headers == {
        "Infer-Job-Id": "j",
        "Content-Type": "application/json",
        "Infer-Deadline": "30.0",
        "Infer-Resume": ANY,
    }
    await worker.answer(request.reply, "Par", "is")
    assert "".join([text(chunk) async for chunk in stream]) == "Paris"
    assert (stream.status, stream.worker, stream.prefill_worker) == ("ok", "d1", "p1")
    assert await stream.answer() == chat_answer("Paris")
    stats = Stats.of(stream)
    assert stats.usage == msgspec.convert(USAGE, Usage)
    assert "prefill p1 → decode d1" in stats.line()


async def test_awaiting_a_request_gives_the_whole_answer(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO)
    await worker.answer((await worker.request()).reply, "Par", "is")
    assert await stream == chat_answer("Paris")


async def test_a_client_that_is_not_connected_says_how_to_connect(server: NatsServer) -> None:
    with pytest.raises(TypeError, match=r"Client\.connect"):
        Client(server.url)  # type: ignore[arg-type]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize("content_type", ["application/json", "application/msgpack"])
@pytest.mark.parametrize(
    "value", ["\ud800", CYCLE, object(), {"a": ["\ud800"]}], ids=["surrogate", "cycle", "object", "inner"]
)
async def test_a_value_that_cannot_be_sent_is_an_error_that_names_its_field(
    server: NatsServer, content_type: str, value: Any
) -> None:
    async with Client.connect(server.url, content_type=content_type) as client:
        with pytest.raises(InvalidRequest, match="'user' cannot be sent") as raised:
            client.chat("m", HELLO, user=value)
        assert raised.value.param == "user"
        with pytest.raises(InvalidRequest, match="'user' cannot be sent"):
            await client.submit("chat", "m", {"messages": HELLO, "user": value})


async def test_a_number_that_is_too_large_is_an_error_that_names_its_field(server: NatsServer) -> None:
    async with Client.connect(server.url, content_type="application/msgpack") as client:
        with pytest.raises(
            InvalidRequest, match="'seed' cannot be sent: a number in it has more than 64 bits"
        ):
            client.chat("m", HELLO, seed=2**70)


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), 10**400])
async def test_a_deadline_that_is_no_moment_is_refused(client: Client, deadline: float) -> None:
    with pytest.raises(InvalidRequest, match="deadline"):
        client.chat("m", HELLO, deadline=deadline)


async def test_many_requests_are_answered_in_order_and_sent_again_where_that_may_help(
    client: Client, worker: Responder
) -> None:
    refused: set[str] = set()

    async def serve() -> None:
        while True:
            request = await worker.requests.get()
            prompt = json.loads(request.data)["messages"][0]["content"]
            if prompt == "wrong":
                error = {"code": "invalid_request", "message": "no", "retryable": False}
                await worker.send(request.reply, {"error": error, "job": "j", "attempt": 1})
                await worker.end(request.reply, 1, "error")
            elif prompt not in refused:
                refused.add(prompt)
                error = {"code": "overloaded", "message": "all slots are busy", "retryable": True}
                await worker.send(request.reply, {"error": error, "job": "j", "attempt": 1})
                await worker.end(request.reply, 1, "error")
            else:
                await worker.answer(request.reply, prompt)

    serving = asyncio.create_task(serve())
    prompts = [*map(str, range(20)), "wrong", "last"]
    bodies = ({"messages": [{"role": "user", "content": prompt}]} for prompt in prompts)
    answers = [answer async for answer in client.map("chat", "m", bodies, concurrency=4)]
    serving.cancel()
    [error] = [answer for answer in answers if isinstance(answer, InferbusError)]
    assert answers.index(error) == prompts.index("wrong")
    assert isinstance(error, InvalidRequest)
    assert [answer for answer in answers if answer is not error] == [
        chat_answer(prompt) for prompt in prompts if prompt != "wrong"
    ]


async def test_no_more_requests_are_in_flight_than_asked_for(client: Client, worker: Responder) -> None:
    bodies = ({"messages": HELLO} for _ in range(10))
    collecting = asyncio.create_task(
        asyncio.wait_for(_collect(client.map("chat", "m", bodies, concurrency=3)), 20)
    )
    for left in range(10, 0, -1):
        await eventually(lambda left=left: worker.requests.qsize() == min(3, left))
        await worker.answer((await worker.request()).reply, "a")
    assert await collecting == [chat_answer("a")] * 10


async def _collect(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


async def test_many_requests_that_nobody_takes_end_with_what_to_do_instead(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "FIRST_BACKOFF", 0.01)
    bodies = [{"messages": HELLO}] * 3
    answers = await _collect(client.map("chat", "nobody", bodies, max_attempts=2))
    assert [type(answer) for answer in answers] == [NoWorker] * 3
    assert "a durable job waits" in str(answers[0])


async def test_an_answer_can_be_had_in_one_piece(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO, stream=False)
    request = await worker.request()
    assert json.loads(request.data)["stream"] is False
    await worker.send(request.reply, chat_answer("Paris"))
    await worker.end(request.reply, 1)
    assert await stream.answer() == chat_answer("Paris")
    assert stream.worker == "d1"


async def test_a_lost_end_mark_does_not_hide_a_whole_answer(
    client: Client, worker: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "END_GRACE", 0.05)
    stream = client.chat("m", HELLO, stream=False)
    await worker.send((await worker.request()).reply, chat_answer("Paris"))
    assert await stream.answer() == chat_answer("Paris")
    assert stream.worker is None


async def test_tokens_come_as_structs_in_messagepack(server: NatsServer, worker: Responder) -> None:
    async with Client.connect([server.url], content_type="application/msgpack") as client:
        stream = client.tokens("m", [1, 2, 3])
        request = await worker.request()
        assert msgspec.msgpack.decode(request.data) == {"token_ids": [1, 2, 3], "stream": True}
        sent = tokens_of([4], [5, 6])
        await worker.send(request.reply, *sent, kind="application/msgpack")
        await worker.end(request.reply, 2)
        chunks = [chunk async for chunk in stream]
        assert all(isinstance(chunk, TokenChunk) for chunk in chunks)
        assert chunks == sent
        answer = await stream.answer()
        assert isinstance(answer, TokenAnswer)
        assert answer.choices[0].token_ids == [4, 5, 6]


async def test_completions_take_text_and_token_ids(client: Client, worker: Responder) -> None:
    streams = [client.complete("m", "Once"), client.complete("m", (1, 2))]
    bodies = [json.loads((await worker.request()).data)["prompt"] for _ in streams]
    assert bodies == ["Once", [1, 2]]


async def test_streams_side_by_side_do_not_mix(client: Client, worker: Responder) -> None:
    first, second = client.chat("m", HELLO), client.chat("m", HELLO)
    one, two = await worker.request(), await worker.request()
    for a, b in zip(chunks_of("1", "1"), chunks_of("2", "2"), strict=True):
        await worker.send(one.reply, a)
        await worker.send(two.reply, b)
    await worker.end(one.reply, 5)
    await worker.end(two.reply, 5)
    assert [await first.answer(), await second.answer()] == [chat_answer("11"), chat_answer("22")]


async def test_without_a_worker_the_answer_is_immediate(client: Client) -> None:
    with pytest.raises(NoWorker):
        # Without a timeout nothing but the server's answer ends this.
        await client.chat("nobody", HELLO, timeout=None).answer()


async def test_an_error_raises_its_class_after_what_came_before_it(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO)
    reply = (await worker.request()).reply
    error = {"code": "invalid_request", "message": "top_p must be at most 1", "param": "top_p"}
    await worker.send(reply, *chunks_of("a")[:2], {"error": error, "job": "j", "attempt": 1})
    await worker.end(reply, 3, "error")
    seen: list[str] = []
    with pytest.raises(InvalidRequest, match="top_p") as raised:
        await read_into(seen, stream)
    assert "".join(seen) == "a"
    assert raised.value.param == "top_p"
    assert stream.worker == "d1"
    with pytest.raises(InvalidRequest):
        await stream.answer()


async def test_a_lost_chunk_that_nobody_has_is_told_and_never_a_hole(
    client: Client, worker: Responder
) -> None:
    stream = client.chat("m", HELLO, job_id="j", timeout=0.5)
    reply = (await worker.request()).reply
    sent = chunks_of("a", "b", "c")
    await worker.send(reply, sent[0], sent[1], sent[3])
    seen: list[str] = []
    with pytest.raises(AnswerLost):
        await read_into(seen, stream)
    assert "".join(seen) == "a"
    assert (await worker.cancel()).subject == "infer.cancel.live.j"
    with pytest.raises(AnswerLost):
        await stream.answer()


Say = dict[str, str]


async def answering_questions(
    worker: Responder, job: str, answer: Callable[[str | None], tuple[list[Any], Say]]
) -> list[str | None]:
    """Answers questions about a request with messages, then headers; returns their `Infer-From`."""
    asked: list[str | None] = []

    async def question(message: Msg) -> None:
        fields = message.headers or {}
        assert fields["Infer-Resume"]
        asked.append(fields.get("Infer-From"))
        again, said = answer(asked[-1])
        await worker.send(message.reply, *again)
        await worker.nc.publish(message.reply, b"", headers={"Infer-Worker": "d1", **said})

    await worker.nc.subscribe(f"infer.alive.live.{job}", cb=question)
    await worker.nc.flush()
    return asked


async def test_a_lost_chunk_is_asked_for_and_comes_in_its_place(client: Client, worker: Responder) -> None:
    sent = chunks_of("a", "b", "c")
    asked = await answering_questions(
        worker, "j", lambda _number: (sent[2:4], {"Infer-From": "2", "Infer-Next": "4"})
    )
    stream = client.chat("m", HELLO, job_id="j")
    reading = asyncio.ensure_future(stream.answer())
    reply = (await worker.request()).reply
    await worker.send(reply, *sent[:2], sent[3])
    await eventually(lambda: asked)
    await worker.send(reply, *sent[4:])
    await worker.end(reply, len(sent))
    assert await reading == chat_answer("abc")
    assert asked == ["2"]


async def test_an_end_that_got_lost_is_noticed_and_asked_for(
    client: Client, worker: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "ASK_AFTER", 0.05)
    sent = chunks_of("a", "b", "c")

    def answer(number: str | None) -> tuple[list[Any], Say]:
        said = {"Infer-Next": str(len(sent))}
        return ([], said) if number is None else (sent[int(number) :], said | {"Infer-From": number})

    asked = await answering_questions(worker, "j", answer)
    stream = client.chat("m", HELLO, job_id="j")
    seen: list[str] = []
    reading = asyncio.ensure_future(read_into(seen, stream))
    reply = (await worker.request()).reply
    await worker.send(reply, *sent[:3])
    await eventually(lambda: len(asked) > 1)
    await eventually(lambda: "".join(seen) == "abc")
    await worker.end(reply, len(sent))
    await reading
    assert asked[-2:] == [None, "3"]


@pytest.mark.parametrize(
    "said", [{}, {"Infer-From": "3", "Infer-Next": "4"}], ids=["keeps nothing", "dropped"]
)
async def test_a_lost_chunk_that_its_worker_has_not_got_is_told_at_once(
    client: Client, worker: Responder, said: Say
) -> None:
    sent = chunks_of("a", "b", "c")
    await answering_questions(worker, "j", lambda _number: ([], said))
    seen: list[str] = []
    reading = asyncio.ensure_future(read_into(seen, client.chat("m", HELLO, job_id="j", timeout=1000)))
    reply = (await worker.request()).reply
    await worker.send(reply, *sent[:2], sent[3])
    with pytest.raises(AnswerLost) as caught:
        await reading
    assert caught.value.retryable
    assert "".join(seen) == "a"


async def test_leaving_the_loop_early_cancels(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO, job_id="j")
    await worker.send((await worker.request()).reply, *chunks_of("a", "b"))
    async for _ in stream:
        break
    assert (await worker.cancel()).subject == "infer.cancel.live.j"
    with pytest.raises(Cancelled):
        await stream.answer()


async def test_leaving_the_context_early_cancels(client: Client, worker: Responder) -> None:
    async with client.chat("m", HELLO, job_id="j"):
        await worker.request()
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_an_exception_in_the_loop_cancels(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO, job_id="j")
    await worker.send((await worker.request()).reply, *chunks_of("a", "b"))

    async def stumble() -> None:
        async for _ in stream:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stumble()
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_a_cancelled_task_cancels_its_request(client: Client, worker: Responder) -> None:
    task = asyncio.create_task(client.chat("m", HELLO, job_id="j").answer())
    await worker.request()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_a_stream_that_nobody_reads_is_cancelled(client: Client, worker: Responder) -> None:
    client.chat("m", HELLO, job_id="j")
    gc.collect()
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_a_stream_that_another_thread_drops_is_cancelled(client: Client, worker: Responder) -> None:
    # In asyncio's debug mode, what may only be done on the loop's own thread raises on any other.
    asyncio.get_running_loop().set_debug(True)
    streams = [client.chat("m", HELLO, job_id="j")]
    await asyncio.to_thread(streams.clear)
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_nothing_is_left_of_streams_that_have_ended(client: Client, worker: Responder) -> None:
    for ending in ("ok", "error", "left"):
        stream = client.chat("m", HELLO)
        reply = (await worker.request()).reply
        if ending == "ok":
            await worker.answer(reply, "a")
            await stream.answer()
        elif ending == "error":
            await worker.end(reply, 0, "cancelled")
            with pytest.raises(Cancelled):
                await stream.answer()
        else:
            await stream.aclose()
    assert client.bus.open_inboxes == 0


async def test_a_finished_stream_is_not_cancelled_when_it_is_left(client: Client, worker: Responder) -> None:
    async with client.chat("m", HELLO, job_id="done") as stream:
        await worker.answer((await worker.request()).reply, "a")
        await stream.answer()
    client.chat("m", HELLO, job_id="dropped")
    gc.collect()
    assert (await worker.cancel()).subject == "infer.cancel.live.dropped"


async def test_cancel_ends_the_stream_quietly_with_what_was_on_its_way(
    client: Client, worker: Responder
) -> None:
    stream = client.chat("m", HELLO, job_id="j")
    reply = (await worker.request()).reply
    await worker.send(reply, *chunks_of("a", "b")[:2])
    await stream.cancel()
    await worker.cancel()
    await worker.end(reply, 2, "cancelled")
    assert "".join([text(chunk) async for chunk in stream]) == "a"
    assert stream.status == "cancelled"
    with pytest.raises(Cancelled):
        await stream.answer()


async def test_silence_is_given_up_after_the_timeout(client: Client, worker: Responder) -> None:
    stream = client.chat("m", HELLO, job_id="j", timeout=0.1)
    with pytest.raises(TimedOut, match=r"0\.1 s"):
        await stream.answer()
    assert (await worker.cancel()).subject == "infer.cancel.live.j"


async def test_the_timeout_is_for_silence_not_for_the_whole(client: Client, worker: Responder) -> None:
    timeout, pause = 1.5, 0.3
    sent = chunks_of("a", "b", "c", "d")
    assert len(sent) * pause > timeout
    stream = client.chat("m", HELLO, timeout=timeout)
    reply = (await worker.request()).reply

    async def slowly() -> None:
        for chunk in sent:
            await worker.send(reply, chunk)
            await asyncio.sleep(pause)
        await worker.end(reply, len(sent))

    sending = asyncio.create_task(slowly())
    assert await stream.answer() == chat_answer("abcd")
    await sending


async def test_while_a_worker_works_on_it_silence_is_no_timeout(client: Client, worker: Responder) -> None:
    asked = asyncio.Event()

    async def alive(message: Msg) -> None:
        await worker.nc.publish(message.reply, b"", headers={"Infer-Worker": "d1"})
        if next(questions) > 8:
            asked.set()

    questions = itertools.count(1)
    await worker.nc.subscribe("infer.alive.live.j", cb=alive)
    await worker.nc.flush()
    stream = client.chat("m", HELLO, job_id="j", timeout=0.4, stream=False)
    reading = asyncio.ensure_future(stream.answer())
    reply = (await worker.request()).reply
    # Asked every 0.1 seconds: by the ninth question the timeout has passed more than twice.
    async with asyncio.timeout(10):
        await asked.wait()
    assert not reading.done()
    await worker.send(reply, chat_answer("at last"))
    await worker.end(reply, 1)
    assert await reading == chat_answer("at last")


async def test_a_request_that_nobody_is_there_for_is_sent_again_for_a_moment(
    client: Client, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "NO_RESPONDERS_PAUSES", (0.05,) * 100)
    answer = asyncio.ensure_future(client.chat("m", HELLO).answer())
    async with responder(server.url) as worker:
        await worker.answer((await worker.request()).reply, "here")
        assert await answer == chat_answer("here")


async def test_somebodys_stream_of_requests_is_named_and_does_not_answer(
    client: Client, worker: Responder
) -> None:
    await worker.nc.jetstream().add_stream(name="AUDIT", subjects=["infer.request.>"])
    stream = client.chat("m", HELLO)
    await worker.answer((await worker.request()).reply, "a", "b")
    assert await stream.answer() == chat_answer("ab")
    with pytest.raises(TimedOut, match="the NATS stream AUDIT stores such requests"):
        await client.chat("nobody", HELLO, timeout=0.5).answer()


async def test_a_request_over_the_servers_limit_is_refused_at_once(client: Client, worker: Responder) -> None:
    with pytest.raises(PayloadTooLarge):
        client.complete("m", "x" * (client.bus.max_payload + 1))
    assert client.bus.open_inboxes == 0
    stream = client.chat("m", HELLO)
    await worker.answer((await worker.request()).reply, "still here")
    assert await stream.answer() == chat_answer("still here")


async def test_closing_the_client_ends_its_streams(server: NatsServer, worker: Responder) -> None:
    client = await Client.connect(server.url)
    reading = asyncio.create_task(client.chat("m", HELLO).answer())
    await worker.request()
    await client.close()
    with pytest.raises(BusUnavailable):
        await reading


async def test_a_request_without_permission_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "DENIED_AFTER", 0.05)
    users = 'authorization { users: [{user: "u", password: "p", permissions: {publish: "nothing"}}] }'
    async with NatsServer(extra=users) as server:
        url = server.url.replace("//", "//u:p@")
        async with Client.connect(url, timeout=3) as client:
            with pytest.raises(NotPermitted, match=r"infer\.request\.m\.chat"):
                await client.chat("m", HELLO).answer()


async def test_a_program_without_logging_of_its_own_hears_of_nothing_but_trouble(
    server: NatsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Client.connect(server.url):
        pass
    assert capfd.readouterr() == ("", "")


async def test_without_a_server_connecting_says_so() -> None:
    with pytest.raises(BusUnavailable):
        async with Client.connect("nats://127.0.0.1:1"):
            raise AssertionError("unreachable")


@pytest.mark.faults
async def test_a_server_that_dies_in_mid_stream_never_leaves_a_hole(
    server: NatsServer, worker: Responder
) -> None:
    async with Client.connect(server.url, timeout=5) as client:
        stream = client.chat("m", HELLO)
        reply = (await worker.request()).reply
        sent = chunks_of(*"abcdefgh")
        await worker.send(reply, *sent[:4])
        got: list[str] = []
        reading = asyncio.create_task(read_into(got, stream))
        await eventually(lambda: "".join(got) == "abc")
        await server.kill()
        await server.restart()
        await client.bus.until_connected()
        await eventually(lambda: worker.nc.is_connected, within=20)
        # What the worker sent meanwhile is gone.
        await worker.send(reply, *sent[6:])
        with pytest.raises(ConnectionLost):
            await reading
        assert "".join(got) == "abc"


@pytest.mark.faults
async def test_after_a_lost_connection_the_patience_is_not_shortened(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says that he works on it, as the worker is not back yet: that alone ends nothing."""
    monkeypatch.setattr(live, "ASK_AFTER", 0.05)
    monkeypatch.setattr(live, "ASK_EVERY", 0.05)
    monkeypatch.setattr(bus, "SETTLING", 0.1)
    questions: list[Msg] = []

    async def alive(message: Msg) -> None:
        questions.append(message)

    async with responder(server.url) as worker, Client.connect(server.url, timeout=60) as client:
        await worker.nc.subscribe("infer.alive.live.*", cb=alive)
        answer = asyncio.ensure_future(client.chat("m", HELLO).answer())
        request = await worker.request()
        await server.kill()
        await server.restart()
        await eventually(lambda: len(questions) > 2 * MAX_UNANSWERED, within=30)
        assert not answer.done()
        await worker.answer(request.reply, "still here")
        assert await answer == chat_answer("still here")
