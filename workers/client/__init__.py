"""The client, for asyncio and without. It imports neither torch nor SGLang nor NIXL.

See docs/client.md.
"""

from __future__ import annotations

from inferbus.workers.client.assembler import FinalStatus, Restarted
from inferbus.workers.client.choice import Message, ToolCall, message
from inferbus.workers.client.client import Client
from inferbus.workers.client.durable import JobStream
from inferbus.workers.client.errors import (
    AnswerLost,
    ConnectionLost,
    JobIdUsed,
    JobNotFound,
    TimedOut,
    WorkerLost,
)
from inferbus.workers.client.jobs import Job
from inferbus.workers.client.live import LiveStream
from inferbus.workers.client.messages import Answer, Chunk, Result
from inferbus.workers.client.stats import Stats
from inferbus.workers.client.stream import AnswerStream, text
from inferbus.workers.client.sync import SyncClient, SyncStream

__all__ = [
    "Answer",
    "AnswerLost",
    "AnswerStream",
    "Chunk",
    "Client",
    "ConnectionLost",
    "FinalStatus",
    "Job",
    "JobIdUsed",
    "JobNotFound",
    "JobStream",
    "LiveStream",
    "Message",
    "Restarted",
    "Result",
    "Stats",
    "SyncClient",
    "SyncStream",
    "TimedOut",
    "ToolCall",
    "WorkerLost",
    "message",
    "text",
]
