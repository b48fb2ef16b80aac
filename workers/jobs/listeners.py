"""Whether a live request's caller is still there: the server reports messages that reach nobody."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from inferbus.schemas.errors import Cancelled
from inferbus.workers.jobs.retained import AWAY
from inferbus.workers.jobs.scope import Scope

OpenProbe = Callable[[Callable[[str], None]], str]
"""Opens a reply subject for probing. The callback gets the subject of every message sent with it that reached
no subscriber."""


class _Caller(msgspec.Struct):
    """Whose answer goes out.

    Attributes:
        reply: Where to.
        scope: Of the attempt.
        may_be_away: Whether it comes back for what it missed.
        gone: Since when nobody has listened, monotonic; None while somebody does.
    """

    reply: str
    scope: Scope
    may_be_away: bool
    gone: float | None = None


class Listeners:
    """Ends live attempts that nobody listens to any more.

    Args:
        open_probe: None: callers are not probed.
        every: Probe with every k-th message of a reply.
        clock: Monotonic seconds.

    Attributes:
        probe: Reply subject to probe with; empty where callers are not probed.
        every: See above.
    """

    def __init__(
        self,
        open_probe: OpenProbe | None = None,
        *,
        every: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = every
        self._clock = clock
        self._callers: dict[str, _Caller] = {}
        self.probe = open_probe(self._gone) if open_probe is not None else ""

    @contextmanager
    def expected(self, reply: str, scope: Scope, *, may_be_away: bool = False) -> Iterator[None]:
        """While the block runs, `scope` is ended when its reply subject has no subscriber.

        Args:
            reply: Where the answer goes.
            scope: Of the attempt.
            may_be_away: Whether the caller asks for what it missed when its connection is back: it then has
                `AWAY` seconds for that.
        """
        caller = self._callers[reply] = _Caller(reply, scope, may_be_away)
        try:
            yield
        finally:
            self._callers.pop(caller.reply, None)

    def moved(self, reply: str, to: str) -> None:
        """A caller is back: it has asked for its answer, and for the rest of it on another subject."""
        if (caller := self._callers.pop(reply, None)) is not None:
            caller.reply, caller.gone = to, None
            self._callers[to] = caller

    def _gone(self, reply: str) -> None:
        caller = self._callers.get(reply)
        if caller is None:
            return
        now = self._clock()
        if caller.gone is None:
            caller.gone = now
        if not caller.may_be_away or now - caller.gone >= AWAY:
            caller.scope.end(Cancelled("nobody listens on the reply subject any more"))
