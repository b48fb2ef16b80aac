"""What earlier attempts at a durable job have said, from the chunks that the stream still holds.

A worker that takes a job over goes on after the last chunk that it can, so
that the caller's sentence goes on. An attempt that went on after another says
so on its first chunk (`Infer-Continues`), so the history of a job is a chain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import CallerError
from inferbus.schemas.headers import Continuation
from inferbus.workers.bus.interface import Stored


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk.

    Attributes:
        attempt: Whose.
        seq: Its number there.
        token_ids: The tokens behind it.
        text: Its text; None where it has something else to say than text and tokens.
        finished: Whether it ended the choice.
    """

    attempt: int
    seq: int
    token_ids: list[int]
    text: str | None
    finished: bool


class ResumePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A place to go on from.

    Attributes:
        after: The attempt, and how many of its chunks stand.
        token_ids: Everything said up to there.
        text: The same as text; empty for token requests.
    """

    after: Continuation
    token_ids: list[int]
    text: str


def points(stored: Iterable[Stored], *, submission: int, before: int) -> list[ResumePoint]:
    """Where an attempt could go on, the latest place first.

    Args:
        stored: The messages on the job's stream subject, oldest first.
        submission: Of the job; chunks of others do not count.
        before: The number of the new attempt.

    Returns:
        One place after every chunk of the newest attempt's chain; none where that has finished, has a
        hole at its beginning, or said what cannot be gone on from.
    """
    attempts: dict[int, list[Said]] = {}
    continued: dict[int, Continuation] = {}
    for message in stored:
        if message.headers.get(headers.SUBMISSION) != str(submission):
            continue
        said = _read(message)
        if said is None or said.attempt >= before:
            continue
        attempts.setdefault(said.attempt, []).append(said)
        if said.seq == 0 and (continuation := headers.parse_continues(message.headers)):
            continued[said.attempt] = continuation
    if not attempts:
        return []
    chain = _chain(max(attempts), None, attempts, continued)
    if chain is None or any(said.finished or said.text is None for said in chain):
        return []
    found: list[ResumePoint] = []
    token_ids: list[int] = []
    text = ""
    for said in chain:
        token_ids, text = token_ids + said.token_ids, text + (said.text or "")
        if token_ids:
            after = Continuation(said.attempt, said.seq + 1)
            found.append(ResumePoint(after=after, token_ids=token_ids, text=text))
    return found[::-1]


def _chain(
    attempt: int,
    count: int | None,
    attempts: dict[int, list[Said]],
    continued: dict[int, Continuation],
) -> list[Said] | None:
    """An attempt's chunks, from its first to its `count`-th or first hole, after those it went on from."""
    own: list[Said] = []
    for said in sorted(attempts.get(attempt, ()), key=lambda said: said.seq):
        if said.seq == len(own):
            own.append(said)
    if count is not None:
        if len(own) < count:
            return None
        own = own[:count]
    older = continued.get(attempt)
    if older is None:
        return own
    before = _chain(older.attempt, older.chunks, attempts, continued) if older.attempt < attempt else None
    return None if before is None else before + own


def _read(message: Stored) -> Said | None:
    """A chunk; None for an end mark, an error, or anything else."""
    if not message.data:
        return None
    try:
        body = codec.decode_any(message.data)
        if not isinstance(body, dict) or not isinstance(body.get("seq"), int):
            return None
        text, finished = _text(body)
        return Said(
            attempt=body["attempt"],
            seq=body["seq"],
            token_ids=list(body.get("token_ids") or ()),
            text=text,
            finished=finished,
        )
    except (CallerError, KeyError, TypeError, AttributeError):
        return None


def _text(body: dict[str, Any]) -> tuple[str | None, bool]:
    """A chunk's text, and whether its choice has ended; None for what is more than text."""
    if "choices" not in body:
        plain = not body.get("index") and body.get("logprobs") is None
        return ("" if plain else None), body.get("finish_reason") is not None
    if len(body["choices"]) != 1:
        return None, False
    choice = body["choices"][0]
    finished = choice.get("finish_reason") is not None
    if choice.get("logprobs") is not None or choice.get("index"):
        return None, finished
    if "text" in choice:
        return choice["text"] or "", finished
    delta = choice.get("delta") or {}
    if any(delta.get(name) for name in delta if name not in ("role", "content")):
        return None, finished
    return delta.get("content") or "", finished
