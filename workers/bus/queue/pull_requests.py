"""The pull requests of one queue that the server has not answered in full."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

import msgspec

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.durations import nanoseconds
from inferbus.workers.bus.jetstream.client import API

NO_MESSAGES: Final = "404"
REQUEST_TIMEOUT: Final = "408"
"""How the server ends a request without a fault."""

EXPIRES: Final = 2.0
"""Seconds that a waiting request lives: a server that restarted has forgotten it."""

GRACE: Final = 1.0
"""Seconds beyond that after which its end is no longer waited for."""


class PriorityClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of jobs.

    Attributes:
        job_class: Its name.
        weight: Its share.
        stream: Where its jobs are.
        durable: The consumer that delivers them.
    """

    job_class: str
    weight: int
    stream: str
    durable: str


class PullRequest:
    """One of them.

    Attributes:
        priority_class: Whose jobs it asks for.
        group: Whose subscription it is answered on.
        reply: Its reply subject, unique.
        remaining: Jobs that have not come yet.
        deadline: By the queue's clock; a request that is open then is lost.
    """

    __slots__ = ("deadline", "group", "priority_class", "remaining", "reply")

    def __init__(
        self, priority_class: PriorityClass, group: str, reply: str, batch: int, deadline: float
    ) -> None:
        self.priority_class = priority_class
        self.group = group
        self.reply = reply
        self.remaining = batch
        self.deadline = deadline


class PullRequests:
    """Sends them, and follows what becomes of them.

    Args:
        bus: The connection.
        clock: Monotonic seconds.
    """

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._base = bus.private_subject()
        self._numbers = itertools.count(1)
        self._open: dict[str, PullRequest] = {}

    def __contains__(self, pull: PullRequest) -> bool:
        return pull.reply in self._open

    def new_group(self) -> str:
        """A name for requests that share a subscription."""
        return f"{next(self._numbers):x}"

    def replies(self, group: str) -> str:
        """What to subscribe to for the answers to a group's requests."""
        return f"{self._base}.{group}.*"

    def send(self, priority_class: PriorityClass, group: str, batch: int, *, wait: bool) -> PullRequest:
        """Asks for jobs.

        Args:
            priority_class: Of this class.
            group: Answered on this group's subscription.
            batch: No more than this.
            wait: For `EXPIRES` seconds, rather than for what is there now.
        """
        reply = f"{self._base}.{group}.{next(self._numbers):x}"
        expires = EXPIRES if wait else 0.0
        pull = PullRequest(priority_class, group, reply, batch, self._clock() + expires + GRACE)
        self._open[reply] = pull
        body: dict[str, object] = {"batch": batch}
        body |= {"expires": nanoseconds(expires)} if wait else {"no_wait": True}
        subject = f"{API}.CONSUMER.MSG.NEXT.{priority_class.stream}.{priority_class.durable}"
        self._bus.send(subject, msgspec.json.encode(body), reply=reply)
        return pull

    def requested(self, priority_class: PriorityClass) -> int:
        """Jobs of a class that are asked for and have not come yet."""
        return sum(pull.remaining for pull in self._open.values() if pull.priority_class is priority_class)

    @property
    def deadline(self) -> float:
        """When the first of them counts as lost."""
        return min(pull.deadline for pull in self._open.values())

    def delivered(self, priority_class: PriorityClass | None, group: str) -> None:
        """A job came; which request of its group it answers does not matter, and a job does not say it."""
        for pull in self._open.values():
            if pull.priority_class is priority_class and pull.group == group:
                pull.remaining -= 1
                if pull.remaining == 0:
                    self.end(pull.reply)
                return

    def end(self, reply: str) -> bool:
        """No more will come for a request; whether it was open."""
        return self._open.pop(reply, None) is not None

    def clear(self) -> None:
        """No more will come for any."""
        self._open.clear()
