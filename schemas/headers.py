"""NATS headers of the contract."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from inferbus.schemas import limits
from inferbus.schemas.errors import InvalidRequest

Status = Literal["ok", "error", "cancelled", "expired"]
"""How a reply subject ended."""

Readable = Literal["chunks", "submissions", "jobs", "batches"]
"""What a caller may read of its own through a worker: a job's stored chunks, which of its submissions are
queued, the queued jobs of a batch, the records of its batches."""
Removable = Literal["result", "files", "jobs"]
"""What a caller may remove of its own through a worker: a job's result, the files of a batch, what jobs of a
batch have left in the queue and among the results."""

REPLY_TO: Final = "Infer-Reply-To"
"""Where a durable job's chunks go; default `infer.stream.<owner>.<job>`."""

JOB_ID: Final = "Infer-Job-Id"
"""The job's id; default `Nats-Msg-Id`, else the job's stream sequence."""

DEADLINE: Final = "Infer-Deadline"
"""RFC 3339, or seconds from the job's arrival."""

CONTENT_TYPE: Final = "Content-Type"
TRACEPARENT: Final = "traceparent"
"""W3C trace context: the caller's span."""

TRACESTATE: Final = "tracestate"
"""W3C trace context: what vendors add to it."""

STATUS: Final = "Infer-Status"
"""On the end mark and on results: see `Status`."""

CHUNKS: Final = "Infer-Chunks"
"""On the end mark: how many messages the attempt sent before it."""

ATTEMPT: Final = "Infer-Attempt"
"""From 1; a higher attempt supersedes a lower one."""

WORKER: Final = "Infer-Worker"
"""On the first chunk of a job's attempt, the end mark and results: the worker that answered."""

PREFILL_WORKER: Final = "Infer-Prefill-Worker"
"""On the end mark and on results: the prefill worker that served it, if one did."""

SUBMISSION: Final = "Infer-Submission"
"""On a job's chunks, end mark and result: the stream sequence of the submission that they answer."""

MESSAGE_ID: Final = "Infer-Message-Id"
"""On a job's result: the `Nats-Msg-Id` under which it was submitted, where it had one."""

SUBMITTED: Final = "Infer-Submitted"
"""On a job's result: when the server stored the submission, RFC 3339."""

USAGE: Final = "Infer-Usage"
"""On the result of a job whose chunks were asked for without the usage: `unasked`."""

CONTINUES: Final = "Infer-Continues"
"""On the first chunk of a newer attempt that goes on after an older one: see `Continuation`."""

BEGUN: Final = "Infer-Begun"
"""Beside a job's result: how many attempts at it began, and were not given up in order."""

RESUME: Final = "Infer-Resume"
"""On a live request: a random text, for which its worker keeps what it sends, to send it again. On a question
to `infer.alive.live.<job>`: the same text."""

READ: Final = "Infer-Read"
"""On a request to `infer.read.<owner>.<job>`: see `Readable`."""

REMOVE: Final = "Infer-Remove"
"""On a request to `infer.remove.<owner>.<name>`: see `Removable`."""

FROM: Final = "Infer-From"
"""On that request: the stream sequence to begin at. On a question with `Infer-Resume`: the number of the
first message to be sent again. On its answer: that number, or a higher one where what is before is gone."""

NEXT: Final = "Infer-Next"
"""On the message that ends a page of stored messages: the stream sequence at which the next one begins. On
the answer to a question with `Infer-Resume`: how many messages were sent, the end mark counted."""

PENDING: Final = "Infer-Pending"
"""On that message: how many stored messages there are beyond the page."""

REASON: Final = "Infer-Reason"
"""On dead letters: the error's code."""

DETAIL: Final = "Infer-Detail"
"""On dead letters: the error's message."""

SUBJECT: Final = "Infer-Subject"
"""On dead letters: the subject that the job came on; replaying it means publishing it there again."""

RAW: Final = "Infer-Raw-Headers"
"""On dead letters of jobs whose headers are no text: the header block, `\\xff` for bytes that are none."""

MSG_ID: Final = "Nats-Msg-Id"
EXPECTED_LAST: Final = "Nats-Expected-Last-Subject-Sequence"

_CONTINUATION: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


class Continuation(msgspec.Struct, frozen=True):
    """Where a newer attempt goes on: `Infer-Continues: <attempt>:<chunks>`.

    The count is part of it because a stalled owner may have sent chunks that its successor did not see
    before it went on, and because a reader that missed some must know how many there are to be had.

    Attributes:
        attempt: The older attempt.
        chunks: How many of its chunks stand; later ones of it are void.
    """

    attempt: int
    chunks: int

    def __str__(self) -> str:
        return f"{self.attempt}:{self.chunks}"


def number(headers: Mapping[str, str] | None, name: str) -> int | None:
    """A count or a sequence in a header; None where it is missing or is no number of at most 18 digits."""
    text = (headers or {}).get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def parse_continues(headers: Mapping[str, str] | None) -> Continuation | None:
    """Which older attempt a chunk goes on after; None where it starts anew, or says something unreadable."""
    found = _CONTINUATION.fullmatch((headers or {}).get(CONTINUES, ""))
    return Continuation(int(found[1]), int(found[2])) if found else None


def _moment(text: str) -> dt.datetime:
    """A time in any form of RFC 3339, with lower-case letters and leap seconds, which `datetime` lacks."""
    text = text.upper()
    if text[16:19] == ":60":
        return dt.datetime.fromisoformat(f"{text[:16]}:59{text[19:]}") + dt.timedelta(seconds=1)
    return dt.datetime.fromisoformat(text)


def parse_deadline(headers: Mapping[str, str] | None, *, arrived: dt.datetime) -> dt.datetime | None:
    """The moment at which a job expires, or None.

    Args:
        headers: The request's headers.
        arrived: When the request was stored or received; seconds count from then, so that a redelivered
            job keeps its deadline. Aware.

    Raises:
        InvalidRequest: Neither RFC 3339 with an offset nor a positive number of seconds, or further away
            than `limits.DEADLINE_SECONDS`.
    """
    text = (headers or {}).get(DEADLINE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        pass
    else:
        if not 0 < seconds <= limits.DEADLINE_SECONDS:
            raise InvalidRequest(
                f"{DEADLINE} in seconds must be above 0 and at most {limits.DEADLINE_SECONDS}", param=DEADLINE
            )
        return arrived + dt.timedelta(seconds=seconds)
    try:
        moment = _moment(text)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{DEADLINE} must be RFC 3339 or a number of seconds", param=DEADLINE) from None
    if moment.tzinfo is None:
        raise InvalidRequest(f"{DEADLINE} must name its offset from UTC", param=DEADLINE)
    if moment - arrived > dt.timedelta(seconds=limits.DEADLINE_SECONDS):
        raise InvalidRequest(
            f"{DEADLINE} must be at most {limits.DEADLINE_SECONDS} seconds away", param=DEADLINE
        )
    return moment


def escaped(raw: bytes) -> str:
    r"""Bytes as printable ASCII: `\xff` for what is none."""
    return raw.decode("latin-1").encode("unicode_escape").decode("ascii")
