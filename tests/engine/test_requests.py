"""What SGLang's conversion takes and refuses, as errors of the contract; the engine goes on afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from inferbus.schemas.errors import CallerError, ContextLengthExceeded, InvalidRequest, NotSupported
from inferbus.schemas.requests import parse
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import Leg, Prompt
from tests.support.engine_suite import ids, rid
from tests.support.remote_engine import RemoteEngine

USER = {"role": "user", "content": "Hello there"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SECRET = "my secret words"


async def chat(engine: RemoteEngine, *messages: dict[str, Any], **fields: Any) -> Prompt:
    """A prepared chat request."""
    return await engine.prepare(parse("chat", {"messages": list(messages)} | fields))


async def generated(engine: RemoteEngine, fields: dict[str, Any]) -> list[int]:
    """The tokens of a token request."""
    prompt = await engine.prepare(parse("tokens", {"token_ids": [1, 2], "max_tokens": 4} | fields))
    return ids([delta async for delta in engine.generate(prompt.leg(0, rid=rid()))])


async def answers(engine: RemoteEngine) -> bool:
    """Whether the engine still does its work."""
    leg = Leg(rid=rid(), index=0, token_ids=[1, 2, 3], sampling={"max_new_tokens": 2, "ignore_eos": True})
    return len(ids([delta async for delta in engine.generate(leg)])) == 2


@pytest.mark.parametrize("kind", ["tokens", "chat", "completions"])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}], ids=["absent", "null"])
async def test_without_max_tokens_an_answer_may_fill_the_context(
    engine: RemoteEngine, kind: Kind, fields: dict[str, Any]
) -> None:
    bodies: dict[Kind, dict[str, Any]] = {
        "tokens": {"token_ids": [1, 2, 3]},
        "chat": {"messages": [USER]},
        "completions": {"prompt": "Hello"},
    }
    prompt = await engine.prepare(parse(kind, bodies[kind] | fields))
    room = prompt.leg(0, rid=rid()).sampling["max_new_tokens"]
    assert engine.info.capacity.context_length - 8 < room + len(prompt.token_ids)
    assert room + len(prompt.token_ids) <= engine.info.capacity.context_length


@pytest.mark.parametrize("value", [0, -1, 1.5, "x"])
async def test_max_tokens_that_are_no_count_are_refused(engine: RemoteEngine, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        await chat(engine, USER, max_tokens=value)


async def test_an_answer_that_does_not_fit_is_refused_and_one_that_just_does_is_not(
    engine: RemoteEngine,
) -> None:
    context = engine.info.capacity.context_length
    with pytest.raises(ContextLengthExceeded) as caught:
        await engine.prepare(parse("tokens", {"token_ids": [1] * 100, "max_tokens": context - 99}))
    assert caught.value.param == "max_tokens"
    request = parse("tokens", {"token_ids": [1] * 100, "max_tokens": context - 100})
    prompt = await engine.prepare(request)
    assert prompt.leg(0, rid=rid()).sampling["max_new_tokens"] >= context - 104
    assert any("lowered" in warning for warning in request.warnings)


async def test_the_longest_prompt_that_is_taken_is_one_that_the_engine_takes(engine: RemoteEngine) -> None:
    longest = engine.info.capacity.context_length
    while True:
        try:
            prompt = await engine.prepare(parse("tokens", {"token_ids": [7] * longest}))
        except ContextLengthExceeded:
            longest -= 1
        else:
            break
    assert longest > engine.info.capacity.context_length - 16
    leg = prompt.leg(0, rid=rid())
    assert 1 <= len(ids([delta async for delta in engine.generate(leg)])) <= leg.sampling["max_new_tokens"]


@pytest.mark.parametrize("temperature", [0, 1e-9])
async def test_temperatures_of_nothing_are_greedy(engine: RemoteEngine, temperature: float) -> None:
    body = {"token_ids": [5, 6, 7], "temperature": temperature, "max_tokens": 6, "ignore_eos": True}
    prompt = await engine.prepare(parse("tokens", body))
    runs = [[d async for d in engine.generate(prompt.leg(0, rid=rid()))] for _ in range(2)]
    assert ids(runs[0]) == ids(runs[1])


@pytest.mark.parametrize("kind", ["tokens", "chat", "completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"top_p": 0},
        {"top_k": 0},
        {"frequency_penalty": 2.5},
        {"presence_penalty": -2.5},
        {"repetition_penalty": 0},
        {"min_p": 1.5},
        {"seed": 2**63},
        {"logit_bias": {"999999999": 5}},
        {"stop_token_ids": [2**31 - 1]},
        {"stop_token_ids": [-1]},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"priority": 2**63},
    ],
    ids=str,
)
async def test_parameters_out_of_range_are_refused_before_the_engine(
    engine: RemoteEngine, kind: Kind, fields: dict[str, Any]
) -> None:
    bodies: dict[Kind, dict[str, Any]] = {
        "tokens": {"token_ids": [1, 2, 3]},
        "chat": {"messages": [USER]},
        "completions": {"prompt": "Hello"},
    }
    with pytest.raises(InvalidRequest) as caught:
        await engine.prepare(parse(kind, bodies[kind] | fields))
    assert caught.value.param


async def test_a_long_prompt_is_tokenised_as_a_short_one_is(engine: RemoteEngine) -> None:
    half = await engine.prepare(parse("completions", {"prompt": "a" * 8000}))
    whole = await engine.prepare(parse("completions", {"prompt": "a" * 16000 + " " * 1000}))
    assert whole.token_ids[: len(half.token_ids) - 2] == half.token_ids[:-2]


async def test_an_empty_assistant_message_is_taken(engine: RemoteEngine) -> None:
    assert (await chat(engine, USER, {"role": "assistant", "content": ""}, USER)).token_ids


async def test_a_tool_call_without_content_is_taken(engine: RemoteEngine) -> None:
    messages = (
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "y", "tool_call_id": "call_1"},
    )
    assert (await chat(engine, *messages, tools=[TOOL])).token_ids


async def test_text_parts_mean_the_same_as_a_string(engine: RemoteEngine) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    assert (await chat(engine, parts)).token_ids == (await chat(engine, USER)).token_ids


@pytest.mark.parametrize(
    "messages", [[], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}]], ids=str
)
async def test_messages_that_say_nothing_are_refused(engine: RemoteEngine, messages: list[Any]) -> None:
    with pytest.raises(CallerError) as caught:
        await chat(engine, *messages)
    assert (caught.value.param or "").startswith("messages")


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"tokenize": 1}},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": SECRET}}}]},
        {"tools": "no list"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "function", "function": {"name": SECRET}}, "tools": [TOOL]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "poem"}},
        {"reasoning": {"effort": SECRET}},
        {"reasoning_effort": SECRET},
        {"chat_template_kwargs": {"chat_template": SECRET}},
    ],
    ids=str,
)
async def test_what_the_conversion_refuses_is_the_callers_fault_and_is_not_quoted(
    engine: RemoteEngine, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await chat(engine, {"role": "user", "content": SECRET}, **fields)
    assert SECRET not in caught.value.message
    assert await answers(engine)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}},
        {"type": "input_audio", "input_audio": {"data": "xx", "format": "wav"}},
    ],
    ids=str,
)
async def test_content_that_a_text_model_cannot_take_is_not_supported(
    engine: RemoteEngine, part: dict[str, Any]
) -> None:
    with pytest.raises(NotSupported) as caught:
        await chat(engine, {"role": "user", "content": [{"type": "text", "text": SECRET}, part]})
    assert caught.value.param == "messages[0].content"
    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": "{no json"},
        {"json_schema": '{"type": 5}'},
        {"regex": "(unclosed"},
        {"json_schema": '{"enum": []}'},
        {"stop_regex": "(unclosed"},
    ],
    ids=str,
)
async def test_a_grammar_that_is_none_is_the_callers_fault_and_the_engine_lives(
    engine: RemoteEngine, fields: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        await generated(engine, fields)
    assert await answers(engine)


@pytest.mark.parametrize("kind", ["tokens", "chat", "completions"])
async def test_a_seed_that_does_not_fix_the_answer_is_warned_of(engine: RemoteEngine, kind: Kind) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "tokens": {"token_ids": [1]},
        "chat": {"messages": [USER]},
        "completions": {"prompt": "x"},
    }
    body = bodies[kind]
    seeded, plain = parse(kind, body | {"seed": 5}), parse(kind, body)
    await engine.prepare(seeded)
    await engine.prepare(plain)
    assert any("--enable-deterministic-inference" in warning for warning in seeded.warnings)
    assert plain.warnings == []


@pytest.mark.parametrize("fields", [{"lora_path": "blue"}, {"model": "tiny:blue"}], ids=str)
async def test_an_adapter_is_refused_where_there_is_none(
    engine: RemoteEngine, fields: dict[str, Any]
) -> None:
    with pytest.raises(NotSupported) as caught:
        await engine.prepare(parse("tokens", {"token_ids": [1, 2]} | fields, model="tiny"))
    assert caught.value.param == "lora_path"


async def test_what_a_client_may_send_is_taken(engine: RemoteEngine) -> None:
    fields = {
        "n": 2,
        "user": "u",
        "seed": 5,
        "max_completion_tokens": 3,
        "top_logprobs": 1,
        "logprobs": True,
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "cache_salt": "mine",
        "stop": ["\n\n"],
        "logit_bias": {"5": 1},
    }
    prompt = await chat(engine, {"role": "system", "content": "Be short."}, USER, **fields)
    leg = prompt.leg(1, rid=rid())
    assert prompt.choices == 2
    assert leg.sampling["sampling_seed"] == 6
    assert leg.sampling["max_new_tokens"] == 3
    assert leg.options["cache_salt"] == "mine"
    assert ids([delta async for delta in engine.generate(leg)])
