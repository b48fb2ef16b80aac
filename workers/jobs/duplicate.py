"""A submission that repeats another: sent again under its message id, after its job had ended.

JetStream drops a message whose `Nats-Msg-Id` it has seen within the stream's window. But a server that
restarts learns the ids anew from the messages that its streams still hold (`rebuildDedupe`), and a job that
has ended has left its queue. So results hold the id under which their job was submitted, and when.
"""

from __future__ import annotations

import datetime as dt

from inferbus.schemas import headers
from inferbus.workers.bus.interface import Stored


def origin(message: Stored) -> dict[str, str]:
    """Headers of a job's result by which a repeated submission is known."""
    named = message.headers.get(headers.MSG_ID)
    return {headers.MESSAGE_ID: named, headers.SUBMITTED: message.time.isoformat()} if named else {}


def repeats(message: Stored, result: Stored, *, window: float) -> bool:
    """Whether a job is the one that a result ended, submitted again within so many seconds."""
    named = message.headers.get(headers.MSG_ID)
    if not named or result.headers.get(headers.MESSAGE_ID) != named:
        return False
    first = dt.datetime.fromisoformat(result.headers[headers.SUBMITTED])
    return (message.time - first).total_seconds() < window
