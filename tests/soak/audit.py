"""The reconciliation: what was accepted against what is stored, and what was read against what is stored."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from inferbus.schemas import headers
from inferbus.schemas.errors import CallerError, InferbusError
from inferbus.schemas.headers import Status
from inferbus.schemas.subjects import JobKey
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.client.messages import Result, parse_result
from tests.soak.fleet import Fleet
from tests.soak.jobs import ATTEMPTS, BROKEN, ENDS, POISON, End
from tests.soak.ledger import Fault, Ledger, Problem, Reading, Submission, texts_of

DEATHS: Final = frozenset({"attempts_exhausted", "engine_failed"})
"""Codes of errors that a dead letter goes with."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The stored result of a submission.

    Attributes:
        end: Of which kind; None for one that no job may have.
        status: As it says.
        attempt: Which attempt it was.
        continued: Whether that went on after another.
        time: When it was stored.
        what: For people.
    """

    end: End | None
    status: Status
    attempt: int
    continued: bool
    time: dt.datetime
    what: str


class Audit:
    """Reads everything that is stored, and says what is not as it must be.

    Args:
        bus: The connection.
        ledger: The account to hold it against.
        fleet: Knows what happened to workers, and what they logged.

    Attributes:
        endings: The first result of every submission.
        letters: When a submission's first dead letter was written.
        stored: Jobs that the server stored.
        worn_out: Sound jobs that used up their attempts, as so much happened around them.
        problems: What is not as it must be.
    """

    def __init__(self, bus: Bus, ledger: Ledger, fleet: Fleet) -> None:
        self._bus = bus
        self._ledger = ledger
        self._fleet = fleet
        self._newest: dict[JobKey, int] = {}
        self.endings: dict[int, Ending] = {}
        self.letters: dict[int, dt.datetime] = {}
        self.stored = 0
        self.worn_out = 0

    @property
    def problems(self) -> list[Problem]:
        """Also those that were met before."""
        return self._ledger.problems

    async def reconcile(self) -> None:
        """Everything that is stored; nothing may be under way any more."""
        subjects = self._bus.subjects
        await self._read(layout.RESULTS, subjects.all("results"), self._result)
        await self._read(layout.DEAD, subjects.all("dead"), self._letter)
        info = await browse.stream_info(self._bus, layout.JOBS)
        # The number of the first job is made from the clock, see `layout.new_stream`.
        first, last = info["config"]["first_seq"], info["state"]["last_seq"]
        self.stored = last - first + 1
        for sequence in range(first, last + 1):
            self._check_stored(sequence)
        for submission in self._ledger.submissions.values():
            self._check_end(submission)
        for reading in self._ledger.readings:
            self._check_reading(reading)

    def check_workers(self) -> None:
        """How workers ended, and what they logged; none may be there any more."""
        for problem in self._fleet.problems:
            self._wrong("wrong", problem)
        found: Counter[str] = Counter()
        for event in self._fleet.events():
            name = event.get("event")
            if name is None:
                found[f"says {event.get('text')}"] += 1
            elif name == "job.started" and (first := self._ledger.repeats.get(event["submission"])):
                second = self._ledger.submissions[event["submission"]]
                self._wrong("doubled", f"runs, and is {first} handed in once more", second)
            elif "exception" in event:
                found[f"logs a defect: {name}"] += 1
        for what, count in found.items():
            self._wrong("wrong", f"a worker {what}, {count} times")

    async def _read(self, stream: str, subject: str, take: Callable[[Stored], None]) -> None:
        async for page, _ in browse.pages(self._bus, stream, subject):
            for stored in page:
                take(stored)

    def _result(self, stored: Stored) -> None:
        key = self._bus.subjects.parse_key(stored.subject, "results")
        try:
            result = parse_result(stored.data, stored.headers)
        except InferbusError as error:
            self._wrong("wrong", f"the result of {key} is none: {error.message}")
            return
        sequence = result.submission or 0
        submission = self._known(key, sequence)
        if sequence < self._newest.get(key, 0):
            self._wrong("wrong", "its result replaced that of a newer submission", submission)
        self._newest[key] = max(sequence, self._newest.get(key, 0))
        if sequence in self.endings:
            self._wrong("doubled", f"has a second result: {_what(result)}", submission)
            return
        self.endings[sequence] = _ending(result, stored.time)
        if submission is not None:
            self._check_result(submission, result, stored.time)

    def _known(self, key: JobKey, sequence: int) -> Submission | None:
        """The submission of that number; of an uncertain one, its result tells that it was stored."""
        known = self._ledger.submissions.get(sequence)
        if known is not None:
            if known.key == key:
                return known
            self._wrong("wrong", f"its result is that of {key}", known)
            return None
        for uncertain in self._ledger.uncertain:
            order, tried = uncertain
            if key == JobKey(order.owner, order.id):
                self._ledger.uncertain.remove(uncertain)
                return self._ledger.accept(order, sequence, tried)
        self._wrong("doubled", f"{key} has a result as {sequence}, which nobody was told of")
        return None

    def _letter(self, stored: Stored) -> None:
        sequence = int(stored.headers[headers.SUBMISSION])
        submission = self._ledger.submissions.get(sequence)
        if submission is None:
            self._wrong("doubled", f"a dead letter of {sequence}, which nobody was told of")
        elif sequence in self.letters:
            self._wrong("doubled", "has a second dead letter", submission)
        self.letters.setdefault(sequence, stored.time)

    def _check_stored(self, sequence: int) -> None:
        if sequence not in self._ledger.submissions and sequence not in self.endings:
            self._wrong("lost", f"submission {sequence} was stored, and there is nothing to show for it")

    def _check_result(self, submission: Submission, result: Result, stored: dt.datetime) -> None:
        order = submission.order
        if result.answer is not None:
            told = result.answer["job"] if isinstance(result.answer, dict) else result.answer.job
            if told != order.id:
                self._wrong("wrong", f"its result says that it is {told}'s", submission)
            texts = texts_of(result.answer)
            if texts != dict.fromkeys(range(order.choices), order.text):
                self._wrong("wrong", f"its result is {texts}, not {order.text}", submission)
        if result.status == "expired" and order.deadline is not None:
            lasted = (stored - submission.tried).total_seconds()
            if lasted < order.deadline:
                self._wrong("wrong", f"expired after {lasted:.3f} s of {order.deadline:.3f}", submission)

    def _check_end(self, submission: Submission) -> None:
        sequence, part = submission.sequence, submission.order.part
        ending = self.endings.get(sequence)
        if ending is None:
            # One that was handed in again before it had ended needs none of its own.
            if self._newest.get(submission.key, 0) <= sequence:
                self._wrong("lost", "has no result", submission)
            return
        if ending.end not in part.ends and not self._worn_out(submission, ending):
            self._wrong("wrong", f"ended as {ending.what}, not {' or '.join(part.ends)}", submission)
        if (ending.end == "dead") != (sequence in self.letters):
            there = "a" if sequence in self.letters else "no"
            self._wrong("wrong", f"has {there} dead letter, and the result {ending.what}", submission)

    def _worn_out(self, submission: Submission, ending: Ending) -> bool:
        """Whether so much happened while a sound job lived that it may have used up its attempts."""
        if ending.end != "dead" or submission.order.name in (BROKEN, POISON):
            return False
        chances = self._fleet.hits(submission.tried, ending.time)
        if submission.order.part.fault is not None:
            # Every worker that was there already may have failed it once.
            chances += len(self._fleet.places)
        worn_out = chances >= ATTEMPTS
        self.worn_out += worn_out
        return worn_out

    def _check_reading(self, reading: Reading) -> None:
        submission = reading.submission
        who = "a late reader" if reading.late else "a live reader"
        for problem in reading.problems:
            self._wrong("wrong", f"{who}: {problem}", submission)
        if reading.status is None:
            if not reading.problems:
                self._wrong("lost", f"{who} waits for ever", submission)
            return
        # What another submission under this id ended with counts where it came first.
        ending = self.endings.get(submission.sequence) or self.endings.get(
            self._newest.get(submission.key, 0)
        )
        if ending is None:
            return
        if reading.status != ending.status:
            self._wrong("wrong", f"{who} saw it end {reading.status}; it is {ending.what}", submission)
        elif reading.status == "ok":
            every = range(submission.order.choices)
            if reading.texts != dict.fromkeys(every, submission.order.text):
                self._wrong("wrong", f"{who} saw {reading.texts}, not {submission.order.text}", submission)
            if reading.finishes != dict.fromkeys(every, 1):
                self._wrong("wrong", f"{who} saw choices end {dict(reading.finishes)} times", submission)
        elif not all(submission.order.text.startswith(text) for text in reading.texts.values()):
            self._wrong("wrong", f"{who} saw {reading.texts}, which leads elsewhere", submission)

    def _wrong(self, fault: Fault, text: str, submission: Submission | None = None) -> None:
        self._ledger.wrong(fault, text, submission)


def _ending(result: Result, stored: dt.datetime) -> Ending:
    answer = result.answer
    warnings: list[str] = []
    if answer is not None:
        warnings = (answer.get("warnings") or []) if isinstance(answer, dict) else answer.warnings
    return Ending(
        end=_end(result),
        status=result.status,
        attempt=result.attempt,
        continued=any(warning.startswith("continued after") for warning in warnings),
        time=stored,
        what=_what(result),
    )


def _end(result: Result) -> End | None:
    if result.error is None or result.status != "error":
        return ENDS.get(result.status)
    if isinstance(result.error, CallerError):
        return "refused"
    return "dead" if result.error.code in DEATHS else None


def _what(result: Result) -> str:
    code = f" {result.error.code}" if result.error is not None else ""
    return f"{result.status}{code}, attempt {result.attempt}"
