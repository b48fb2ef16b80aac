"""Whose job comes next: the jobs of several owners, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Waiting(NamedTuple):
    """A job that waits.

    Attributes:
        owner: Whose it is.
        sequence: Its stream sequence.
        reply: The reply subject of its delivery.
    """

    owner: str
    sequence: int
    reply: str


def in_turn(jobs: Iterable[Waiting]) -> list[Waiting]:
    """The jobs in turn by owner, an owner's own ones oldest first.

    The owners keep the order in which they appear: in jobs that were in turn, the next one stays next.
    """
    owners: dict[str, list[Waiting]] = {}
    for job in jobs:
        owners.setdefault(job.owner, []).append(job)
    turns = deque(deque(sorted(own, key=lambda job: job.sequence)) for own in owners.values())
    ordered = []
    while turns:
        own = turns.popleft()
        ordered.append(own.popleft())
        if own:
            turns.append(own)
    return ordered


def place(counts: Mapping[str, int], turn: int) -> int:
    """The place at which an owner's job comes if the owners take turns.

    Args:
        counts: Jobs of each owner.
        turn: The job is this one of its owner's, from 1.
    """
    return sum(min(count, turn) for count in counts.values())
