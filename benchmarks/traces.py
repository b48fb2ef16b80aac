"""Requests that come when their callers want them to: lengths, shared beginnings, moments, and good answers.

Arrivals are a Poisson process: they do not wait for answers (an open loop), so a fleet that is too slow for a
rate shows it by answers that come later and later. Everything is drawn from a seed, and is the same for every
layout.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from benchmarks.load import Sent
from benchmarks.report import Quantiles
from benchmarks.workload import IDS

REFUSED: Final = frozenset({"no_responders", "overloaded", "draining", "no_worker", "prefill_unavailable"})
"""Fates of requests that nobody began to answer; whoever sent them may try again at once."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of load.

    Attributes:
        name: For people.
        prompt: Tokens of a prompt.
        answer: Tokens of an answer.
        shared: Tokens at the beginning of a prompt that others have as well: a system prompt.
        systems: How many different ones there are.
        rates: Requests a second, rising.
    """

    name: str
    prompt: int
    answer: int
    shared: int = 0
    systems: int = 8
    rates: list[float]

    def bodies(self, count: int, *, seed: str) -> list[dict[str, Any]]:
        """Requests; the system prompts are the trace's own, all else is the seed's."""
        draw = random.Random(f"{self.name} {seed}")
        systems = [_ids(random.Random(f"{self.name} {k}"), self.shared) for k in range(self.systems)]
        return [
            {
                "token_ids": [*draw.choice(systems), *_ids(draw, self.prompt - self.shared)],
                "max_tokens": self.answer,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            for _ in range(count)
        ]


LONG: Final = Trace(name="long", prompt=4000, answer=200, shared=1024, rates=[1, 2, 4, 8, 12, 16])
SHORT: Final = Trace(name="short", prompt=200, answer=200, rates=[8, 16, 32, 48, 64, 96])
TRACES: Final = {trace.name: trace for trace in (LONG, SHORT)}


def arrivals(rate: float, seconds: float, *, seed: str) -> list[float]:
    """Moments of a Poisson process from 0 on, the last one before `seconds`."""
    draw, moments, now = random.Random(f"arrivals {rate} {seed}"), [0.0], 0.0
    while (now := now + draw.expovariate(rate)) < seconds:
        moments.append(now)
    return moments


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a good answer keeps to.

    Attributes:
        first: Seconds to the first token at most.
        gap: Seconds between its tokens at most, for 99 in 100 of them.
    """

    first: float = 1.0
    gap: float = 0.025

    def met(self, request: Sent) -> bool:
        """Whether an answer is good."""
        gaps = sorted(_gaps(request))
        worst = gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] if gaps else 0.0
        return request.fate == "ok" and first(request) <= self.first and worst <= self.gap


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests of one rate.

    Attributes:
        requests: That were sent.
        seconds: From the first one sent to the last message.
        answered: To their ends.
        refused: By nobody taking them, and why.
        failed: After they were taken, and why.
        rate: Output tokens a second, of whole answers.
        first: To the first token, ms, of whole answers.
        gap: From a message to the next one, a token each as a rule; ms.
        good: Answers within the goal.
        goodput: Those, a second.
        late: How far the sender was behind a request's moment, ms; more than a few, and it set the pace.
    """

    requests: int
    seconds: float
    answered: int
    refused: dict[str, int]
    failed: dict[str, int]
    rate: float
    first: Quantiles | None
    gap: Quantiles | None
    good: int
    goodput: float
    late: Quantiles | None

    @classmethod
    def of(cls, sent: Sequence[Sent], answer: int, goal: Goal) -> Outcome:
        """Counts.

        Args:
            sent: The requests.
            answer: Tokens of each answer.
            goal: What a good one keeps to.
        """
        whole = [request for request in sent if request.fate == "ok"]
        fates = Counter(request.fate for request in sent if request.fate != "ok")
        end = max((moment for request in sent for moment in request.moments[-1:]), default=0.0)
        seconds = max(end, max(request.sent for request in sent)) or 1e-9
        good = sum(map(goal.met, whole))
        return cls(
            requests=len(sent),
            seconds=round(seconds, 3),
            answered=len(whole),
            refused={fate: count for fate, count in fates.items() if fate in REFUSED},
            failed={fate: count for fate, count in fates.items() if fate not in REFUSED},
            rate=round(len(whole) * answer / seconds, 1),
            first=Quantiles.of(map(first, whole)),
            gap=Quantiles.of(gap for request in whole for gap in _gaps(request)),
            good=good,
            goodput=round(good / seconds, 3),
            late=Quantiles.of(request.sent - request.due for request in sent),
        )

    def shown(self) -> str:
        """In a line."""
        line = f"{self.answered} of {self.requests}, {self.rate:,.0f} tok/s, goodput {self.goodput:.2f}/s"
        if self.first and self.gap:
            line += f", first {self.first.p50:.0f} (p99 {self.first.p99:.0f}) ms"
            line += f", gap {self.gap.p50:.1f} (p99 {self.gap.p99:.1f}) ms"
        return line + "".join(f", {count} {fate}" for fate, count in {**self.refused, **self.failed}.items())


def first(request: Sent) -> float:
    """Seconds from the moment at which a request was to be sent to its first token."""
    return request.moments[0] - request.due


def _gaps(request: Sent) -> list[float]:
    return [b - a for a, b in pairwise(request.moments)]


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(*IDS) for _ in range(count)]
