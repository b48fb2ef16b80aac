"""One leg of a scripted engine: its answer, cut into deltas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from inferbus.workers.engine.interface import Delta, EngineInfo, Finish, Leg
from inferbus.workers.engine.scripted.script import Rule
from inferbus.workers.engine.scripted.text import ByteTokenizer

LOGPROB: Final = -0.5
"""Of every token; each alternative has this much less than the one before."""


def play(
    leg: Leg, rule: Rule, info: EngineInfo, tokenizer: ByteTokenizer, *, stops_at: int | None
) -> Iterator[Delta]:
    """The deltas of one leg, one after the other, without any waiting; the last one has a finish.

    Args:
        leg: What is asked for.
        rule: What is answered.
        info: The engine's limits.
        tokenizer: Makes text, where the engine has a tokenizer.
        stops_at: Number of tokens after which a delta must end, since something happens there.
    """
    index, options, sampling = leg.index, leg.options, leg.sampling
    prompt_tokens, cached_tokens = len(leg.token_ids), rule.cached_tokens
    top = options.get("top_logprobs_num") or 0 if options.get("return_logprob") else None
    push = tokenizer.stream().push if info.tokenizer else None
    trims = not sampling.get("no_stop_trim")
    done = 0
    for token_ids, finish in _pieces(leg, rule, info, stops_at):
        done += len(token_ids)
        if push is None:
            text = ""
        elif finish is None:
            text = push(token_ids)
        else:
            # The token that ends a choice is one of its tokens, but no part of its text; as in SGLang.
            text = push(token_ids[:-1] if finish.matched is not None and trims else token_ids, last=True)
        yield Delta(
            index=index,
            token_ids=token_ids,
            text=text,
            finish=finish,
            prompt_tokens=prompt_tokens,
            completion_tokens=done,
            cached_tokens=cached_tokens,
            meta={} if top is None else _logprobs(token_ids, top),
        )


def _pieces(
    leg: Leg, rule: Rule, info: EngineInfo, stops_at: int | None
) -> Iterator[tuple[list[int], Finish | None]]:
    sampling = leg.sampling
    endless = bool(sampling.get("ignore_eos"))
    ends = set(sampling.get("stop_token_ids") or ())
    if rule.end is not None and not endless:
        ends.add(rule.end)
    left = info.capacity.context_length - len(leg.token_ids)
    left = min(sampling.get("max_new_tokens") or left, left)
    size = rule.per_delta
    before_stop = stops_at or 0
    tokens = rule.answer(leg.token_ids, vocabulary=info.capacity.vocabulary, endless=endless)
    ahead = list(islice(tokens, size))
    while True:
        token_ids = ahead
        if 0 < before_stop < len(token_ids):
            token_ids, ahead = token_ids[:before_stop], token_ids[before_stop:]
        else:
            ahead = list(islice(tokens, size))
        if ends and not ends.isdisjoint(token_ids[:left]):
            end = next(i for i, token in enumerate(token_ids) if token in ends)
            yield token_ids[: end + 1], Finish(reason="stop", matched=token_ids[end])
            return
        if len(token_ids) >= left:
            yield token_ids[:left], Finish(reason="length")
            return
        if not ahead:
            yield token_ids, Finish(reason=rule.finish)
            return
        left -= len(token_ids)
        before_stop -= len(token_ids)
        yield token_ids, None


def prefilled(leg: Leg, rule: Rule) -> Delta:
    """The only delta of a prefill leg: like SGLang's, it ends by length, and its token means nothing."""
    return Delta(
        index=leg.index,
        token_ids=[],
        text="",
        finish=Finish(reason="length"),
        prompt_tokens=len(leg.token_ids),
        cached_tokens=rule.cached_tokens,
        transfer=rule.transfer,
    )


def _logprobs(token_ids: list[int], top: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"output_token_logprobs": [(LOGPROB, token, None) for token in token_ids]}
    if top:
        meta["output_top_logprobs"] = [
            [(LOGPROB * (rank + 1), token + rank, None) for rank in range(top)] for token in token_ids
        ]
    return meta
