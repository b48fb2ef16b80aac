"""What the delivery contract of one worker is set to."""

from __future__ import annotations

import msgspec

from inferbus.schemas.subjects import Subjects
from inferbus.workers.jobs.retry import RetryPolicy


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker.

    Attributes:
        worker: Its id.
        subjects: Of this bus.
        replies: Prefixes of reply subjects that callers may name.
        policy: How often and how soon a job is tried again.
        window: Seconds within which a second submission under one message id is a repetition.
        patience: Seconds from its arrival in which a request that names no deadline must be answered; None:
            no limit.
    """

    worker: str
    subjects: Subjects
    replies: tuple[str, ...] = ("_INBOX.",)
    policy: RetryPolicy = RetryPolicy()
    window: float = 600.0
    patience: float | None = None
