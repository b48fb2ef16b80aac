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
    """

    passes: int
    shapes: list[Shape]
    prompt: int = 32
    answer: int = 64
    warm: int = 24

    def warming(self) -> Iterator[Shape]:
        """What is done before."""
        for kind in KINDS:
            yield Shape(kind=kind, concurrency=8, requests=self.warm)

    def bodies(self, shape: Shape, number: int) -> list[dict[str, Any]]:
        """The requests of the `number`-th reading of an engine."""
        draw = random.Random(f"{number} {shape.kind} {shape.concurrency}")
        common = {"max_tokens": self.answer, "temperature": 0.0, "ignore_eos": True}
        if shape.kind == "tokens":
            return [
                {"token_ids": [draw.randrange(*IDS) for _ in range(self.prompt)], **common}
                for _ in range(shape.requests)
            ]
        return [
            {
                "messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=self.prompt))}],
                "stream": True,
                **common,
            }
            for _ in range(shape.requests)
        ]


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
