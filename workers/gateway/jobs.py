"""Durable requests over HTTP: stored before they are answered; fetched, streamed or cancelled by their id."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from inferbus.schemas.errors import Cancelled, DeadlineExceeded, InferbusError, InvalidRequest
from inferbus.workers.client import Client, Job, Result, TimedOut
from inferbus.workers.client.results import Results
from inferbus.workers.gateway.answers import bare
from inferbus.workers.gateway.errors import body_of
from inferbus.workers.gateway.requests import Asked


async def submit(client: Client, asked: Asked, job_id: str | None) -> Job:
    """Stores a request as a job.

    The same request under the same id is the job that is there, queued or ended.

    Raises:
        JobIdUsed: The id names another request that has ended.
        InferbusError: It was not stored; see `Client.submit`.
    """
    body = asked.body
    if asked.background:
        # Whoever comes back may want to read along.
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    return await client.submit(
        asked.kind,
        asked.model,
        body,
        job_id=job_id,
        job_class="interactive",
        stream=bool(body["stream"]),
        once=job_id is not None,
        traceparent=asked.traceparent,
    )


async def find(client: Client, job_id: str) -> Job:
    """A job by its id: the newest submission.

    Raises:
        JobNotFound: There is none.
    """
    try:
        return await client.find(job_id)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="id") from None


async def result(client: Client, job: Job, wait: float) -> Result | None:
    """A job's result; None if it has none within `wait` seconds."""
    results = Results(client.bus)
    if not wait:
        return await results.find(job)
    try:
        return await results.wait(job, wait)
    except TimedOut:
        return None


async def answer(client: Client, job: Job) -> dict[str, Any]:
    """A job's answer, however long it takes.

    Raises:
        InferbusError: The result is an error.
    """
    found = (await client.result(job)).answer
    assert found is not None
    return bare(found)


def job_object(job: Job, ended: Result | None, *, status: str = "in_progress") -> dict[str, Any]:
    """A job as the gateway shows it: its status, and its answer or error once it has one."""
    shown: dict[str, Any] = {"id": job.id, "object": "job", "status": status, "response": None, "error": None}
    if ended is None:
        return shown
    if ended.error is not None:
        return {**shown, "status": _ended(ended.error), **body_of(ended.error)}
    assert ended.answer is not None
    return {**shown, "status": "completed", "response": bare(ended.answer)}


def location(job: Job) -> str:
    """Where a job is found."""
    return f"/v1/jobs/{quote(job.id, safe='')}"


def _ended(error: InferbusError) -> str:
    if isinstance(error, Cancelled):
        return "cancelled"
    return "expired" if isinstance(error, DeadlineExceeded) else "failed"
