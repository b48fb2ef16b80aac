"""OpenAI's own client, sync and async, and plain HTTP, against a gateway and a scripted worker."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import Fleet, fleet
from tests.support.gateway import caller, events, gateway

T = TypeVar("T")

SCRIPT = """
tokenizer = true
[[rules]]
user = "endless"
length = 30000
delay = 0.01
[[rules]]
user = "fails"
[rules.fault]
at = 3
do = "fail"
code = "context_length_exceeded"
[[rules]]
text = "The capital of France is Paris."
"""
PARIS = "The capital of France is Paris."
MODEL = "scripted"
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": HI}
ENDLESS = CHAT | {"user": "endless"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[NatsServer, Fleet]]:
    directory = tmp_path_factory.mktemp("gateway")
    async with (
        NatsServer(directory / "nats", sync_interval=None) as server,
        fleet(server, directory) as found,
    ):
        await found.start("both", SCRIPT)
        yield server, found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(workers: tuple[NatsServer, Fleet]) -> AsyncIterator[str]:
    async with gateway(workers[0].url) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with caller(url) as found:
        yield found


async def test_a_chat_is_answered_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HI)
    ChatCompletion.model_validate(answer.to_dict())
    assert answer.choices[0].message.content == PARIS
    assert answer.usage is not None
    assert answer._request_id
    text = ""
    async for chunk in await client.chat.completions.create(model=MODEL, messages=HI, stream=True):
        ChatCompletionChunk.model_validate(chunk.to_dict())
        assert chunk.usage is None
        text += chunk.choices[0].delta.content or ""
    assert text == PARIS


async def test_several_prompts_have_their_choices_one_after_the_other(client: openai.AsyncOpenAI) -> None:
    prompts = ["One", "Two "]
    answer = await client.completions.create(model=MODEL, prompt=prompts, n=2, echo=True, max_tokens=100)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, prompts[index // 2] + PARIS) for index in range(4)
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 4 * len(PARIS))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_in_the_models_name_is_asked_of_the_model(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    """These workers have none, and say so."""
    with pytest.raises(openai.UnprocessableEntityError) as told:
        await client.chat.completions.create(model=f"{MODEL}:blue", messages=HI, stream=stream)
    assert (told.value.code, told.value.param) == ("not_supported", "lora_path")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other:blue", messages=HI)


async def test_the_programs_in_the_documentation_run_as_they_are(url: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    body = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    (tmp_path / "requests.jsonl").write_text(json.dumps(body))
    programs = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(programs) == 2
    for program in programs:
        text = program.replace("http://127.0.0.1:8000", url).replace('"qwen"', f'"{MODEL}"')
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", text), cwd=tmp_path, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            out, _ = await child.communicate()
        assert child.returncode == 0
        assert out.decode() in (PARIS, "")


async def test_the_usage_of_a_stream_comes_where_it_is_asked_for(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], len(PARIS))


async def test_several_choices_reach_openais_helper_for_streams(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=HI, n=2) as stream:
        final = await stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [PARIS, PARIS]


async def test_completions_end_after_openais_sixteen_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi")
    Completion.model_validate(answer.to_dict())
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (PARIS[:16], "length")
    stream = await client.completions.create(model=MODEL, prompt=[1, 2], stream=True, max_tokens=40)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == PARIS


async def test_the_synchronous_client_works_too(url: str) -> None:
    def talk() -> tuple[str | None, str, list[str]]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HI)
            chunks = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            return whole.choices[0].message.content, text, [model.id for model in client.models.list()]

    assert await asyncio.to_thread(talk) == (PARIS, PARIS, [MODEL])


async def test_models_are_listed_and_looked_up(client: openai.AsyncOpenAI) -> None:
    listed = [model async for model in client.models.list()]
    Model.model_validate(listed[0].to_dict())
    assert (await client.models.retrieve(MODEL)).id == listed[0].id == MODEL
    with pytest.raises(openai.NotFoundError, match="nobody") as told:
        await client.models.retrieve("nobody/none")
    assert told.value.code == "model_not_found"


async def test_the_page_is_told_of_workers_and_queues(http: httpx.AsyncClient) -> None:
    status = (await http.get("/status")).json()
    [worker] = status["workers"]
    assert (worker["worker"], worker["role"], worker["state"], worker["slots"]) == ("w1", "both", "ready", 8)
    assert {(queue["model"], queue["class"]) for queue in status["queues"]} == {
        (MODEL, "batch"),
        (MODEL, "interactive"),
    }


async def test_a_mistake_names_its_field(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        await client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert (told.value.param, told.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nobody", messages=HI)
    assert unknown.value.code == "model_not_found"


async def test_a_failure_in_mid_stream_is_an_error_of_the_reader(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, user="fails")
    with pytest.raises(openai.APIError) as told:
        await _rest(stream)
    assert told.value.code == "context_length_exceeded"


async def test_a_stream_that_is_closed_frees_the_worker(
    client: openai.AsyncOpenAI, workers: tuple[NatsServer, Fleet]
) -> None:
    async with await client.chat.completions.create(
        model=MODEL, messages=HI, stream=True, user="endless"
    ) as stream:
        await anext(aiter(stream))
    await workers[1].idle()


async def test_a_request_with_an_idempotency_key_is_answered_once(client: openai.AsyncOpenAI) -> None:
    named = {"Idempotency-Key": "once-1"}
    first = await client.chat.completions.create(**CHAT, extra_headers=named)
    second = await client.chat.completions.create(**CHAT, extra_headers=named)
    assert first.to_dict() == second.to_dict()
    assert first._request_id == second._request_id == "once-1"
    with pytest.raises(openai.ConflictError) as told:
        await client.chat.completions.create(**CHAT, seed=1, extra_headers=named)
    assert told.value.code == "job_id_used"


async def test_a_stream_with_an_idempotency_key_can_be_read_again(client: openai.AsyncOpenAI) -> None:
    for _ in range(3):
        stream = await client.chat.completions.create(
            **CHAT, stream=True, extra_headers={"Idempotency-Key": "once-2"}
        )
        # Without a chunk of the usage, which nobody asked for, wherever the chunks are read from.
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS


async def test_fields_that_are_null_are_as_if_they_were_not_there(http: httpx.AsyncClient) -> None:
    body = CHAT | {"stream": None, "stream_options": None, "background": None}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, PARIS)


@pytest.mark.parametrize("key", ["a b", "a/b", "x" * 129, ""])
async def test_an_idempotency_key_that_no_job_can_have_is_refused(http: httpx.AsyncClient, key: str) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": key})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize(
    ("headers", "more"),
    [({"Prefer": "respond-async"}, {}), ({}, {"background": True})],
    ids=["header", "body"],
)
async def test_an_answer_can_be_fetched_later(
    http: httpx.AsyncClient, headers: dict[str, str], more: dict[str, Any]
) -> None:
    accepted = await http.post("/v1/chat/completions", json=CHAT | more, headers=headers)
    place = accepted.headers["location"]
    assert accepted.status_code == 202
    assert accepted.json() == {
        "id": place.rpartition("/")[2],
        "object": "job",
        "status": "in_progress",
        "response": None,
        "error": None,
    }
    ended = (await http.get(place, headers={"Prefer": "wait=20"})).json()
    assert (ended["status"], ended["error"]) == ("completed", None)
    answer = ChatCompletion.model_validate(ended["response"])
    assert answer.choices[0].message.content == PARIS
    chunks = events((await http.get(f"{place}/stream")).text)
    assert "".join(each["delta"].get("content") or "" for c in chunks for each in c["choices"]) == PARIS


async def test_a_failed_job_says_why(http: httpx.AsyncClient) -> None:
    body = CHAT | {"user": "fails", "background": True}
    place = (await http.post("/v1/chat/completions", json=body)).headers["location"]
    ended = (await http.get(place, headers={"Prefer": "wait=20"})).json()
    assert (ended["status"], ended["response"]) == ("failed", None)
    assert ended["error"]["code"] == "context_length_exceeded"


async def test_a_job_goes_on_without_its_reader_and_ends_when_it_is_cancelled(
    http: httpx.AsyncClient, workers: tuple[NatsServer, Fleet]
) -> None:
    place = (await http.post("/v1/chat/completions", json=ENDLESS | {"background": True})).headers["location"]
    async with http.stream("GET", f"{place}/stream") as answer:
        await anext(answer.aiter_lines())
    assert (await http.get(place)).json()["status"] == "in_progress"
    async with http.stream("GET", f"{place}/stream") as answer:
        await anext(answer.aiter_lines())
    assert (await http.delete(place)).json()["status"] == "cancelling"
    assert (await http.get(place, headers={"Prefer": "wait=20"})).json()["status"] == "cancelled"
    assert (await http.delete(place)).json()["status"] == "cancelled"
    await workers[1].idle()


async def test_a_job_that_is_not_there_is_not_found(http: httpx.AsyncClient) -> None:
    for method, path in (
        ("GET", "/v1/jobs/none"),
        ("DELETE", "/v1/jobs/none"),
        ("GET", "/v1/jobs/none/stream"),
    ):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")


async def test_keys_keep_owners_apart_and_bound_their_requests(workers: tuple[NatsServer, Fleet]) -> None:
    keys = {"sk-0123456789-of-acme": "acme", "sk-0123456789-of-beta": "beta"}
    async with gateway(workers[0].url, keys=keys, concurrency=1) as url:
        acme, beta = (openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) for key in keys)
        async with acme, beta, caller(url, authorization="Bearer sk-0123456789-of-beta") as other:
            stored = await acme.chat.completions.create(**CHAT, extra_headers={"Idempotency-Key": "mine"})
            assert stored.choices[0].message.content == PARIS
            assert (await other.get("/v1/jobs/mine")).status_code == 404
            async with await acme.chat.completions.create(**ENDLESS, stream=True):
                with pytest.raises(openai.RateLimitError) as told:
                    await acme.chat.completions.create(**CHAT)
                assert int(told.value.response.headers["retry-after"]) >= 1
                assert (await beta.chat.completions.create(**CHAT)).choices[0].message.content == PARIS
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-wrong", max_retries=0) as nobody:
            with pytest.raises(openai.AuthenticationError):
                await nobody.models.list()
    await workers[1].idle()


async def test_a_gateway_that_ends_finishes_what_it_answers_and_takes_nothing_new(
    workers: tuple[NatsServer, Fleet],
) -> None:
    slow = CHAT | {"stream": True, "user": "endless", "max_tokens": 100}
    async with AsyncExitStack() as stack:
        async with gateway(workers[0].url, grace=20.0) as url:
            http = await stack.enter_async_context(caller(url))
            answer = await stack.enter_async_context(http.stream("POST", "/v1/chat/completions", json=slow))
            lines = answer.aiter_lines()
            text = [await anext(lines)]
            reading = asyncio.create_task(_rest(lines))
        text += await reading
        assert events("\n".join(text))[-1]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(httpx.ConnectError):
            await http.get("/livez")


async def _rest(items: AsyncIterable[T]) -> list[T]:
    return [item async for item in items]


async def test_openais_responses_are_refused_with_what_to_use_instead(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions") as raised:
        await client.responses.create(model=MODEL, input="Hi")
    assert raised.value.code == "unknown_url"
    with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions"):
        await client.responses.retrieve("resp_1")
