"""LangChain, LlamaIndex and instructor as users call them, with a worker that answers as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio

from inferbus.workers.stack.server import NatsServer
from tests.support.answers import USAGE, chat, chat_answer
from tests.support.gateway import gateway
from tests.support.responder import Responder, chunks_of, responder

T = TypeVar("T")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(sync_interval=None) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(server: NatsServer) -> AsyncIterator[Responder]:
    async with responder(server.url) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(server: NatsServer) -> AsyncIterator[str]:
    async with gateway(server.url) as found:
        yield f"{found}/v1"


class Person(pydantic.BaseModel):
    """What is to be read out of a text."""

    name: str
    age: int


ADA = {"name": "Ada", "age": 36}
CALL = {"id": "call_1", "type": "function", "function": {"name": "Person", "arguments": json.dumps(ADA)}}


def calling() -> dict[str, Any]:
    """A whole answer that calls a tool."""
    answer = chat_answer("")
    choice = answer["choices"][0]
    choice |= {"finish_reason": "tool_calls"}
    choice["message"] |= {"content": None, "tool_calls": [CALL]}
    return answer


def called() -> list[Any]:
    """The same as chunks, the arguments in two."""
    arguments = json.dumps(ADA)
    opening = {"index": 0, **CALL, "function": {"name": "Person", "arguments": arguments[:9]}}
    deltas: list[dict[str, Any] | None] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [opening]},
        {"tool_calls": [{"index": 0, "function": {"arguments": arguments[9:]}}]},
    ]
    chunks = [chat(delta) for delta in deltas]
    chunks += [chat({}, finish="tool_calls"), chat(None, usage=USAGE)]
    return [chunk | {"seq": seq} for seq, chunk in enumerate(chunks) if isinstance(chunk, dict)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """LangChain leaves its own clients open."""
    async with httpx.AsyncClient(trust_env=False) as found:
        yield found


def langchain(url: str, http: httpx.AsyncClient) -> Any:
    """A model as LangChain's users make it."""
    from langchain_openai import ChatOpenAI

    key = pydantic.SecretStr("none")
    return ChatOpenAI(model="m", base_url=url, api_key=key, max_retries=0, http_async_client=http)


async def told(worker: Responder, asking: Awaitable[T], *messages: Any) -> tuple[dict[str, Any], T]:
    """What was asked for over the bus, and what the library made of this answer."""
    task = asyncio.ensure_future(asking)
    request = await worker.request()
    await worker.send(request.reply, *messages)
    await worker.end(request.reply, len(messages))
    async with asyncio.timeout(20):
        return json.loads(request.data), await task


async def test_langchain_chats_streams_and_calls_tools(
    url: str, http: httpx.AsyncClient, worker: Responder
) -> None:
    from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage

    model = langchain(url, http)
    asked, whole = await told(
        worker,
        model.ainvoke([SystemMessage("Be brief."), HumanMessage("Hi")]),
        chat_answer("Paris"),
    )
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert whole.content == "Paris"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == USAGE["total_tokens"]

    async def streamed() -> AIMessageChunk:
        parts = [part async for part in model.bind_tools([Person]).astream("Ada is 36")]
        merged = parts[0]
        for part in parts[1:]:
            merged = merged + part
        assert isinstance(merged, AIMessageChunk)
        return merged

    asked, message = await told(worker, streamed(), *called())
    assert asked["tools"][0]["function"]["name"] == "Person"
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("Person", ADA)]
    assert message.response_metadata["finish_reason"] == "tool_calls"


async def test_llamaindex_chats_streams_and_completes(
    server: NatsServer, url: str, http: httpx.AsyncClient, worker: Responder
) -> None:
    """Its class for OpenAI knows OpenAI's models only: it goes to one that is served by such a name."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai import OpenAI
    from llama_index.llms.openai_like import OpenAILike

    given: dict[str, Any] = {
        "api_base": url,
        "api_key": "none",
        "max_retries": 0,
        "async_http_client": http,
        "is_chat_model": True,
    }

    async def streamed(model: OpenAI) -> str:
        parts = await model.astream_chat([ChatMessage("Hi")])
        return "".join([part.delta or "" async for part in parts])

    async with responder(server.url, model="gpt-4o-mini") as named:
        for model, there in (
            (OpenAILike(model="m", **given), worker),
            (OpenAI("gpt-4o-mini", **given), named),
        ):
            asked, whole = await told(there, model.achat([ChatMessage("Hi")]), chat_answer("Paris"))
            assert (asked["messages"][0]["role"], whole.message.content) == ("user", "Paris")
            _, text = await told(there, streamed(model), *chunks_of("Par", "is"))
            assert text == "Paris"


async def test_llamaindex_calls_tools(url: str, http: httpx.AsyncClient, worker: Responder) -> None:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="m",
        api_base=url,
        api_key="none",
        max_retries=0,
        async_http_client=http,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    tool = FunctionTool.from_defaults(lambda name, age: None, name="Person", fn_schema=Person)
    asked, answer = await told(worker, model.achat_with_tools([tool], "Ada is 36"), calling())
    assert asked["tools"][0]["function"]["name"] == "Person"
    assert [(call.tool_name, call.tool_kwargs) for call in model.get_tool_calls_from_response(answer)] == [
        ("Person", ADA)
    ]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
async def test_instructor_reads_objects_out_of_answers(url: str, worker: Responder, mode: str) -> None:
    import instructor

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as plain:
        ask = instructor.from_openai(plain, mode=instructor.Mode[mode])
        answer = calling() if mode == "TOOLS" else chat_answer(json.dumps(ADA))
        asked, person = await told(
            worker,
            ask.chat.completions.create(
                model="m", response_model=Person, messages=[{"role": "user", "content": "Ada is 36"}]
            ),
            answer,
        )
    assert person.model_dump() == ADA
    assert ("tools" in asked) == (mode == "TOOLS")
    assert ("response_format" in asked) == (mode != "TOOLS")


async def test_a_refusal_reaches_langchain_as_openais_error(
    url: str, http: httpx.AsyncClient, worker: Responder
) -> None:
    model = langchain(url, http)
    error = {"code": "invalid_request", "message": "no", "param": "messages", "retryable": False}
    with pytest.raises(openai.BadRequestError) as raised:
        await told(worker, model.ainvoke("Hi"), {"job": "j", "attempt": 1, "error": error})
    assert raised.value.param == "messages"
