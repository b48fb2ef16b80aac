"""Kinds that are computed in one piece: embeddings and the tokenizer, over NATS and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from inferbus.schemas.answers import EmbeddingsAnswer, TokenizeAnswer
from inferbus.schemas.errors import (
    CallerError,
    ContextLengthExceeded,
    InvalidRequest,
    NotSupported,
    WrongKind,
)
from inferbus.workers.cli import main
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet
from tests.support.gateway import caller, gateway

SCRIPT = """
embedding = 4
context_length = 64
vocabulary = 300
[[rules]]
user = "fails-once"
[rules.fault]
do = "fail"
times = 1
[[rules]]
user = "hangs"
[rules.fault]
do = "hang"
"""
MODEL = "vectors"
TALKER = "talker"
HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_interval=None) as found:
        yield found


@asynccontextmanager
async def serving(server: NatsServer, folder: Path, model: str, *scripts: str) -> AsyncIterator[Fleet]:
    """Workers of one model, one for each script."""
    async with fleet(server, folder, model=model) as found:
        await asyncio.gather(*(found.start("both", script, served_model=model) for script in scripts))
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """An embedding model's; beside it is one that generates."""
    folder = tmp_path_factory.mktemp("computed")
    async with serving(server, folder, MODEL, SCRIPT) as found, serving(server, folder, TALKER, ""):
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server: NatsServer, workers: Fleet) -> AsyncIterator[Client]:
    async with Client.connect(server.url, timeout=20) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(server: NatsServer, workers: Fleet) -> AsyncIterator[str]:
    async with gateway(server.url) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(url) as found:
        yield found


def vectors(answer: EmbeddingsAnswer) -> list[Any]:
    return [each.embedding for each in answer.data]


async def test_texts_and_token_ids_become_vectors_in_the_order_of_the_inputs(client: Client) -> None:
    answer = await client.embeddings(MODEL, ["\x00\x00", "\x00\x01", "\x03"])
    root = 0.5**0.5
    assert vectors(answer) == [[1.0, 0.0, 0.0, 0.0], pytest.approx([root, root, 0, 0]), [0.0, 0.0, 0.0, 1.0]]
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.model == MODEL
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (5, 5)
    assert vectors(await client.embeddings(MODEL, [[0, 0], [0, 1], [3]])) == vectors(answer)
    assert vectors(await client.embeddings(MODEL, [3])) == [[0.0, 0.0, 0.0, 1.0]]


