"""What every engine must do, whatever it is: run against the scripted one and against SGLang.

A test module makes it its own by subclassing `EngineSuite` and giving it a fixture `engine`. The engine
must answer every kind, generate greedily the same every time, and have a context of at least 512 tokens.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.schemas.errors import Cancelled, ContextLengthExceeded, InvalidRequest
from inferbus.schemas.requests import parse
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import AnswerIdentity, Delta, Engine, Leg, Prompt
from tests.support.eventually import eventually

PROMPT = list(range(40, 50))
GREEDY = {"temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
BODIES: dict[Kind, dict[str, Any]] = {
    "tokens": {"token_ids": PROMPT},
    "chat": CHAT,
    "completions": {"prompt": "Once"},
}


def rid() -> str:
    """An engine request id."""
    return uuid.uuid4().hex


async def prepared(engine: Engine, kind: Kind, **fields: Any) -> Prompt:
    """A request of a kind, greedy and without an end of its own unless told otherwise."""
    return await engine.prepare(parse(kind, BODIES[kind] | GREEDY | fields))


async def legs(engine: Engine, prompt: Prompt) -> AsyncGenerator[Delta, None]:
    """All legs of a request, one after the other."""
    for index in range(prompt.choices):
        async with aclosing(engine.generate(prompt.leg(index, rid=rid()))) as deltas:
            async for delta in deltas:
                yield delta


async def leg_of(engine: Engine, token_ids: list[int], **sampling: Any) -> list[Delta]:
    """The deltas of one engine call, without a request."""
    leg = Leg(
        rid=rid(), index=0, token_ids=token_ids, sampling={"temperature": 0.0, "ignore_eos": True} | sampling
    )
    async with aclosing(engine.generate(leg)) as deltas:
        return [delta async for delta in deltas]


def ids(deltas: list[Delta]) -> list[int]:
    """Their tokens."""
    return [token for delta in deltas for token in delta.token_ids]


async def answered(engine: Engine, kind: Kind, **fields: Any) -> tuple[list[Any], Any]:
    """The streamed messages and the whole answer; JSON messages are decoded."""
    prompt = await prepared(engine, kind, **fields)
    answer = prompt.answer()
    messages = [message async for message in answer.chunks(legs(engine, prompt))]
    return [_plain(message) for message in messages], _plain(answer.whole())


IDENTITY = AnswerIdentity("0123456789abcdef0123456789abcdef", 1234567890)


def _plain(message: msgspec.Struct | bytes) -> Any:
    return json.loads(message) if isinstance(message, bytes) else message


def texts(chunks: list[dict[str, Any]], kind: Kind) -> dict[int, str]:
    """Each choice's text, put together from chunks."""
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice["text"] if kind == "completions" else choice["delta"].get("content")
        found[choice["index"]] = found.get(choice["index"], "") + (text or "")
    return found


async def consumed(deltas: AsyncIterable[Delta], count: int) -> list[Delta]:
    """The first deltas of a stream, which stays open."""
    found: list[Delta] = []
    async for delta in deltas:
        found.append(delta)
        if len(found) == count:
            break
    return found


