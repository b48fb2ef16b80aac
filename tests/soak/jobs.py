"""The jobs of the soak: what is asked for, what an engine makes of it, and what may come of it.

Every answer is known in advance: it counts through the alphabet from the letter after the prompt's last one,
as far as it was asked to, whoever says it and wherever it is gone on with.
"""

from __future__ import annotations

import itertools
import random
import string
from typing import Any, Final, Literal

import msgspec

from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import CLASSES, GENERATED, JobClass, Kind
from inferbus.workers.engine.scripted import Fault, Rule, Script

MODEL: Final = "scripted"
OWNERS: Final = ("acme", "globex", "initech")
ALPHABET: Final = string.ascii_lowercase
ENDLESS: Final = 30_000
ATTEMPTS: Final = 6
"""At a job: few, so that one that cannot succeed ends soon; so many that chance uses them up for no other."""

FLAKY: Final = 8
"""Ways in which an engine fails; each happens once in a worker's life."""

End = Literal["ok", "refused", "cancelled", "expired", "dead"]
ENDS: Final[dict[Status, End]] = {"ok": "ok", "cancelled": "cancelled", "expired": "expired"}

Span = tuple[float, float]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The part that a job plays.

    Attributes:
        share: How many of so many jobs; 0 for those that come by the clock.
        tokens: Fewest and most tokens of the answer.
        delay: Seconds from one to the next.
        fault: What goes wrong.
        cancel: Seconds after which its owner cancels it, at least and at most.
        deadline: Its deadline, likewise.
        ends: How it may end.
    """

    share: int = 0
    tokens: tuple[int, int] = (4, 16)
    delay: float = 0.03
    fault: Fault | None = None
    cancel: Span | None = None
    deadline: Span | None = None
    ends: tuple[End, ...] = ("ok",)

    @property
    def plain(self) -> bool:
        """Whether nothing but its answer can come of it."""
        return self.ends == ("ok",)


BROKEN: Final = "broken"
POISON: Final = "poison"
REFUSED: Final = "refused"
PARTS: Final[dict[str, Part]] = {
    "quick": Part(share=34, tokens=(1, 12), delay=0.0),
    "steady": Part(share=34),
    # Longer than the ack wait.
    "long": Part(share=4, tokens=(24, 28), delay=0.1),
    "flaky": Part(share=8, fault=Fault(at=2, times=1)),
    REFUSED: Part(share=4, ends=("refused",)),
    "cancelled": Part(share=7, cancel=(0.0, 0.6), ends=("ok", "cancelled")),
    "unending": Part(share=1, tokens=(ENDLESS, ENDLESS), cancel=(0.2, 3.0), ends=("cancelled",)),
    "hurried": Part(share=7, deadline=(0.1, 0.6), ends=("ok", "expired")),
    "overdue": Part(share=1, tokens=(ENDLESS, ENDLESS), deadline=(0.5, 3.0), ends=("expired",)),
    # An attempt goes on after the one before it, and so comes two tokens, or one, further.
    BROKEN: Part(tokens=(40, 60), fault=Fault(at=2), ends=("dead",)),
    POISON: Part(tokens=(40, 60), fault=Fault(at=1, do="kill"), ends=("dead",)),
}


def script() -> Script:
    """What every engine does."""
    bounds = ord(ALPHABET[0]), ord(ALPHABET[-1]) + 1
    rules = [
        Rule(user=user, count=bounds, length=ENDLESS, delay=part.delay, fault=part.fault)
        for name, part in PARTS.items()
        for user in _users(name)
    ]
    return Script(rules=rules)


def _users(name: str) -> list[str]:
    """What tells the engine which part a job plays."""
    return [f"{name}-{number}" for number in range(FLAKY)] if name == "flaky" else [name]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is to be handed in.

    Attributes:
        id: Its id.
        owner: Whose job.
        name: The part that it plays.
        user: What tells the engine.
        kind: Of request.
        job_class: Its class.
        letter: What its prompt ends with.
        tokens: Of its answer.
        choices: How many answers.
        streams: Whether chunks are wanted.
        cancel: Seconds after which it is cancelled.
        deadline: Seconds from its arrival.
        twice: Seconds after which it is handed in once more as the same submission.
        again: Seconds after which it is handed in once more as a new submission.
        reader: When somebody reads its stream, if anybody does.
    """

    id: str
    owner: str
    name: str
    user: str
    kind: Kind
    job_class: JobClass
    letter: str
    tokens: int
    choices: int
    streams: bool
    cancel: float | None
    deadline: float | None
    twice: float | None
    again: float | None
    reader: Literal["live", "late"] | None

    @property
    def part(self) -> Part:
        """The part that it plays."""
        return PARTS[self.name]

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        asked: dict[str, Any] = {"user": self.user, "max_tokens": self.tokens, "n": self.choices}
        if self.name == REFUSED:
            asked["max_tokens"] = -1
        if self.kind == "tokens":
            return asked | {"token_ids": [ord(self.letter)]}
        if self.kind == "chat":
            return asked | {"messages": [{"role": "user", "content": self.letter}]}
        return asked | {"prompt": self.letter}

    @property
    def text(self) -> str:
        """Its answer; tokens are letters."""
        # A chat's prompt ends with the template, after which counting begins anew.
        start = 0 if self.kind == "chat" else ALPHABET.index(self.letter) + 1
        return "".join(itertools.islice(itertools.cycle(ALPHABET), start, start + self.tokens))


class Orders:
    """Makes orders up, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"orders {seed}")
        self._numbers = itertools.count(1)
        self._names = list(PARTS)
        self._shares = [part.share for part in PARTS.values()]

    def next(self, name: str | None = None) -> Order:
        """The next one, of this part if one is named."""
        draw = self._random
        name = name or draw.choices(self._names, self._shares)[0]
        part = PARTS[name]
        fate = draw.random() if part.plain else 1.0
        choices, streams = 1, True
        if part.plain:
            choices, streams = draw.choices(((1, True), (2, True), (1, False)), (8, 1, 1))[0]
        return Order(
            id=f"{name}-{next(self._numbers)}",
            owner=draw.choice(OWNERS),
            name=name,
            user=draw.choice(_users(name)),
            kind=draw.choice(GENERATED),
            job_class=draw.choice(CLASSES),
            letter=draw.choice(ALPHABET),
            tokens=draw.randint(*part.tokens),
            choices=choices,
            streams=streams,
            cancel=_within(draw, part.cancel),
            deadline=_within(draw, part.deadline),
            twice=draw.uniform(0.0, 3.0) if fate < 0.06 else None,
            again=draw.uniform(0.0, 3.0) if 0.06 <= fate < 0.1 else None,
            reader=draw.choices(("live", "late", None), (15, 5, 80))[0],
        )


def _within(draw: random.Random, span: Span | None) -> float | None:
    return None if span is None else draw.uniform(*span)
