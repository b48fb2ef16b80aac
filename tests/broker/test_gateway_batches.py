"""Files and batches through the gateway, with OpenAI's own client, against workers with scripted engines."""

from __future__ import annotations

import json
import random
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Batch, FileObject

from inferbus.workers.batch import submitter
from inferbus.workers.batch.state import Batches
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.gateway import batches as batches_module
from inferbus.workers.stack.local import free_ports
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet
from tests.support.gateway import caller, gateway

SCRIPT = """
tokenizer = true
[[rules]]
user = "fails"
[rules.fault]
code = "context_length_exceeded"
[[rules]]
user = "slow"
length = 10
delay = 0.1
[[rules]]
text = "Paris."
"""
ENDPOINT: Any = "/v1/chat/completions"
KEY = "sk-0123456789abcdef"
ENDED = ("completed", "failed", "cancelled", "expired")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "LOOK_EVERY", 0.2)
    monkeypatch.setattr(submitter, "LEASE", 2.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    async with NatsServer(tmp_path_factory.mktemp("nats"), sync_interval=None) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path_factory.mktemp("workers")) as found:
        await found.start("both", SCRIPT)
        yield found


@pytest.fixture
def owner() -> str:
    """Every test has its own files and batches."""
    return secrets.token_hex(4)


@pytest_asyncio.fixture(loop_scope="module")
async def url(server: NatsServer, workers: Fleet, owner: str) -> AsyncIterator[str]:
    async with gateway(server.url, keys={KEY: owner}, max_file=100_000) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openais(url) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(url, authorization=f"Bearer {KEY}") as found:
        yield found


