"""Token answers: from deltas of interleaved choices to chunks and the whole."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas import codec
from inferbus.schemas.answers import TokenChunk, TokenLogprobs, TopLogprob
from inferbus.schemas.errors import EngineFailed
from inferbus.schemas.requests import TokenRequest
from inferbus.workers.engine.interface import Delta, Finish
from inferbus.workers.engine.tokens import LOWEST_LOGPROB, TokensAnswer

STOP = Finish(reason="stop", matched=2)
LENGTH = Finish(reason="length")


def delta(
    index: int,
    *token_ids: int,
    finish: Finish | None = None,
    cached_tokens: int | None = None,
    **meta: Any,
) -> Delta:
    ids = list(token_ids)
    return Delta(index=index, token_ids=ids, text="", finish=finish, cached_tokens=cached_tokens, meta=meta)


def answering(
    prompt_tokens: int,
    *,
    choices: int = 1,
    warnings: Sequence[str] = (),
    logprobs: bool = False,
    top_logprobs: int | None = None,
) -> TokensAnswer:
    request = TokenRequest(
        token_ids=[1], warnings=list(warnings), logprobs=logprobs, top_logprobs=top_logprobs
    )
    return TokensAnswer(request, prompt_tokens=prompt_tokens, choices=choices)


async def stream(*deltas: Delta) -> AsyncIterator[Delta]:
    for one in deltas:
        yield one


async def chunks(answer: TokensAnswer, *deltas: Delta) -> list[TokenChunk]:
    return [chunk async for chunk in answer.chunks(stream(*deltas))]


async def test_a_chunk_holds_what_its_delta_holds() -> None:
    answer = answering(prompt_tokens=3)
    first, second = await chunks(answer, delta(0, 5, 6), delta(0, 2, finish=STOP, cached_tokens=1))
    assert codec.encode(first) == b'{"job":"","attempt":0,"seq":0,"index":0,"token_ids":[5,6]}'
    assert (second.token_ids, second.finish_reason, second.matched) == ([2], "stop", 2)
    assert codec.encode(second.usage) == (
        b'{"prompt_tokens":3,"completion_tokens":3,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":1}}'
    )


async def test_a_delta_that_says_nothing_makes_no_chunk() -> None:
    found = await chunks(answering(1), delta(0), delta(0, 5), delta(0), delta(0, finish=LENGTH))
    assert [chunk.token_ids for chunk in found] == [[5], []]


async def test_usage_comes_with_the_last_finish_of_all_choices() -> None:
    answer = answering(prompt_tokens=3, choices=2)
    found = await chunks(
        answer,
        delta(0, 5),
        delta(1, 7),
        delta(1, finish=LENGTH, cached_tokens=3),
        delta(0, 6),
        delta(0, finish=LENGTH, cached_tokens=1),
    )
    assert [chunk.usage is not None for chunk in found] == [False, False, False, False, True]
    usage = found[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 3)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


async def test_the_whole_answer_has_every_choice_in_order() -> None:
    answer = answering(prompt_tokens=1, choices=2, warnings=["w"])
    await chunks(answer, delta(1, 7, finish=LENGTH), delta(0, 5), delta(0, 2, finish=STOP))
    whole = answer.whole()
    assert [(c.index, c.token_ids, c.finish_reason, c.matched) for c in whole.choices] == [
        (0, [5, 2], "stop", 2),
        (1, [7], "length", None),
    ]
    assert whole.warnings == ["w"]


async def test_warnings_come_with_the_first_chunk_alone() -> None:
    found = await chunks(answering(prompt_tokens=1, warnings=["w"]), delta(0, 5), delta(0, 6, finish=LENGTH))
    assert [chunk.warnings for chunk in found] == [["w"], []]


@pytest.mark.parametrize(
    "deltas",
    [
        pytest.param([], id="nothing"),
        pytest.param([delta(0, 5)], id="no-finish"),
        pytest.param([delta(0, 5, finish=LENGTH)], id="one-of-two"),
        pytest.param([delta(0, 5, finish=LENGTH), delta(0, 5, finish=LENGTH)], id="one-twice"),
    ],
)
async def test_an_engine_that_breaks_its_word_is_found_out(deltas: list[Delta]) -> None:
    answer = answering(prompt_tokens=1, choices=2)
    with pytest.raises(EngineFailed):
        await chunks(answer, *deltas)
    with pytest.raises(EngineFailed):
        answer.whole()


async def test_log_probabilities_stand_beside_their_tokens() -> None:
    answer = answering(prompt_tokens=1, logprobs=True, top_logprobs=1)
    found = await chunks(
        answer,
        delta(
            0,
            5,
            6,
            output_token_logprobs=[(-0.5, 5, None), (-1.0, 6, "x")],
            output_top_logprobs=[[(-0.5, 5, None)], [(-0.1, 9, None), (-1.0, 6, None)]],
        ),
        delta(0, finish=LENGTH),
    )
    assert found[0].logprobs == TokenLogprobs(
        logprobs=[-0.5, -1.0], top=[[TopLogprob(-0.5, 5)], [TopLogprob(-0.1, 9)]]
    )
    assert found[1].logprobs is None
    assert answer.whole().choices[0].logprobs == found[0].logprobs


@pytest.mark.parametrize("value", [-math.inf, math.nan, None])
async def test_what_json_cannot_write_becomes_the_lowest_log_probability(value: float | None) -> None:
    answer = answering(prompt_tokens=1, logprobs=True)
    (chunk,) = await chunks(answer, delta(0, 5, finish=LENGTH, output_token_logprobs=[(value, 5, None)]))
    assert chunk.logprobs == TokenLogprobs(logprobs=[LOWEST_LOGPROB])
    assert codec.decode(codec.encode(chunk), TokenChunk) == chunk


async def test_log_probabilities_that_nobody_asked_for_are_left_out() -> None:
    (chunk,) = await chunks(
        answering(prompt_tokens=1), delta(0, 5, finish=LENGTH, output_token_logprobs=[(-0.5, 5, None)])
    )
    assert chunk.logprobs is None


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [(-0.5, 5, None)] * 2},
        {"output_token_logprobs": [(-0.5, 5, None)], "output_top_logprobs": []},
    ],
    ids=["missing", "null", "too-many", "no-alternatives"],
)
async def test_log_probabilities_that_are_missing_are_an_engine_failure(
    meta: dict[str, Any],
) -> None:
    answer = answering(prompt_tokens=1, logprobs=True, top_logprobs=1)
    with pytest.raises(EngineFailed):
        await chunks(answer, delta(0, 5, **meta))


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=12), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
async def test_chunks_come_to_the_whole_whatever_the_split_and_order(
    choices: list[list[int]], random: Any
) -> None:
    pending = []
    for index, token_ids in enumerate(choices):
        parts, rest = [], token_ids
        while rest:
            size = random.randint(1, len(rest))
            parts.append(delta(index, *rest[:size]))
            rest = rest[size:]
        pending.append([*parts, delta(index, finish=LENGTH)])
    order = []
    while any(pending):
        order.append(random.choice([queue for queue in pending if queue]).pop(0))
    answer = answering(prompt_tokens=1, choices=len(choices))
    found = await chunks(answer, *order)
    whole = answer.whole()
    assert [choice.token_ids for choice in whole.choices] == choices
    for index, token_ids in enumerate(choices):
        assert [token for chunk in found if chunk.index == index for token in chunk.token_ids] == token_ids
        assert sum(chunk.finish_reason is not None for chunk in found if chunk.index == index) == 1
    assert found[-1].usage == whole.usage
    assert whole.usage.completion_tokens == sum(map(len, choices))
