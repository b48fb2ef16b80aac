"""How many KV tokens the running requests will need at most, and what a request is expected to need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

WEIGHT: Final = 0.05
"""Of one more answer in the running means."""

FIRST_PROMPT: Final = 512.0
"""Tokens that a prompt is taken to have before one was seen."""


def peak(requests: Iterable[tuple[int, int]]) -> int:
    """The most KV tokens in use at any time from now on.

    Every request grows by one token a step and frees everything when it ends, so the sum has its peaks just
    before an end. This is what lets requests of different ages share the cache: the sum of their final sizes
    would leave much of it unused.

    Args:
        requests: Tokens that each one holds now, and tokens that it has still to generate.
    """
    most = held = 0
    for count, (used, left) in enumerate(sorted(requests, key=lambda request: -request[1]), start=1):
        held += used
        most = max(most, held + count * left)
    return most


class Expectation:
    """What requests of one class need, learned from those that ended.

    Attributes:
        prompt: Mean tokens of a prompt.
        share: Mean share of its allowed new tokens that an answer uses.
    """

    def __init__(self) -> None:
        self.prompt = FIRST_PROMPT
        self.share = 1.0

    def saw_prompt(self, tokens: int) -> None:
        """A request was tokenised."""
        self.prompt += WEIGHT * 4 * (tokens - self.prompt)

    def saw_answer(self, generated: int, allowed: int) -> None:
        """A request ended after `generated` of `allowed` tokens."""
        if allowed > 0:
            self.share += WEIGHT * (min(1.0, generated / allowed) - self.share)

    def retracted(self) -> None:
        """The engine ran out of KV cache: answers are longer than was thought."""
        self.share = min(1.0, self.share * 1.1 + 0.01)

    def new_tokens(self, generated: int, allowed: int) -> int:
        """Tokens that a request is expected to generate yet."""
        return round(self.share * max(0, allowed - generated))
