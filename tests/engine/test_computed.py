"""Embeddings and the tokenizer on real engines, beside what SGLang's own HTTP server answers there."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import msgspec
import pytest

from inferbus.schemas.errors import CallerError, ContextLengthExceeded, InvalidRequest, NotSupported
from inferbus.schemas.kinds import parse
from inferbus.schemas.subjects import ComputedKind
from tests.support.remote_engine import RemoteEngine

PATHS: dict[ComputedKind, str] = {
    "embeddings": "/v1/embeddings",
    "tokenize": "/v1/tokenize",
    "detokenize": "/v1/detokenize",
}
HI = [{"role": "user", "content": "Grüße 👋"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


async def ours(engine: RemoteEngine, kind: ComputedKind, **body: Any) -> dict[str, Any]:
    """The answer over our interface, without what only it has."""
    computation = await engine.plan(parse(kind, body))
    answer: dict[str, Any] = msgspec.to_builtins(await computation.answer(0))
    assert computation.prompt_tokens == answer.get("usage", {}).get("prompt_tokens", 0)
    return {name: value for name, value in answer.items() if name not in ("job", "attempt", "warnings")}


async def theirs(engine: RemoteEngine, kind: ComputedKind, **body: Any) -> dict[str, Any]:
    """SGLang's answer, without what we leave out on purpose.

    It names the model's folder as the model, and has counts of usage that no embedding has.
    """
    status, answer = await engine.http(PATHS[kind], body)
    assert status == 200, answer
    if "model" in answer:
        answer["model"] = engine.info.model
        answer["usage"] = {name: answer["usage"].get(name) for name in USAGE}
    return answer


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Once upon a time"},
        {"input": ["Once", "upon a time, 👋 Grüße", " x"]},
        {"input": [1, 2, 3]},
        {"input": [[1, 2, 3], [40]]},
        {"input": "Once", "encoding_format": "base64"},
        {"input": ["Once", "upon"], "dimensions": 8, "encoding_format": "float", "user": "me"},
        {"input": "word " * 300},
        {"input": [f"text {i}" for i in range(40)]},
    ],
)
async def test_embeddings_equal_those_of_sglangs_server(embeds: RemoteEngine, body: dict[str, Any]) -> None:
    own, sglang = await ours(embeds, "embeddings", **body), await theirs(embeds, "embeddings", **body)
    for one, other in zip(own["data"], sglang["data"], strict=True):
        found, wanted = floats(one.pop("embedding")), floats(other.pop("embedding"))
        # What comes out of the prefix cache is rounded differently.
        assert found == pytest.approx(wanted, abs=1e-5)
        assert len(found) == body.get("dimensions", len(found))
    assert own == sglang


def floats(written: list[float] | str) -> list[float]:
    """A vector as it is written."""
    if isinstance(written, list):
        return written
    data = base64.b64decode(written)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "Once upon a time"},
        {"prompt": ["Once", "Grüße 👋", ""]},
        {"prompt": "Once", "add_special_tokens": False},
        {"messages": HI},
        {"messages": HI, "tools": [TOOL]},
        {"messages": HI, "add_generation_prompt": False},
        {"prompt": "long " * 5000},
    ],
)
async def test_tokens_of_texts_and_messages_equal_those_of_sglangs_server(
    engine: RemoteEngine, body: dict[str, Any]
) -> None:
    assert await ours(engine, "tokenize", **body) == await theirs(engine, "tokenize", **body)


@pytest.mark.parametrize(
    "body",
    [
        {"tokens": [1, 2, 40, 500]},
        {"tokens": [[1, 40], [500], []]},
        {"tokens": [1, 2, 40], "skip_special_tokens": False},
        {"tokens": []},
    ],
)
async def test_the_text_of_tokens_equals_that_of_sglangs_server(
    embeds: RemoteEngine, body: dict[str, Any]
) -> None:
    assert await ours(embeds, "detokenize", **body) == await theirs(embeds, "detokenize", **body)


async def test_the_tokens_of_messages_are_those_that_a_chat_of_them_has(engine: RemoteEngine) -> None:
    prompt = await engine.prepare(parse("chat", {"messages": HI}))
    assert (await ours(engine, "tokenize", messages=HI))["tokens"] == prompt.token_ids


async def test_engines_announce_what_they_serve(
    embeds: RemoteEngine, engine: RemoteEngine, decode: RemoteEngine, tokens_only: RemoteEngine
) -> None:
    assert set(embeds.info.kinds) == {"embeddings", "tokenize", "detokenize"}
    generating = {"tokens", "chat", "completions", "tokenize", "detokenize"}
    assert set(engine.info.kinds) == set(decode.info.kinds) == generating
    assert set(tokens_only.info.kinds) == {"tokens"}


@pytest.mark.parametrize(
    ("kind", "body", "error", "param"),
    [
        ("embeddings", {"input": ["a", "word " * 9000]}, ContextLengthExceeded, "input[1]"),
        ("embeddings", {"input": [[1], [10**6]]}, InvalidRequest, "input[1]"),
        ("embeddings", {"input": "a", "dimensions": 9}, InvalidRequest, "dimensions"),
        ("detokenize", {"tokens": [[1], [10**6]]}, InvalidRequest, "tokens[1]"),
    ],
)
async def test_what_an_embedding_model_cannot_take_is_named(
    embeds: RemoteEngine, kind: ComputedKind, body: dict[str, Any], error: type[CallerError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await embeds.plan(parse(kind, body))
    assert raised.value.param == param


async def test_messages_that_a_template_cannot_render_are_refused_without_repeating_them(
    engine: RemoteEngine,
) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:secret"}}
    with pytest.raises(NotSupported) as raised:
        await engine.plan(parse("tokenize", {"messages": [{"role": "user", "content": [image]}]}))
    assert "secret" not in raised.value.message


async def test_many_embeddings_at_once_leave_the_engine_idle(embeds: RemoteEngine) -> None:
    answers = await asyncio.gather(*(ours(embeds, "embeddings", input=f"text {i}") for i in range(20)))
    assert len({tuple(answer["data"][0]["embedding"]) for answer in answers}) == 20
    assert await embeds.healthy()
    assert await embeds.healthy(fresh=0.0)
    load = await embeds.load()
    assert load.running == load.waiting == 0
