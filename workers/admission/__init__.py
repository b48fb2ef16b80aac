"""When a request may start: budgets in prompt tokens, KV tokens and requests, by class.

The queue of durable jobs stays in JetStream. A worker takes a job when its engine can start it, so that
classes, owners, cancels and deadlines reach every job that waits, and other workers can take it. Nothing here
knows NATS, SGLang, or what a job is.
"""

from __future__ import annotations

from inferbus.workers.admission.admission import Admission, Budget, HeldPermit
from inferbus.workers.admission.classes import (
    BATCH,
    INTERACTIVE,
    LIVE,
    ServiceClass,
    class_of,
    engine_priority,
)
from inferbus.workers.admission.permit import Permit

__all__ = [
    "BATCH",
    "INTERACTIVE",
    "LIVE",
    "Admission",
    "Budget",
    "HeldPermit",
    "Permit",
    "ServiceClass",
    "class_of",
    "engine_priority",
]