async def test_the_command_prints_the_vector_of_a_text(
    workers: Fleet, server: NatsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERBUS_NATS_URL", server.url)
    assert await asyncio.to_thread(main, ("embeddings", MODEL, "\x03")) == 0
    assert json.loads(capsys.readouterr().out)["data"][0]["embedding"] == [0.0, 0.0, 0.0, 1.0]


async def test_vectors_come_as_base64_and_as_messagepack_too(client: Client, server: NatsServer) -> None:
    (written,) = vectors(await client.embeddings(MODEL, "\x00\x01", encoding_format="base64"))
    assert struct.unpack("<4f", base64.b64decode(written)) == pytest.approx([0.5**0.5, 0.5**0.5, 0, 0])
    async with Client.connect(server.url, content_type="application/msgpack") as packed:
        answers = [await each.embeddings(MODEL, "\x03", job_id="p") for each in (client, packed)]
        assert answers[0] == answers[1]


async def test_a_job_has_the_vectors_as_its_one_result(client: Client) -> None:
    job = await client.submit("embeddings", MODEL, {"input": "\x03", "user": "fails-once"})
    result = await client.result(job, timeout=20)
    assert isinstance(result.answer, EmbeddingsAnswer)
    assert vectors(result.answer) == [[0.0, 0.0, 0.0, 1.0]]
    assert (result.answer.job, result.attempt) == (job.id, 2)
    async with client.stream(job) as again:
        assert [event async for event in again] == []
        assert await again.answer() == result.answer
    tokenized = await client.submit("tokenize", TALKER, {"prompt": "ab"})
    counted = (await client.result(tokenized, timeout=20)).answer
    assert isinstance(counted, TokenizeAnswer)
    assert counted.tokens == [97, 98]


async def test_whoever_stops_waiting_has_the_engine_stop(client: Client, workers: Fleet) -> None:
    asking = asyncio.create_task(client.embeddings(MODEL, ["a", "b"], user="hangs"))

    def running() -> int:
        return sum(each.load.running for each in workers.roster.workers())

    await eventually(lambda: running() == 2, what="the engine runs one call an input")
    asking.cancel()
    await eventually(lambda: running() == 0, what="the engine goes on")


async def test_the_tokenizer_is_asked_over_nats(client: Client) -> None:
    assert (await client.tokenize(TALKER, "ab")).tokens == [97, 98]
    several = await client.tokenize(TALKER, ["ab", "c"])
    assert (several.tokens, several.count) == ([[97, 98], [99]], [2, 1])
    assert several.max_model_len == 32768
    chat = await client.tokenize(TALKER, messages=HI)
    assert isinstance(chat.count, int)
    answer = await client.chat(TALKER, HI, max_tokens=1, stream=False)
    assert isinstance(answer, dict)
    assert answer["usage"]["prompt_tokens"] == chat.count
    back = await client.detokenize(TALKER, [97, 98])
    assert (back.text, (await client.detokenize(TALKER, [[97], [98]])).text) == ("ab", ["a", "b"])
    assert (await client.detokenize(TALKER, [])).text == ""
    assert (await client.tokenize(MODEL, "ab", unheard=1)).warnings == ["unknown field 'unheard' ignored"]


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"input": "a", "dimensions": 9}, InvalidRequest, "dimensions"),
        ({"input": ["a", ""]}, InvalidRequest, "input[1]"),
        ({"input": ["a", 1]}, InvalidRequest, "input[1]"),
        ({"input": [[1], [400]]}, InvalidRequest, "input[1]"),
        ({"input": [{"text": "a"}]}, InvalidRequest, "input[0]"),
        ({"input": ["a", "b" * 65]}, ContextLengthExceeded, "input[1]"),
        ({"input": "a", "encoding_format": "int8"}, InvalidRequest, "encoding_format"),
        ({"input": [-1]}, InvalidRequest, "input[0]"),
        ({"input": "a", "stream": True}, InvalidRequest, "stream"),
        ({"input": "a", "embed_overrides": []}, NotSupported, "embed_overrides"),
        ({"messages": HI}, WrongKind, "input"),
        ({}, InvalidRequest, "input"),
    ],
)
async def test_what_is_wrong_with_a_request_is_said_by_its_field(
    client: Client, body: dict[str, Any], error: type[CallerError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await client.request("embeddings", MODEL, body)
    assert raised.value.param == param


async def test_a_model_says_exactly_why_it_does_not_serve_a_kind(
    client: Client, server: NatsServer, tmp_path: Path
) -> None:
    with pytest.raises(NotSupported, match=r"this model generates; embeddings need .* --is-embedding"):
        await client.embeddings(TALKER, "a")
    with pytest.raises(NotSupported, match=r"embedding model: it serves embeddings, tokenize, detokenize"):
        await client.chat(MODEL, HI)
    async with serving(server, tmp_path, "bare", "tokenizer = false"):
        with pytest.raises(NotSupported, match="no tokenizer, which the kind 'tokenize' needs"):
            await client.tokenize("bare", "a")


async def test_workers_of_one_name_pass_a_kind_on_to_the_one_that_serves_it(
    client: Client, server: NatsServer, tmp_path: Path
) -> None:
    async with serving(server, tmp_path, "mixed", "", "embedding = 2"):
        asked = [client.embeddings("mixed", "\x00") for _ in range(6)]
        assert {tuple(vectors(each)[0]) for each in await asyncio.gather(*asked)} == {(1.0, 0.0)}


async def test_a_batch_embeds_its_lines(client: Client, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"input": "\x00"}, {"input": ["\x01", "\x02"]}, {"input": "b" * 65}]
    lines = [line async for line in client.batch(rows, model=MODEL, kind="embeddings", ordered=True)]
    found = [[each["embedding"] for each in line["response"]["body"]["data"]] for line in lines[:2]]
    assert found == [[[1, 0, 0, 0]], [[0, 1, 0, 0], [0, 0, 1, 0]]]
    assert lines[2]["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_openais_client_gets_embeddings_through_the_door(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ask:
        # Its default is base64, which it decodes.
        answer = await ask.embeddings.create(model=MODEL, input=["\x00", "\x03"])
        assert [each.embedding for each in answer.data] == [[1, 0, 0, 0], [0, 0, 0, 1]]
        assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("list", MODEL, 2)
        plain = await ask.embeddings.create(model=MODEL, input=[3], encoding_format="float")
        assert plain.data[0].embedding == [0, 0, 0, 1]
        with pytest.raises(openai.UnprocessableEntityError, match="--is-embedding"):
            await ask.embeddings.create(model=TALKER, input="a")
        with pytest.raises(openai.BadRequestError, match="must not be empty"):
            await ask.embeddings.create(model=MODEL, input=" ")


async def test_the_door_has_sglangs_tokenizer_paths_and_openais_batches_of_embeddings(
    http: httpx.AsyncClient,
) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = (await http.post(path, json={"model": TALKER, "prompt": "ab"})).json()
        assert answer == {"tokens": [97, 98], "count": 2, "max_model_len": 32768}
    answer = (await http.post("/detokenize", json={"model": TALKER, "tokens": [97]})).json()
    assert answer == {"text": "a"}
    refused = await http.post("/v1/embeddings", json={"model": MODEL, "input": "a", "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": MODEL, "input": [3]},
    }
    file = (
        await http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(line).encode())}
        )
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=asked)).json()

    async def output() -> str | None:
        found: str | None = (await http.get(f"/v1/batches/{batch['id']}")).json()["output_file_id"]
        return found

    content = await http.get(f"/v1/files/{await eventually(output, what='the batch ends')}/content")
    assert content.json()["response"]["body"]["data"][0]["embedding"] == [0, 0, 0, 1]


async def test_a_durable_request_through_the_door_has_its_vectors_as_often_as_it_is_asked(
    http: httpx.AsyncClient,
) -> None:
    body = {"model": MODEL, "input": [3]}
    answers = [
        (await http.post("/v1/embeddings", json=body, headers={"Idempotency-Key": "once"})).json()
        for _ in range(2)
    ]
    assert answers[0]["data"][0]["embedding"] == [0, 0, 0, 1]
    assert answers[0] == answers[1]
