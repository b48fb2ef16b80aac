"""The jobs of the model: what is asked for, what an engine makes of it, what was accepted and cancelled."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from inferbus.schemas.subjects import JobKey, Kind
from inferbus.workers.engine.scripted import Fault, Rule, Script

KILLER: Final = "killer"
KILLS_AFTER: Final = 2
"""Tokens after which that job takes its worker with it."""


class Shape(msgspec.Struct, frozen=True):
    """How a request is made, and where its answer goes."""

    kind: Kind = "tokens"
    body: dict[str, Any] = {}
    inbox: bool = False


SHAPES: Final[dict[str, Shape]] = {
    "tokens": Shape(),
    "chat": Shape("chat"),
    "completion": Shape("completions"),
    "pair": Shape(body={"n": 2}),
    "logprobs": Shape(body={"logprobs": True}),
    "whole": Shape(body={"stream": False}),
    "inbox": Shape(inbox=True),
}

LETTERS: Final = (97, 123)
SCRIPTS: Final[dict[str, tuple[int, Rule]]] = {
    "quick": (5, Rule(count=LETTERS, length=99)),
    "steady": (6, Rule(count=LETTERS, length=99, delay=2.0)),
    "long": (7, Rule(count=LETTERS, length=99, delay=9.0)),
    "flaky": (5, Rule(count=LETTERS, length=99, delay=1.0, fault=Fault(at=2, times=1))),
    "broken": (12, Rule(count=LETTERS, length=99, delay=1.0, fault=Fault(at=2))),
    KILLER: (5, Rule(count=LETTERS, length=99, delay=1.0)),
    "big": (400, Rule(count=LETTERS, length=999, per_delta=80)),
    "hang": (5, Rule(count=LETTERS, length=99, delay=1.0, fault=Fault(at=2, do="hang"))),
}
"""What an engine does with a job of that name: how many tokens, and how."""

OTHER: Final = "other"
"""A job whose answer depends on the worker, as one does that is sampled without a seed."""

REFUSED: Final = "refused"
"""A job that is its caller's mistake."""

NAMES: Final = (*SCRIPTS, OTHER, REFUSED)


def request(name: str, shape: Shape, filler: int = 0) -> dict[str, Any]:
    """The body of a job."""
    if name == REFUSED:
        return {"max_tokens": -1}
    body: dict[str, Any] = {"user": name, "max_tokens": SCRIPTS[name][0] if name in SCRIPTS else 6}
    if shape.kind == "tokens":
        body["token_ids"] = [32] * (1 + filler)
    elif shape.kind == "chat":
        body["messages"] = [{"role": "user", "content": "x" * (1 + filler)}]
    else:
        body["prompt"] = "x" * (1 + filler)
    return body | shape.body


def script(number: int) -> Script:
    """What the engine of a worker does."""
    rules = [msgspec.structs.replace(rule, user=name) for name, (_, rule) in SCRIPTS.items()]
    own = list(range(LETTERS[0] + number, LETTERS[0] + number + 12))
    return Script(rules=[*rules, Rule(user=OTHER, tokens=own, delay=2.0)])


class Submission(msgspec.Struct):
    """A job that the server has accepted.

    Attributes:
        sequence: Its stream sequence.
        key: Owner and id.
        name: What the engine makes of it.
        reply: Where its answer goes.
        stored: When the server stored it.
        deadline: When it expires.
        size: Of its body.
    """

    sequence: int
    key: JobKey
    name: str
    reply: str
    stored: float
    deadline: float | None
    size: int


class Cancel(msgspec.Struct, frozen=True):
    """A cancel that the server has stored."""

    key: JobKey
    named: int | None
    time: float

    def aims_at(self, job: Submission) -> bool:
        """Whether it is meant for a submission."""
        if self.named is not None:
            return self.key == job.key and self.named == job.sequence
        return self.key == job.key and self.time >= job.stored
