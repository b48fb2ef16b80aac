"""Errors that only a client raises; all others are in `inferbus.schemas.errors`."""

from __future__ import annotations

from inferbus.schemas.errors import CallerError, InfrastructureError


class TimedOut(InfrastructureError):
    """Nothing came for longer than the caller wanted to wait; the request may still be running."""

    code = "timed_out"


class WorkerLost(InfrastructureError):
    """A live answer has stopped, and no worker says that it still has the request."""

    code = "worker_lost"


class AnswerLost(InfrastructureError):
    """Part of a live answer was lost on the way, and live answers are not stored."""

    code = "answer_lost"


class ConnectionLost(AnswerLost):
    """Part of a live answer was lost while this client, or its worker, was without a connection to NATS."""

    code = "connection_lost"


class JobNotFound(CallerError):
    """No job of this id is queued, and no result of one is stored."""

    code = "job_not_found"


class JobIdUsed(CallerError):
    """A job id names another request already."""

    code = "job_id_used"
