"""Figures of a batch: five counts that sum to the total, and tokens."""

from __future__ import annotations

from typing import Any

import msgspec


class Counts(msgspec.Struct, kw_only=True):
    """What became of a batch's lines; with those that are still processed they sum to the total.

    Attributes:
        succeeded: Have an answer.
        errored: Ended in an error of their own.
        cancelled: Were not done when the batch was cancelled.
        expired: Were not done when its window ended.
    """

    succeeded: int = 0
    errored: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def ended(self) -> int:
        """All of them."""
        return self.succeeded + self.errored + self.cancelled + self.expired

    def count(self, code: str | None) -> None:
        """Counts a line of the error file; `code` where it has no response."""
        if code == "batch_cancelled":
            self.cancelled += 1
        elif code == "batch_expired":
            self.expired += 1
        else:
            self.errored += 1


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of all answers."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: dict[str, Any] | None) -> None:
        """Adds the usage of one answer."""
        if not usage:
            return
        self.input_tokens += usage.get("prompt_tokens") or 0
        self.output_tokens += usage.get("completion_tokens") or 0
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.reasoning_tokens += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0

    def openai(self) -> dict[str, Any]:
        """As OpenAI's batch object has it."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }
