"""What earlier attempts at a durable job have sent, from the chunks that the stream still holds.

A worker that takes a job over resumes it after the last chunk that it can, so
that the reader's text is continued. An attempt that continued another names it
on its first chunk (`Infer-Continues`), so the history of a job is a chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from inferbus.schemas import codec, headers
from inferbus.schemas.answers import Retrying
from inferbus.schemas.errors import CallerError
from inferbus.schemas.headers import Continuation
from inferbus.schemas.sampling import TokenId
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.interface import Broker, Stored
from inferbus.workers.bus.jetstream.layout import STREAM
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.fields import number


class StoredChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk.

    Attributes:
        attempt: Number of its attempt.
        seq: Its number there.
        token_ids: The tokens that its text was made of.
        text: Its text; None where it holds anything else than text and tokens.
        finished: Whether it ended the choice.
    """

    attempt: int
    seq: int
    token_ids: list[int]
    text: str | None
    finished: bool


class _Choice(msgspec.Struct, kw_only=True):
    """As much of a chunk's choice as is looked at."""

    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None
    text: str | msgspec.UnsetType | None = msgspec.UNSET
    delta: dict[str, Any] | None = None


class _Chunk(msgspec.Struct, kw_only=True):
    """As much of a chunk of any kind as is looked at."""

    attempt: Annotated[int, Meta(ge=1)]
    seq: Annotated[int, Meta(ge=0)]
    token_ids: list[TokenId] | None = None
    choices: list[_Choice] | None = None
    index: int = 0
    finish_reason: str | None = None
    logprobs: Any = None


class LatestAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The newest attempt that readers have seen.

    Attributes:
        number: 0: they have seen none.
        ended_in_order: Whether its worker gave it up in order, by what it sent last.
    """

    number: int
    ended_in_order: bool


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place from which an answer can be resumed.

    Attributes:
        after: The attempt, and how many of its chunks are kept.
        token_ids: All tokens of the answer up to there.
        text: The same as text; empty for token requests.
    """

    after: Continuation
    token_ids: list[int]
    text: str


class History:
    """The chunks stream, for one worker. Chunks that went to an inbox are not in it.

    Args:
        broker: Keeps it.
        subjects: Of this bus.
    """

    def __init__(self, broker: Broker, subjects: Subjects) -> None:
        self._broker = broker
        self._subjects = subjects

    async def latest(self, attempt: Attempt) -> LatestAttempt:
        """The newest attempt at the same submission that readers have seen anything of.

        Raises:
            BusUnavailable: The server did not answer.
        """
        newest = await self._broker.last(STREAM, attempt.reply)
        if newest is not None and not self._of(attempt, newest):
            # Another submission under the same job id is answered on the same subject.
            stored = await self._broker.read(STREAM, attempt.reply)
            newest = next((each for each in reversed(stored) if self._of(attempt, each)), None)
        if newest is None:
            return LatestAttempt(number=0, ended_in_order=False)
        seen = number(newest.headers.get(headers.ATTEMPT))
        return LatestAttempt(number=seen, ended_in_order=_ended_in_order(newest))

    @staticmethod
    def _of(attempt: Attempt, stored: Stored) -> bool:
        return not stored.forwarded and stored.headers.get(headers.SUBMISSION) == str(attempt.submission)

    async def resume_points(self, attempt: Attempt) -> list[ResumePoint]:
        """Where an attempt can resume earlier ones, the latest place first.

        Raises:
            BusUnavailable: The server did not answer.
        """
        if attempt.number == 1 or attempt.submission is None:
            return []
        stored = await self._broker.read(STREAM, self._subjects.stream(attempt.owner, attempt.job))
        return resume_points(stored, submission=attempt.submission, before=attempt.number)


def resume_points(stored: Iterable[Stored], *, submission: int, before: int) -> list[ResumePoint]:
    """Where a new attempt can resume an answer, the latest place first.

    Args:
        stored: The messages on the job's stream subject, oldest first.
        submission: Of the job; chunks of others do not count.
        before: The number of the new attempt.

    Returns:
        One place after every chunk of the newest attempt's chain; none where that has finished, lacks its
        beginning, or holds what cannot be resumed.
    """
    attempts: dict[int, list[StoredChunk]] = {}
    continued: dict[int, Continuation] = {}
    for message in stored:
        if message.headers.get(headers.SUBMISSION) != str(submission):
            continue
        chunk = _read(message)
        if chunk is None or chunk.attempt >= before:
            continue
        attempts.setdefault(chunk.attempt, []).append(chunk)
        if chunk.seq == 0 and (continuation := headers.parse_continues(message.headers)):
            continued[chunk.attempt] = continuation
    if not attempts:
        return []
    chain = _chain(max(attempts), attempts, continued)
    if chain is None or any(chunk.finished or chunk.text is None for chunk in chain):
        return []
    points: list[ResumePoint] = []
    token_ids: list[int] = []
    text = ""
    for chunk in chain:
        token_ids, text = token_ids + chunk.token_ids, text + (chunk.text or "")
        if token_ids:
            after = Continuation(chunk.attempt, chunk.seq + 1)
            points.append(ResumePoint(after=after, token_ids=token_ids, text=text))
    return points[::-1]


def _chain(
    attempt: int, attempts: dict[int, list[StoredChunk]], continued: dict[int, Continuation]
) -> list[StoredChunk] | None:
    """An attempt's chunks, from its first to its first gap, after those that it continued.

    None where one of them is lost.
    """
    parts: list[list[StoredChunk]] = []
    count: int | None = None
    while True:
        own: list[StoredChunk] = []
        for chunk in sorted(attempts.get(attempt, ()), key=lambda chunk: chunk.seq):
            if chunk.seq == len(own):
                own.append(chunk)
        if count is not None and len(own) < count:
            return None
        parts.append(own[:count])
        older = continued.get(attempt)
        if older is None:
            return [chunk for part in reversed(parts) for chunk in part]
        if older.attempt >= attempt:
            return None
        attempt, count = older.attempt, older.chunks


def _read(message: Stored) -> StoredChunk | None:
    """A chunk; None for an end mark, an error, or anything else."""
    if not message.data or message.forwarded:
        return None
    try:
        body = codec.decode_any(message.data, _Chunk)
    except CallerError:
        return None
    text, finished = _text(body)
    return StoredChunk(
        attempt=body.attempt, seq=body.seq, token_ids=body.token_ids or [], text=text, finished=finished
    )


def _ended_in_order(message: Stored) -> bool:
    """Whether a message announces that its attempt is over, and another will follow."""
    if b"retrying" not in message.data:
        return False
    try:
        codec.decode_any(message.data, Retrying)
    except CallerError:
        return False
    return True


def _text(chunk: _Chunk) -> tuple[str | None, bool]:
    """A chunk's text, and whether its choice has ended; None for what is more than text."""
    if chunk.choices is None:
        plain = not chunk.index and chunk.logprobs is None
        return ("" if plain else None), chunk.finish_reason is not None
    if len(chunk.choices) != 1:
        return None, False
    choice = chunk.choices[0]
    finished = choice.finish_reason is not None
    if choice.logprobs is not None or choice.index:
        return None, finished
    if choice.text is not msgspec.UNSET:
        return choice.text or "", finished
    delta = choice.delta or {}
    content = delta.get("content") or ""
    if not isinstance(content, str) or any(delta[name] for name in delta if name not in ("role", "content")):
        return None, finished
    return content, finished
