"""The asyncio client. It imports neither torch nor SGLang nor NIXL.

See docs/client.md.
"""

from __future__ import annotations

from workers.client.assembler import Outcome, Restarted
from workers.client.client import Client
from workers.client.durable import JobStream
from workers.client.errors import AnswerLost, TimedOut, WorkerLost
from workers.client.jobs import Job
from workers.client.live import LiveStream
from workers.client.messages import Answer, Chunk, Result
from workers.client.stats import Stats
from workers.client.stream import Stream, text

__all__ = [
    "Answer",
    "AnswerLost",
    "Chunk",
    "Client",
    "Job",
    "JobStream",
    "LiveStream",
    "Outcome",
    "Restarted",
    "Result",
    "Stats",
    "Stream",
    "TimedOut",
    "WorkerLost",
    "text",
]