class EngineSuite:
    """The behaviour of an engine with a tokenizer, of the role `both`."""

    async def idle(self, engine: Engine) -> None:
        """Waits until the engine has nothing to do, a second at most."""

        async def nothing_runs() -> bool:
            load = await engine.load()
            return load.running == load.waiting == 0

        await eventually(nothing_runs, within=1.0, what="the engine goes on with what nobody wants")

    async def test_it_says_what_it_can_do(self, engine: Engine) -> None:
        info = engine.info
        assert set(info.kinds) == {"tokens", "chat", "completions", "tokenize", "detokenize"}
        assert info.tokenizer
        assert info.name
        assert info.model
        capacity = info.capacity
        assert min(capacity.context_length, capacity.kv_tokens, capacity.page_size, capacity.max_running) > 0
        assert capacity.vocabulary > max(PROMPT)
        assert await engine.healthy()

    @pytest.mark.parametrize("kind", ["chat", "completions"])
    async def test_every_chunk_has_the_id_and_the_time_of_its_request(
        self, engine: Engine, kind: Kind
    ) -> None:
        fields = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "hi"}}
        prompt = await prepared(
            engine, kind, **(fields if kind == "chat" else {"prompt": "hi"}), max_tokens=4
        )
        answer = prompt.answer(IDENTITY)
        chunks = [_plain(message) async for message in answer.chunks(legs(engine, prompt))]
        for message in [*chunks, _plain(answer.whole())]:
            assert message["id"].endswith(IDENTITY.id)
            assert message["created"] == IDENTITY.created

    async def test_every_token_comes_once_and_is_counted_once(self, engine: Engine) -> None:
        deltas = await leg_of(engine, PROMPT, max_new_tokens=100)
        assert len(ids(deltas)) == 100
        assert deltas[-1].completion_tokens == 100
        assert deltas[-1].prompt_tokens == len(PROMPT)

    async def test_only_the_last_delta_has_a_finish(self, engine: Engine) -> None:
        deltas = await leg_of(engine, PROMPT, max_new_tokens=8)
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.reason == "length"

    async def test_a_greedy_answer_is_the_same_every_time(self, engine: Engine) -> None:
        first, second = [ids(await leg_of(engine, PROMPT, max_new_tokens=16)) for _ in range(2)]
        assert first == second

    @pytest.mark.parametrize("emitted", [1, 7, 20, 39])
    async def test_a_greedy_answer_goes_on_from_what_was_said(self, engine: Engine, emitted: int) -> None:
        whole = ids(await leg_of(engine, PROMPT, max_new_tokens=40))
        rest = await leg_of(engine, PROMPT + whole[:emitted], max_new_tokens=40 - emitted)
        assert whole[:emitted] + ids(rest) == whole

    async def test_a_stop_token_ends_an_answer_and_is_named(self, engine: Engine) -> None:
        whole = ids(await leg_of(engine, PROMPT, max_new_tokens=16))
        token = whole[-1]
        first = whole.index(token)
        deltas = await leg_of(engine, PROMPT, max_new_tokens=32, stop_token_ids=[token], ignore_eos=False)
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.reason == "stop"
        if len(ids(deltas)) == first + 1:
            assert deltas[-1].finish.matched == token

    async def test_one_token_is_an_answer(self, engine: Engine) -> None:
        assert len(ids(await leg_of(engine, PROMPT, max_new_tokens=1))) == 1

    async def test_a_closed_generator_leaves_nothing_running(self, engine: Engine) -> None:
        leg = (await prepared(engine, "tokens", max_tokens=400)).leg(0, rid=rid())
        deltas = engine.generate(leg)
        assert await consumed(deltas, 3)
        await deltas.aclose()
        await self.idle(engine)

    async def test_an_aborted_leg_ends_as_cancelled(self, engine: Engine) -> None:
        leg = (await prepared(engine, "tokens", max_tokens=400)).leg(0, rid=rid())
        deltas = engine.generate(leg)
        await consumed(deltas, 1)
        engine.abort(leg.rid)
        with pytest.raises(Cancelled):
            await consumed(deltas, 400)
        await deltas.aclose()
        await self.idle(engine)

    async def test_aborting_one_leg_leaves_the_others_alone(self, engine: Engine) -> None:
        prompt = await prepared(engine, "tokens", max_tokens=60)
        stem = rid()[:-1]
        first, second = (engine.generate(prompt.leg(0, rid=f"{stem}{digit}")) for digit in "01")
        async with aclosing(first), aclosing(second):
            await consumed(first, 1)
            begun = await consumed(second, 1)
            engine.abort(f"{stem}0")
            rest = [delta async for delta in second]
        assert len(ids(begun + rest)) == 60

    async def test_aborting_what_is_not_there_is_no_error(self, engine: Engine) -> None:
        engine.abort(rid())
        assert len(ids(await leg_of(engine, PROMPT, max_new_tokens=2))) == 2

    @pytest.mark.parametrize("kind", ["tokens", "completions"])
    async def test_a_token_outside_the_vocabulary_is_refused_before_the_engine(
        self, engine: Engine, kind: Kind
    ) -> None:
        field = "token_ids" if kind == "tokens" else "prompt"
        with pytest.raises(InvalidRequest) as caught:
            await prepared(engine, kind, **{field: [1, engine.info.capacity.vocabulary]})
        assert (caught.value.param or "").startswith(field)

    @pytest.mark.parametrize(
        ("name", "of"),
        [("logit_bias", lambda size: {str(size): 1}), ("stop_token_ids", lambda size: [size])],
        ids=["logit_bias", "stop_token_ids"],
    )
    async def test_a_parameter_outside_the_vocabulary_is_refused_before_the_engine(
        self, engine: Engine, name: str, of: Any
    ) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await prepared(engine, "tokens", **{name: of(engine.info.capacity.vocabulary)})
        assert caught.value.param == name
        assert await engine.healthy()

    async def test_a_prompt_that_fills_the_context_is_refused_before_the_engine(self, engine: Engine) -> None:
        with pytest.raises(ContextLengthExceeded):
            await prepared(engine, "tokens", token_ids=[5] * (engine.info.capacity.context_length + 1))

    async def test_n_choices_finish_once_each_and_count_the_prompt_once(self, engine: Engine) -> None:
        chunks, whole = await answered(engine, "tokens", n=3, max_tokens=5)
        assert all(isinstance(chunk, TokenChunk) for chunk in chunks)
        finishes = [chunk.index for chunk in chunks if chunk.finish_reason is not None]
        assert sorted(finishes) == [0, 1, 2]
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        usage = chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), 15)
        assert isinstance(whole, TokenAnswer)
        assert whole.usage == usage
        assert [choice.index for choice in whole.choices] == [0, 1, 2]

    async def test_token_chunks_come_to_the_whole_answer(self, engine: Engine) -> None:
        chunks, whole = await answered(engine, "tokens", n=2, max_tokens=9)
        for choice in whole.choices:
            mine = [chunk for chunk in chunks if chunk.index == choice.index]
            assert [token for chunk in mine for token in chunk.token_ids] == choice.token_ids
            assert mine[-1].finish_reason == choice.finish_reason == "length"

    @pytest.mark.parametrize("top", [None, 2])
    async def test_every_token_has_its_log_probability(self, engine: Engine, top: int | None) -> None:
        chunks, whole = await answered(engine, "tokens", logprobs=True, top_logprobs=top, max_tokens=6)
        choice = whole.choices[0]
        assert len(choice.logprobs.logprobs) == len(choice.token_ids) == 6
        assert max(choice.logprobs.logprobs) <= 0
        assert [p for chunk in chunks for p in chunk.logprobs.logprobs] == choice.logprobs.logprobs
        if top is None:
            assert choice.logprobs.top is None
        else:
            assert [len(row) for row in choice.logprobs.top] == [top] * 6

    @pytest.mark.parametrize("kind", ["chat", "completions"])
    async def test_streamed_text_is_the_whole_text(self, engine: Engine, kind: Kind) -> None:
        chunks, whole = await answered(engine, kind, n=2, max_tokens=24)
        told = {
            choice["index"]: choice["text"] if kind == "completions" else choice["message"]["content"]
            for choice in whole["choices"]
        }
        assert texts(chunks, kind) == told

    @pytest.mark.parametrize("kind", ["chat", "completions"])
    async def test_every_choice_of_a_text_answer_finishes_once(self, engine: Engine, kind: Kind) -> None:
        chunks, whole = await answered(engine, kind, n=3, max_tokens=5)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all("finish_reason" in choice for choice in choices)
        finishes = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
        assert sorted(finishes) == [0, 1, 2]
        for index in range(3):
            reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
            assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3

    async def test_a_finish_reason_comes_after_the_content(self, engine: Engine) -> None:
        chunks, _ = await answered(engine, "chat", max_tokens=5)
        last = next(c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None)
        assert not last["delta"].get("content")

    async def test_the_role_comes_with_the_first_chunk_of_each_choice_alone(self, engine: Engine) -> None:
        chunks, _ = await answered(engine, "chat", n=2, max_tokens=5)
        for index in range(2):
            mine = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert mine[0]["role"] == "assistant"
            assert not any(delta.get("role") for delta in mine[1:])

    @pytest.mark.parametrize("kind", ["chat", "completions"])
    async def test_usage_comes_last_where_it_is_asked_for_and_counts_the_prompt_once(
        self, engine: Engine, kind: Kind
    ) -> None:
        prompt = await prepared(engine, kind, max_tokens=5)
        chunks, whole = await answered(
            engine, kind, n=2, max_tokens=5, stream_options={"include_usage": True}
        )
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt.token_ids), 10)
        assert usage["total_tokens"] == usage["prompt_tokens"] + 10
        assert whole["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        without, _ = await answered(engine, kind, n=2, max_tokens=5)
        assert all(chunk["choices"] and not chunk.get("usage") for chunk in without)

    @pytest.mark.parametrize("kind", ["tokens", "chat", "completions"])
    async def test_one_prompt_gives_fresh_answers_for_every_attempt(self, engine: Engine, kind: Kind) -> None:
        prompt = await prepared(engine, kind, max_tokens=4)
        for _ in range(2):
            answer = prompt.answer()
            messages = [message async for message in answer.chunks(legs(engine, prompt))]
            assert messages
            assert answer.whole()

    async def test_choices_of_a_seeded_request_have_seeds_of_their_own(self, engine: Engine) -> None:
        prompt = await prepared(engine, "tokens", n=2, seed=7)
        seeds = [prompt.leg(index, rid=rid()).sampling["sampling_seed"] for index in range(2)]
        assert seeds == [7, 8]
        assert "n" not in prompt.leg(0, rid=rid()).sampling

    async def test_a_leg_is_plain_data_that_a_hand_off_can_carry(self, engine: Engine) -> None:
        leg = (await prepared(engine, "chat", max_tokens=4, stop_token_ids=[5])).leg(0, rid=rid())
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(leg), type=Leg) == leg
