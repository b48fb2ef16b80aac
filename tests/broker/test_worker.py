"""A worker as its callers see it: bare nats-py on one side, a real worker process on the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
PARIS = 'tokenizer = true\n[[rules]]\ntext = "The capital of France is Paris."\ncached_tokens = 5\n'
REQUEST = "infer.request.scripted"
JOBS = "infer.jobs.scripted.batch.acme"
LAYOUTS = {"both": ("both",), "pair": ("prefill", "decode")}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The same behaviour with one worker of the role both, and with prefill and decode apart."""
    return LAYOUTS[str(request.param)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(
    layout: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[NatsServer, Fleet]]:
    directory = tmp_path_factory.mktemp("fleet")
    async with (
        NatsServer(directory / "nats", sync_interval=None) as server,
        fleet(server, directory) as found,
    ):
        for role in layout:
            await found.start(role, PARIS)  # type: ignore[arg-type]
        yield server, found


@pytest_asyncio.fixture(loop_scope="module")
async def nc(workers: tuple[NatsServer, Fleet]) -> AsyncIterator[Client]:
    client = await nats.connect(workers[0].url)
    yield client
    await client.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(nc: Client, subject: str, body: Any, headers: Mapping[str, str] | None = None) -> list[Msg]:
    """All messages of an answer, the end mark last."""
    inbox, messages = nc.new_inbox(), asyncio.Queue[Msg]()

    async def received(message: Msg) -> None:
        messages.put_nowait(message)

    subscription = await nc.subscribe(inbox, cb=received)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    await nc.publish(subject, data, reply=inbox, headers=dict(headers or {}) or None)
    found: list[Msg] = []
    async with asyncio.timeout(10):
        while not found or found[-1].data:
            found.append(await messages.get())
    await subscription.unsubscribe()
    return found


def read(message: Msg) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(message.data)
    return decoded


async def error(nc: Client, kind: str, body: Any, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The error of an answer that is nothing but one."""
    answer = await ask(nc, f"{REQUEST}.{kind}", body, headers)
    assert len(answer) == 2
    assert answer[1].headers is not None
    assert answer[1].headers["Infer-Status"] == "error"
    found: dict[str, Any] = read(answer[0])["error"]
    return found


async def test_a_plain_request_shows_the_whole_answer(nc: Client) -> None:
    answer = read(await nc.request(f"{REQUEST}.chat", json.dumps(CHAT).encode(), timeout=10))
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


async def test_a_streamed_chat_comes_in_order_with_one_role_and_one_finish(
    nc: Client, layout: tuple[str, ...]
) -> None:
    *chunks, end = await ask(nc, f"{REQUEST}.chat", CHAT | {"stream": True})
    bodies = [read(chunk) for chunk in chunks]
    assert [body["seq"] for body in bodies] == list(range(len(bodies)))
    deltas = [body["choices"][0]["delta"] for body in bodies]
    assert ["role" in delta for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert "".join(delta.get("content") or "" for delta in deltas) == "The capital of France is Paris."
    assert [body["choices"][0]["finish_reason"] for body in bodies] == [None] * (len(bodies) - 1) + ["stop"]
    assert end.headers is not None
    assert end.headers["Infer-Status"] == "ok"
    assert end.headers["Infer-Chunks"] == str(len(chunks))
    assert ("Infer-Prefill-Worker" in end.headers) == ("prefill" in layout)


async def test_tokens_stream_unless_told_otherwise(nc: Client) -> None:
    *chunks, _ = await ask(nc, f"{REQUEST}.tokens", {"token_ids": [1, 2], "max_tokens": 4})
    assert [token for chunk in chunks for token in read(chunk)["token_ids"]] == list(b"The ")
    assert read(chunks[-1])["finish_reason"] == "length"
    assert read(chunks[-1])["usage"]["completion_tokens"] == 4
    whole, _ = await ask(nc, f"{REQUEST}.tokens", {"token_ids": [1, 2], "max_tokens": 4, "stream": False})
    assert read(whole)["choices"][0]["token_ids"] == list(b"The ")


async def test_msgpack_requests_get_msgpack_answers(nc: Client) -> None:
    body = msgspec.msgpack.encode({"token_ids": [1, 2], "max_tokens": 2})
    *chunks, end = await ask(nc, f"{REQUEST}.tokens", body, {"Content-Type": "application/msgpack"})
    assert [msgspec.msgpack.decode(chunk.data)["seq"] for chunk in chunks] == [0, 1]
    assert end.headers is not None
    assert end.headers["Content-Type"] == "application/msgpack"
    chat = msgspec.msgpack.encode(CHAT | {"stream": True})
    first, *_ = await ask(nc, f"{REQUEST}.chat", chat, {"Content-Type": "application/msgpack"})
    assert msgspec.msgpack.decode(first.data)["object"] == "chat.completion.chunk"


async def test_completions_answer_a_text_prompt(nc: Client) -> None:
    answer, _ = await ask(nc, f"{REQUEST}.completions", {"prompt": "The", "max_tokens": 3})
    assert read(answer)["choices"][0]["text"] == "The"


async def test_three_choices_are_three_choices(nc: Client) -> None:
    *chunks, _ = await ask(nc, f"{REQUEST}.chat", CHAT | {"n": 3, "max_tokens": 2, "stream": True})
    choices = [choice for chunk in chunks for choice in read(chunk)["choices"]]
    finished = [choice["index"] for choice in choices if choice["finish_reason"]]
    assert sorted(finished) == [0, 1, 2]
    for index in range(3):
        text = "".join(c["delta"].get("content") or "" for c in choices if c["index"] == index)
        assert text == "Th"


async def test_unknown_fields_are_named_in_the_answers_warnings(nc: Client) -> None:
    answer, _ = await ask(nc, f"{REQUEST}.chat", CHAT | {"frobnicate": 1})
    assert read(answer)["warnings"] == ["unknown field 'frobnicate' ignored"]
    first, *_ = await ask(nc, f"{REQUEST}.tokens", {"token_ids": [1], "frobnicate": 1, "max_tokens": 1})
    assert read(first)["warnings"] == ["unknown field 'frobnicate' ignored"]


@pytest.mark.parametrize(
    ("kind", "body", "code", "param"),
    [
        pytest.param("chat", b"{", "undecodable_body", None, id="truncated"),
        pytest.param("chat", b'{"messages":"\xff"}', "undecodable_body", None, id="f8-utf8"),
        pytest.param("chat", b"[" * 5000, "undecodable_body", None, id="nesting"),
        pytest.param("tokens", CHAT, "wrong_kind", "token_ids", id="f10-kind"),
        pytest.param("chat", {"messages": []}, "invalid_request", "messages", id="f16-empty"),
        pytest.param("chat", {"messages": [{}]}, "invalid_request", "messages[0].role", id="f16-role"),
        pytest.param(
            "chat", {"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content", id="f23"
        ),
        pytest.param("chat", CHAT | {"model": "other"}, "model_not_found", "model", id="model"),
        pytest.param("tokens", {"token_ids": []}, "invalid_request", "token_ids", id="no-ids"),
        pytest.param("tokens", {"token_ids": [2**40]}, "invalid_request", "token_ids[0]", id="vocabulary"),
        pytest.param("tokens", {"token_ids": [-1]}, "invalid_request", "token_ids[0]", id="negative-id"),
        pytest.param("tokens", {"token_ids": [1] * 40_000}, "context_length_exceeded", None, id="c6-context"),
        pytest.param(
            "tokens", {"token_ids": [1], "temperature": 2.1}, "invalid_request", "temperature", id="f6"
        ),
        pytest.param("tokens", {"token_ids": [1], "seed": 2**63}, "invalid_request", "seed", id="seed"),
        pytest.param("tokens", {"token_ids": [1], "max_tokens": 0}, "invalid_request", "max_tokens", id="f5"),
        pytest.param(
            "tokens",
            {"token_ids": [1], "stop_token_ids": [1] * 100_000},
            "invalid_request",
            "stop_token_ids",
            id="f3",
        ),
    ],
)
async def test_a_callers_mistake_gets_its_code_and_the_field(
    nc: Client, kind: str, body: Any, code: str, param: str | None
) -> None:
    found = await error(nc, kind, body)
    assert found["code"] == code
    assert found.get("retryable", False) is False
    if param is not None:
        assert found["param"] == param


async def test_a_wrong_content_type_is_told_in_json(nc: Client) -> None:
    found = await error(nc, "chat", CHAT, {"Content-Type": "text/html"})
    assert (found["code"], found["param"]) == ("unsupported_content_type", "Content-Type")


async def test_an_unknown_model_has_no_responders(nc: Client) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await nc.request("infer.request.other.chat", b"{}", timeout=5)


@pytest.mark.parametrize(
    "reply", ["$JS.API.STREAM.DELETE.INFER_JOBS", "infer.jobs.scripted.batch.x.chat", "other"]
)
async def test_a_live_request_cannot_make_a_worker_publish_elsewhere(
    nc: Client, workers: tuple[NatsServer, Fleet], reply: str
) -> None:
    heard: list[str] = []

    async def received(message: Msg) -> None:
        heard.append(message.subject)

    subscription = await nc.subscribe(reply, cb=received)
    await nc.publish(f"{REQUEST}.chat", json.dumps(CHAT).encode(), reply=reply)
    await nc.request(f"{REQUEST}.chat", json.dumps(CHAT).encode(), timeout=10)
    await nc.flush()
    assert heard == []
    assert (await nc.jetstream().stream_info("INFER_JOBS")).config.name == "INFER_JOBS"
    await subscription.unsubscribe()


async def test_a_job_streams_stores_its_result_and_leaves_the_queue(nc: Client) -> None:
    js = nc.jetstream()
    subscription = await js.subscribe("infer.stream.acme.j1")
    ack = await js.publish(f"{JOBS}.chat", json.dumps(CHAT).encode(), headers={"Nats-Msg-Id": "j1"})
    messages: list[Msg] = []
    while not messages or messages[-1].data:
        messages.append(await subscription.next_msg(timeout=10))
    assert {message.headers["Infer-Submission"] for message in messages if message.headers} == {str(ack.seq)}
    tokens = [token for message in messages[:-1] for token in read(message).get("token_ids", [])]
    assert bytes(tokens) == b"The capital of France is Paris."
    result = await js.get_last_msg("INFER_RESULTS", "infer.results.acme.j1")
    assert result.data is not None
    assert json.loads(result.data)["choices"][0]["message"]["content"] == "The capital of France is Paris."

    async def gone() -> bool:
        return bool((await js.stream_info("INFER_JOBS")).state.messages == 0)

    await eventually(gone)


async def test_a_job_submitted_twice_runs_once(nc: Client) -> None:
    js = nc.jetstream()
    acks = [
        await js.publish(f"{JOBS}.tokens", b'{"token_ids":[1]}', headers={"Nats-Msg-Id": "twice"})
        for _ in range(2)
    ]
    assert [bool(ack.duplicate) for ack in acks] == [False, True]
    assert acks[0].seq == acks[1].seq


async def test_a_bad_job_gets_an_error_as_its_result(nc: Client) -> None:
    js = nc.jetstream()
    await js.publish(f"{JOBS}.tokens", b'{"token_ids":[]}', headers={"Nats-Msg-Id": "bad"})

    async def result() -> Any:
        try:
            return await js.get_last_msg("INFER_RESULTS", "infer.results.acme.bad")
        except nats.js.errors.NotFoundError:
            return None

    found = await eventually(result)
    assert json.loads(found.data)["error"]["code"] == "invalid_request"
    assert found.headers["Infer-Status"] == "error"


async def test_nats_micro_sees_the_workers(nc: Client, layout: tuple[str, ...]) -> None:
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    await nc.publish("$SRV.INFO", reply=inbox)
    found = [read(await subscription.next_msg(timeout=5)) for _ in layout]
    assert {service["name"] for service in found} == {f"inferbus-{role}" for role in layout}
    assert all(service["metadata"]["model"] == "scripted" for service in found)


async def test_nothing_is_left_in_the_workers_after_all_this(workers: tuple[NatsServer, Fleet]) -> None:
    await workers[1].idle()
