"""What was handed in and accepted, and what readers saw: an account of its own, apart from the server's."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from typing import Literal

import msgspec

from inferbus.schemas.answers import TokenAnswer, TokenChunk
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import JobKey
from inferbus.workers.client import Answer, Chunk, Restarted
from tests.soak.jobs import Order

Fault = Literal["lost", "doubled", "wrong"]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must not be.

    Attributes:
        fault: Of which kind.
        text: What.
        job: Which job, where it is one's.
        part: The part that it plays.
        sequence: Its submission.
    """

    fault: Fault
    text: str
    job: str | None = None
    part: str | None = None
    sequence: int | None = None


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job that the server has accepted.

    Attributes:
        order: As it was handed in.
        sequence: Its stream sequence.
        tried: When handing it in began, by the wall clock: the server had it no earlier.
    """

    order: Order
    sequence: int
    tried: dt.datetime

    @property
    def key(self) -> JobKey:
        """As subjects name it."""
        return JobKey(self.order.owner, self.order.id)


class Reading(msgspec.Struct, kw_only=True):
    """What one reader of a job's stream saw.

    Attributes:
        submission: Of this submission.
        late: Whether it began when everything was over.
        texts: Of each choice.
        finishes: How often each choice ended.
        status: How the stream ended; None: it has not.
        chunks: How many came.
        reopened: How often reading began anew, because NATS was away when it began.
        problems: What a user would have been surprised by.
    """

    submission: Submission
    late: bool
    texts: dict[int, str] = {}
    finishes: Counter[int] = msgspec.field(default_factory=Counter)
    status: Status | None = None
    chunks: int = 0
    reopened: int = 0
    problems: list[str] = []

    def anew(self) -> None:
        """Reading begins from the beginning."""
        self.texts, self.finishes, self.chunks = {}, Counter(), 0
        self.reopened += 1

    def take(self, event: Chunk | Restarted) -> None:
        """Something was read."""
        if isinstance(event, Restarted):
            self.problems.append("the answer began anew")
            self.texts, self.finishes, self.chunks = {}, Counter(), 0
            return
        number = event.seq if isinstance(event, TokenChunk) else event["seq"]
        if number != self.chunks:
            self.problems.append(f"chunk {number} came where {self.chunks} was due")
        self.chunks += 1
        if isinstance(event, TokenChunk):
            self._add(event.index, "".join(map(chr, event.token_ids)), event.finish_reason)
            return
        for choice in event["choices"]:
            delta = choice.get("delta") or choice
            said = delta.get("content") or delta.get("text") or ""
            self._add(choice["index"], said, choice.get("finish_reason"))

    def _add(self, index: int, text: str, finish: str | None) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        self.finishes[index] += finish is not None


class Ledger:
    """The account.

    Attributes:
        submissions: What was accepted, by sequence.
        uncertain: New submissions under a used id of which nobody knows whether they were stored: nothing can
            be repeated that has no id of its own.
        readings: What was read.
        problems: What went wrong already while it happened.
        repeated: Submissions that were handed in twice and stored once.
        repeats: Those that were stored twice, and what each is the second of: a server that was restarted has
            forgotten the ids of jobs that have ended. They must not run again.
    """

    def __init__(self) -> None:
        self.submissions: dict[int, Submission] = {}
        self.uncertain: list[tuple[Order, dt.datetime]] = []
        self.readings: list[Reading] = []
        self.problems: list[Problem] = []
        self.repeated = 0
        self.repeats: dict[int, int] = {}

    def wrong(self, fault: Fault, text: str, submission: Submission | None = None) -> None:
        """Notes a problem."""
        problem = Problem(fault=fault, text=text)
        if submission is not None:
            order = submission.order
            problem = msgspec.structs.replace(
                problem, job=f"{order.owner}/{order.id}", part=order.name, sequence=submission.sequence
            )
        self.problems.append(problem)

    def accept(self, order: Order, sequence: int, tried: dt.datetime) -> Submission:
        """The server has accepted a job."""
        submission = Submission(order=order, sequence=sequence, tried=tried)
        known = self.submissions.setdefault(sequence, submission)
        if known.key != submission.key:
            self.wrong("lost", f"was accepted under the number of {known.order.id}", submission)
        return submission


def texts_of(answer: Answer) -> dict[int, str]:
    """The text of every choice of a whole answer; tokens are letters."""
    if isinstance(answer, TokenAnswer):
        return {choice.index: "".join(map(chr, choice.token_ids)) for choice in answer.choices}
    assert isinstance(answer, dict)
    return {
        choice["index"]: (choice["message"]["content"] if "message" in choice else choice["text"]) or ""
        for choice in answer["choices"]
    }
