"""The requests of the engine benchmark: the same ones, in the same order, for every layout.

Prompts are random and never come twice within one engine's life, so that no reading finds them in the prefix
cache; answers have a fixed length, so that every layout makes the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

Kind = Literal["tokens", "chat"]
KINDS: Final[tuple[Kind, ...]] = ("tokens", "chat")

WORDS: Final = ("river", "stone", "cloud", "paper", "green", "seven", "under", "house", "light", "north")
IDS: Final = (256, 32_768)
"""Bounds of the prompts' token ids: words, not control tokens."""
LONGEST: Final = 8
"""Times the median, of the longest prompt and the longest answer, where lengths are mixed."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """One reading: so many requests of one kind, a number of them open at a time."""

    kind: Kind
    concurrency: int
    requests: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with one engine.

    Attributes:
        passes: How often every shape is measured.
        shapes: In their order.
        prompt: Tokens of a prompt; words, for chat.
        answer: Tokens of an answer.
        warm: Requests of each kind before anything is measured.
        spread: How far lengths are apart: the standard deviation of their logarithms, around `prompt` and
            `answer` as the medians. 0: all are the same.
    """

    passes: int
    shapes: list[Shape]
    prompt: int = 32
    answer: int = 64
    warm: int = 24
    spread: float = 0.0

    def warming(self) -> Iterator[Shape]:
        """What is done before."""
        for kind in KINDS:
            yield Shape(kind=kind, concurrency=8, requests=self.warm)

    def bodies(self, shape: Shape, number: int) -> list[dict[str, Any]]:
        """The requests of the `number`-th reading of an engine."""
        draw = random.Random(f"{number} {shape.kind} {shape.concurrency}")
        # The same lengths in every reading, whatever the prompts are.
        sizes = random.Random("lengths")
        bodies = []
        for _ in range(shape.requests):
            prompt, answer = (drawn(sizes, median, self.spread) for median in (self.prompt, self.answer))
            common = {"max_tokens": answer, "temperature": 0.0, "ignore_eos": True}
            if shape.kind == "tokens":
                bodies.append({"token_ids": [draw.randrange(*IDS) for _ in range(prompt)], **common})
            else:
                text = " ".join(draw.choices(WORDS, k=prompt))
                bodies.append({"messages": [{"role": "user", "content": text}], "stream": True, **common})
        return bodies


def drawn(draw: random.Random, median: int, spread: float) -> int:
    """A length: lognormal around its median, and cut at both ends."""
    if not spread:
        return median
    return max(4, min(LONGEST * median, round(median * draw.lognormvariate(0.0, spread))))


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One reading.

    Attributes:
        layout: `bare`, `both` or `pair`.
        round: Which life of the engine.
        number: Of the reading within it.
        kind: Of the requests.
        concurrency: Requests open at a time.
        requests: How many in all.
        tokens: That were made.
        messages: That they came in.
        seconds: From the first request to the end of the last answer.
        first: Seconds from each request to its first message.
        main_us: CPU of the process that holds the engine, microseconds a token.
        others: Cores that other programs used meanwhile.
        stolen: Cores that the hypervisor kept.
    """

    layout: str
    round: int
    number: int
    kind: Kind
    concurrency: int
    requests: int
    tokens: int
    messages: int
    seconds: float
    first: list[float]
    main_us: float
    others: float
    stolen: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