def openais(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def lines(count: int, **more: Any) -> bytes:
    """A batch file of so many chats."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Where?"}], **more}
    each = ({"custom_id": f"line-{n}", "method": "POST", "url": ENDPOINT, "body": body} for n in range(count))
    return b"".join(json.dumps(line).encode() + b"\n" for line in each)


async def begun(client: openai.AsyncOpenAI, content: bytes, **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """A batch once it has ended."""

    async def look() -> Batch | None:
        found = await client.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    found: Batch = await eventually(look, within=60)
    return Batch.model_validate(found.to_dict())


async def written(client: openai.AsyncOpenAI, file: str | None) -> list[Any]:
    assert file is not None
    return [json.loads(line) for line in (await client.files.content(file)).text.splitlines()]


async def test_a_batch_runs_from_its_upload_to_its_output(client: openai.AsyncOpenAI) -> None:
    content = lines(20) + lines(1, user="fails").replace(b"line-0", b"bad")
    batch = await begun(client, content, metadata={"night": "1"})
    assert (batch.status, batch.metadata) == ("validating", {"night": "1"})
    batch = await ended(client, batch)
    assert (batch.status, batch.completion_window, batch.model) == ("completed", "24h", "scripted")
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    output = await written(client, batch.output_file_id)
    assert {line["custom_id"] for line in output} == {f"line-{n}" for n in range(20)}
    assert output[0]["response"]["body"]["choices"][0]["message"]["content"] == "Paris."
    [failed] = await written(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert [each.id async for each in client.batches.list()] == [batch.id]


async def test_files_are_listed_read_and_removed(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    content = lines(500)
    file = await client.files.create(file=("night.jsonl", content), purpose="batch")
    FileObject.model_validate(file.to_dict())
    assert (file.bytes, file.filename, file.purpose) == (len(content), "night.jsonl", "batch")
    other = await client.files.create(file=b"", purpose="batch")
    assert (await client.files.retrieve(file.id)) == file
    assert {each.id async for each in client.files.list(limit=1)} == {file.id, other.id}
    assert [each async for each in client.files.list(purpose="batch_output")] == []
    assert (await client.files.content(file.id)).content == content
    assert (await client.files.content(other.id)).content == b""
    assert (await client.files.delete(file.id)).deleted
    for asked in (client.files.retrieve(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError) as told:
            await asked
        assert told.value.code == "file_not_found"
    assert (await http.get(f"/v1/files/{file.id}/content")).status_code == 404


async def test_the_output_of_a_batch_is_a_file_until_it_is_removed(
    client: openai.AsyncOpenAI, server: NatsServer, owner: str
) -> None:
    batch = await ended(client, await begun(client, lines(3)))
    assert batch.output_file_id is not None
    [output] = [each async for each in client.files.list(purpose="batch_output")]
    FileObject.model_validate(output.to_dict())
    assert output.id == batch.output_file_id
    assert output.bytes == len((await client.files.content(output.id)).content)
    await client.files.delete(output.id)
    assert (await client.batches.retrieve(batch.id)).output_file_id is None
    await client.files.delete(batch.input_file_id)
    async with Client.connect(server.url) as bus:
        assert await JetStream(bus.bus).read(layout.FILES, f"infer.files.{owner}.>") == []


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"nonsense\n", "invalid_json_line"),
        (lines(1) * 2, "duplicate_custom_id"),
        (lines(1).replace(b"chat/", b""), "url_mismatch"),
        (lines(1, model="nobody"), "model_not_found"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_batch_that_cannot_be_run_has_failed_and_says_why(
    client: openai.AsyncOpenAI, content: bytes, code: str
) -> None:
    batch = await ended(client, await begun(client, content))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [each.code for each in batch.errors.data] == [code]
    assert batch.output_file_id is None


async def test_a_batch_is_cancelled_and_its_input_stays_while_it_runs(client: openai.AsyncOpenAI) -> None:
    batch = await begun(client, lines(500, user="slow"))
    with pytest.raises(openai.ConflictError) as told:
        await client.files.delete(batch.input_file_id)
    assert told.value.code == "file_in_use"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    errors = await written(client, batch.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "file_id"),
        ({"input_file_id": 1}, "input_file_id"),
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"output_expires_after": {}}, "output_expires_after"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
    ids=str,
)
async def test_a_batch_that_is_asked_for_wrongly_is_refused(
    http: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    asked = {"input_file_id": "file-none", "endpoint": ENDPOINT, "completion_window": "24h"}
    answer = await http.post("/v1/batches", json=asked | change)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert (await http.get("/v1/batches/none")).json()["error"]["code"] == "batch_not_found"
    assert (await http.get("/v1/batches?limit=0")).json()["error"]["param"] == "limit"


async def test_an_upload_that_cannot_be_used_is_refused(http: httpx.AsyncClient) -> None:
    for asked, status, param in (
        ({"json": {}}, 400, "file"),
        ({"data": {"purpose": "batch"}}, 400, "file"),
        ({"files": {"file": b"x"}}, 400, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "vision"}}, 400, "purpose"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "1"}},
            400,
            None,
        ),
        ({"files": {"file": b"x" * 100_001}, "data": {"purpose": "batch"}}, 413, "file"),
        ({"files": {"file": b"x" * 300_000}, "data": {"purpose": "batch"}}, 413, "file"),
    ):
        answer = await http.post("/v1/files", **asked)
        assert answer.status_code == status, asked
        assert answer.json()["error"]["param"] == (param or "expires_after[seconds]")


async def test_without_keys_a_form_on_another_site_uploads_nothing(
    server: NatsServer, workers: Fleet
) -> None:
    form: Any = {"files": {"file": b"x"}, "data": {"purpose": "batch"}}
    async with gateway(server.url) as url, caller(url) as http:
        answer = await http.post("/v1/files", headers={"origin": "https://evil.example"}, **form)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Origin")
        assert (await http.post("/v1/files", headers={"origin": url}, **form)).status_code == 200


async def test_a_full_server_refuses_an_upload_and_keeps_nothing_of_it(
    http: httpx.AsyncClient, server: NatsServer, owner: str
) -> None:
    async with Client.connect(server.url) as bus:
        jetstream = JetStream(bus.bus)
        info = await jetstream.call(f"STREAM.INFO.{layout.FILES}")
        update, config = f"STREAM.UPDATE.{layout.FILES}", info["config"]
        await jetstream.call(update, config | {"max_bytes": info["state"]["bytes"] + 5000})
        try:
            form: Any = {"files": {"file": random.randbytes(50_000)}, "data": {"purpose": "batch"}}
            answer = await http.post("/v1/files", **form)
        finally:
            await jetstream.call(update, config)
        assert (answer.status_code, answer.json()["error"]["code"]) == (529, "overloaded")
        assert await jetstream.read(layout.FILES, f"infer.files.{owner}.>") == []


async def test_another_gateway_goes_on_with_the_batches_of_one_that_ends_or_dies(
    server: NatsServer, workers: Fleet
) -> None:
    """No line is run twice: the output has each once, and the errors none."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "inferbus.workers.cli", "gateway"]
    killed = await workers.spawn("gateway", command, GATEWAY_LISTEN=listen)

    async def ready() -> bool:
        async with caller(f"http://{listen}") as http:
            try:
                return (await http.get("/readyz")).status_code == 200
            except httpx.TransportError:
                return False

    await killed.until(ready, timeout=60)
    async with openais(f"http://{listen}") as client:
        batch = await begun(client, lines(40, user="slow"))
        await eventually(lambda: _some(client, batch), within=60)
    killed.kill()
    await killed.wait()
    async with gateway(server.url) as url, openais(url) as client:
        before = await _held(server, batch)
        await eventually(lambda: _taken(server, batch, before), within=60)
    async with gateway(server.url) as url, openais(url) as client:
        batch = await ended(client, batch)
        assert batch.status == "completed"
        output = await written(client, batch.output_file_id)
        assert sorted(line["custom_id"] for line in output) == sorted(f"line-{n}" for n in range(40))
        assert batch.error_file_id is None


async def _some(client: openai.AsyncOpenAI, batch: Batch) -> bool:
    counts = (await client.batches.retrieve(batch.id)).request_counts
    return counts is not None and counts.completed > 0


async def _held(server: NatsServer, batch: Batch) -> str | None:
    async with Client.connect(server.url) as client:
        holder = (await Batches(client.bus, "default").get(batch.id)).record.holder
        return None if holder is None else holder.token


async def _taken(server: NatsServer, batch: Batch, before: str | None) -> bool:
    return await _held(server, batch) not in (None, before)
