"""A prepared request: checked, tokenised, and divided into legs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

from inferbus.workers.engine.interface import AnswerFormatter, AnswerIdentity, Leg

SEEDS: Final = 2**64


class SGLangPrompt:
    """`Prompt` for this engine.

    Args:
        prompts: The tokens of each prompt.
        lengths: New tokens that a choice of each prompt may have.
        sampling: SGLang's sampling parameters of one choice.
        options: Further fields of SGLang's `GenerateReqInput`, as plain data.
        choices: How many legs for each prompt.
        answer: Makes a formatter.
        decode: The text of tokens after this prompt; None where the answer has no text.
        resumable: Whether an answer may be resumed after an interruption; see `Prompt.resumed`.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        *,
        lengths: list[int],
        sampling: dict[str, Any],
        options: dict[str, Any],
        choices: int,
        answer: Callable[[AnswerIdentity], AnswerFormatter],
        decode: Callable[[list[int]], str] | None = None,
        resumable: bool = False,
    ) -> None:
        self._prompts = prompts
        self._lengths = lengths
        self._sampling = sampling
        self._options = options
        self._choices = choices
        self._answer = answer
        self._decode = decode
        self._resumable = resumable

    @property
    def token_ids(self) -> list[int]:
        """See `Prompt.token_ids`."""
        return self._prompts[0]

    @property
    def choices(self) -> int:
        """See `Prompt.choices`."""
        return self._choices * len(self._prompts)

    def leg(self, index: int, *, rid: str) -> Leg:
        """One choice as one engine call: without `n`, and with a seed of its own where there is one."""
        which, choice = divmod(index, self._choices)
        sampling = {**self._sampling, "max_new_tokens": self._lengths[which]}
        seed = sampling.get("sampling_seed")
        if seed is not None:
            # Counted anew for each prompt, so that its answers do not depend on the prompts before it.
            sampling["sampling_seed"] = (seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
        return Leg(
            rid=rid,
            index=index,
            token_ids=self._prompts[which],
            sampling=sampling,
            options=dict(self._options),
        )

    def answer(self, identity: AnswerIdentity | None = None) -> AnswerFormatter:
        """See `Prompt.answer`."""
        return self._answer(identity or AnswerIdentity.new())

    def resumed(self, token_ids: list[int], text: str) -> SGLangPrompt | None:
        """See `Prompt.resumed`."""
        left = self._lengths[0] - len(token_ids)
        if not self._resumable or left < 1:
            return None
        if self._decode is not None and self._decode(token_ids) != text:
            return None
        resumed = copy.copy(self)
        resumed._prompts = [self._prompts[0] + token_ids]
        resumed._lengths = [left]
        if least := self._sampling.get("min_new_tokens"):
            resumed._sampling = {**self._sampling, "min_new_tokens": max(0, least - len(token_ids))}
        return resumed
