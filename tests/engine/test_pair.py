"""Prefill and decode as two engines, against one engine and against SGLang's engine itself."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from benchmarks.handoffs import token_bytes
from inferbus.schemas.errors import Cancelled, InferbusError, NotSupported, TransferFailed
from inferbus.schemas.fleet import Bootstrap
from inferbus.schemas.requests import parse
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import Delta, Leg, Prompt, Rendezvous
from tests.support.engine_suite import ids, rid
from tests.support.eventually import eventually
from tests.support.remote_engine import RemoteEngine

BODIES: dict[Kind, dict[str, Any]] = {
    "tokens": {"token_ids": list(range(100, 140))},
    "chat": {"messages": [{"role": "user", "content": "Where does the river go?"}]},
    "completions": {"prompt": "Where does the river go?"},
}
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}


def meeting(prefill: RemoteEngine, leg: Leg) -> Leg:
    """The leg with a room of its own."""
    assert prefill.info.bootstrap is not None
    room = random.SystemRandom().randrange(1, 2**63)
    return msgspec.structs.replace(leg, rendezvous=Rendezvous(bootstrap=prefill.info.bootstrap, room=room))


async def collected(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    """All deltas of a leg."""
    async with aclosing(deltas):
        return [delta async for delta in deltas]


async def paired(prefill: RemoteEngine, decode: RemoteEngine, leg: Leg) -> tuple[list[Delta], list[Delta]]:
    """Both halves of a leg, at once: prefill waits for decode."""
    met = meeting(prefill, leg)
    async with asyncio.timeout(60):
        return await asyncio.gather(collected(prefill.generate(met)), collected(decode.generate(met)))


async def through_pair(
    prefill: RemoteEngine, decode: RemoteEngine, prompt: Prompt
) -> AsyncGenerator[Delta, None]:
    """All legs of a request, one after the other."""
    for index in range(prompt.choices):
        _, deltas = await paired(prefill, decode, prompt.leg(index, rid=rid()))
        for delta in deltas:
            yield delta


async def alone(engine: RemoteEngine, prompt: Prompt) -> AsyncGenerator[Delta, None]:
    """The same, on one engine."""
    for index in range(prompt.choices):
        for delta in await collected(engine.generate(prompt.leg(index, rid=rid()))):
            yield delta


async def message(answer: Any, deltas: AsyncGenerator[Delta, None]) -> tuple[str, Any]:
    """The streamed text of choice 0, and the whole answer."""
    text = ""
    async for chunk in answer.chunks(deltas):
        if isinstance(chunk, bytes):
            for choice in json.loads(chunk)["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    whole = answer.whole()
    return text, json.loads(whole)["choices"] if isinstance(whole, bytes) else whole.choices


def test_the_pair_announces_what_pairing_needs(prefill: RemoteEngine, decode: RemoteEngine) -> None:
    assert prefill.info.signature == decode.info.signature
    assert prefill.info.signature is not None
    assert prefill.info.signature.backend == "nixl"
    assert isinstance(prefill.info.bootstrap, Bootstrap)
    assert prefill.info.bootstrap.host == "127.0.0.1"
    assert decode.info.bootstrap is None
    assert prefill.info.kinds == ()
    assert set(decode.info.kinds) == {"tokens", "chat", "completions", "tokenize", "detokenize"}


async def test_each_engine_of_the_pair_answers_for_its_own_health(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    assert await prefill.healthy(fresh=0)
    assert await decode.healthy(fresh=0)
    await idle(prefill)
    await idle(decode)


@pytest.mark.parametrize("kind", ["tokens", "chat", "completions"])
async def test_a_greedy_request_gives_the_same_tokens_from_the_pair_from_one_engine_and_from_sglang(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine, kind: Kind
) -> None:
    request = parse(kind, BODIES[kind] | GREEDY)
    prompt = await decode.prepare(request)
    leg = prompt.leg(0, rid=rid())
    sent, came = await paired(prefill, decode, leg)
    one = await collected(engine.generate(leg))
    bare = await engine.bare(
        input_ids=prompt.token_ids,
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": 24},
    )
    assert ids(came) == ids(one) == bare
    assert len(bare) == 24
    assert sent[-1].finish is not None
    assert sent[-1].finish.reason == "length"
    assert sent[-1].prompt_tokens == len(prompt.token_ids)
    assert "".join(delta.text for delta in came) == "".join(delta.text for delta in one)


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_the_answer_of_the_pair_is_the_answer_of_one_engine(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine, kind: Kind
) -> None:
    request = parse(kind, BODIES[kind] | GREEDY)
    prompt = await decode.prepare(request)
    told = await message(prompt.answer(), through_pair(prefill, decode, prompt))
    same = await engine.prepare(request)
    assert told == await message(same.answer(), alone(engine, same))
    assert told[0]


async def test_two_choices_through_the_pair_have_rooms_and_seeds_of_their_own(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    body = {"token_ids": list(range(50, 70)), "n": 2, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    prompt = await decode.prepare(parse("tokens", body))
    answer = prompt.answer()
    async for _ in answer.chunks(through_pair(prefill, decode, prompt)):
        pass
    whole: Any = answer.whole()
    assert [len(choice.token_ids) for choice in whole.choices] == [8, 8]
    assert whole.choices[0].token_ids != whole.choices[1].token_ids
    assert whole.usage.prompt_tokens == 20


async def test_many_legs_go_through_the_pair_at_once(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    prompts = [
        await decode.prepare(parse("tokens", {"token_ids": [7 + n, *range(30, 60)]} | GREEDY))
        for n in range(12)
    ]
    legs = [prompt.leg(0, rid=rid()) for prompt in prompts]
    pairs = await asyncio.gather(*(paired(prefill, decode, leg) for leg in legs))
    ones = await asyncio.gather(*(collected(engine.generate(leg)) for leg in legs))
    assert [ids(came) for _, came in pairs] == [ids(one) for one in ones]


async def test_prefill_tells_how_long_every_cache_took_and_how_large_it_was(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    signature = prefill.info.signature
    assert signature is not None
    lengths = [1, 2, 40, 300, 40]
    bodies = [{"token_ids": [500 + n, *range(100, 99 + length)]} for n, length in enumerate(lengths)]
    prompts = [await decode.prepare(parse("tokens", body | GREEDY)) for body in bodies]
    pairs = await asyncio.gather(*(paired(prefill, decode, prompt.leg(0, rid=rid())) for prompt in prompts))
    transfers = [sent[-1].transfer for sent, _ in pairs]
    assert [transfer and transfer.seconds > 0 for transfer in transfers] == [True] * len(lengths)
    size, token = signature.page_size, token_bytes(signature)
    assert token == 2 * signature.layers * signature.kv_heads * signature.head_dim * 4
    assert [transfer and transfer.bytes for transfer in transfers] == [
        math.ceil(length / size) * size * token for length in lengths
    ]
    assert all(delta.transfer is None for _, came in pairs for delta in came)


async def test_one_token_through_the_pair_is_an_answer(prefill: RemoteEngine, decode: RemoteEngine) -> None:
    prompt = await decode.prepare(parse("tokens", BODIES["tokens"] | GREEDY | {"max_tokens": 1}))
    _, came = await paired(prefill, decode, prompt.leg(0, rid=rid()))
    assert len(ids(came)) == 1
    assert came[-1].finish is not None
    assert came[-1].finish.reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_json_answer_cut_short_ends_as_length(
    prefill: RemoteEngine, decode: RemoteEngine, max_tokens: int
) -> None:
    body = BODIES["chat"] | {"response_format": {"type": "json_object"}, "max_tokens": max_tokens}
    prompt = await decode.prepare(parse("chat", body))
    _, came = await paired(prefill, decode, prompt.leg(0, rid=rid()))
    assert len(ids(came)) == max_tokens
    assert came[-1].finish is not None
    assert came[-1].finish.reason == "length"
    assert "".join(delta.text for delta in came).lstrip().startswith("{")


async def test_log_probabilities_come_for_every_token_of_the_pair(
    engine: RemoteEngine, prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    body = BODIES["tokens"] | GREEDY | {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answers: list[Any] = []
    for engines in ((prefill, decode), (engine,)):
        prompt = await decode.prepare(parse("tokens", body))
        answer = prompt.answer()
        deltas = through_pair(*engines, prompt) if len(engines) == 2 else alone(engines[0], prompt)
        async for _ in answer.chunks(deltas):
            pass
        answers.append(answer.whole())
    paired_, one = (answer.choices[0] for answer in answers)
    assert len(paired_.logprobs.logprobs) == len(paired_.token_ids) == 6
    assert paired_.logprobs.logprobs == pytest.approx(one.logprobs.logprobs, abs=1e-3)
    assert [[entry.token_id for entry in row] for row in paired_.logprobs.top] == [
        [entry.token_id for entry in row] for row in one.logprobs.top
    ]


async def test_a_prefill_that_nobody_fetches_ends_by_its_abort_alone(prefill: RemoteEngine) -> None:
    leg = meeting(prefill, Leg(rid=rid(), index=0, token_ids=[5] * 600, sampling={"max_new_tokens": 8}))
    running = asyncio.ensure_future(collected(prefill.generate(leg)))
    done, _ = await asyncio.wait((running,), timeout=1.0)
    assert not done
    prefill.abort(leg.rid)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(running, 5)
    await idle(prefill)


async def test_a_decode_without_its_prefill_ends_by_its_abort_before_the_first_token(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    leg = meeting(prefill, Leg(rid=rid(), index=0, token_ids=[5] * 60, sampling={"max_new_tokens": 8}))
    running = asyncio.ensure_future(collected(decode.generate(leg)))
    await asyncio.wait((running,), timeout=0.5)
    decode.abort(leg.rid)
    with pytest.raises(Cancelled):
        await asyncio.wait_for(running, 5)
    await idle(decode)


async def test_a_closed_decode_leg_frees_both_engines(prefill: RemoteEngine, decode: RemoteEngine) -> None:
    leg = meeting(
        prefill,
        Leg(rid=rid(), index=0, token_ids=[9] * 40, sampling={"max_new_tokens": 2000, "ignore_eos": True}),
    )
    sending = asyncio.ensure_future(collected(prefill.generate(leg)))
    deltas = decode.generate(leg)
    assert await anext(deltas)
    await deltas.aclose()
    await sending
    await idle(prefill)
    await idle(decode)


async def test_a_decode_whose_prefill_never_comes_fails_as_a_transfer(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    # Nothing listens there, as after the loss of a prefill worker.
    nowhere = Rendezvous(bootstrap=Bootstrap(host="127.0.0.1", port=1), room=77)
    leg = Leg(rid=rid(), index=0, token_ids=[5] * 20, sampling={"max_new_tokens": 4}, rendezvous=nowhere)
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(collected(decode.generate(leg)), 60)
    await idle(decode)


async def test_aborting_one_leg_of_the_pair_leaves_a_neighbour_alone(
    prefill: RemoteEngine, decode: RemoteEngine
) -> None:
    stem = rid()[:-1]
    sampling = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    first, second = (
        meeting(prefill, Leg(rid=stem + digit, index=0, token_ids=[11] * 30, sampling=sampling))
        for digit in "01"
    )
    sends = [asyncio.ensure_future(collected(prefill.generate(leg))) for leg in (first, second)]
    doomed, spared = decode.generate(first), asyncio.ensure_future(collected(decode.generate(second)))
    async with aclosing(doomed):
        await anext(doomed)
        decode.abort(first.rid)
        with pytest.raises(Cancelled):
            async for _ in doomed:
                pass
    assert len(ids(await spared)) == 60
    await asyncio.gather(*sends)


@pytest.mark.parametrize("role", ["prefill", "both"])
async def test_a_leg_without_its_rendezvous_or_with_one_too_many_is_refused(
    engine: RemoteEngine, prefill: RemoteEngine, role: str
) -> None:
    leg = Leg(rid=rid(), index=0, token_ids=[5], sampling={"max_new_tokens": 1})
    with pytest.raises(InferbusError):
        await collected(
            prefill.generate(leg) if role == "prefill" else engine.generate(meeting(prefill, leg))
        )


async def test_prompt_log_probabilities_cannot_come_from_a_pair(
    engine: RemoteEngine, decode: RemoteEngine
) -> None:
    body = {"prompt": "Where", "echo": True, "logprobs": 1, "max_tokens": 2}
    with pytest.raises(NotSupported):
        await decode.prepare(parse("completions", body))
    prompt = await engine.prepare(parse("completions", body))
    _, choices = await message(prompt.answer(), alone(engine, prompt))
    assert len(choices[0]["logprobs"]["token_logprobs"]) == len(prompt.token_ids) + 2


async def idle(engine: RemoteEngine) -> None:
    """Waits until an engine has nothing to do."""

    async def nothing_runs() -> bool:
        load = await engine.load()
        return load.running == load.waiting == 0

    await eventually(nothing_runs, within=5.0, what="the engine goes on with what nobody wants")
