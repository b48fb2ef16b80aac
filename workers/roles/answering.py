"""The story of one request on the side that answers it: check, tokenise, generate, send."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from schemas.errors import NotSupported
from schemas.requests import AnyRequest
from workers.engine.interface import Delta, Engine
from workers.jobs.job import Job
from workers.jobs.reply import Reply, Seal, Served
from workers.pairing.legs import RunLeg, generate


class Answering:
    """Answers requests with one engine.

    Args:
        engine: Checks, tokenises, and formats; generates unless `run` pairs it with another.
        run: How one leg is run.
    """

    def __init__(self, engine: Engine, run: RunLeg) -> None:
        self._engine = engine
        self._run = run

    async def __call__(self, job: Job, request: AnyRequest, reply: Reply, served: Served) -> bytes:
        """One attempt; see `workers.jobs.attempt.Generate`."""
        if job.kind not in self._engine.info.kinds:
            raise NotSupported(f"this model's workers have no tokenizer, which the kind {job.kind!r} needs")
        prompt = await self._engine.prepare(request)
        answer = prompt.answer()
        streams = job.streams(request)
        spoken = _Spoken(record=job.durable and prompt.choices == 1 and job.kind != "tokens")
        warned: dict[str, Any] = {"warnings": request.warnings} if request.warnings else {}
        async with (
            aclosing(generate(prompt, self._run, job=job.id, served=served)) as deltas,
            aclosing(answer.chunks(spoken.overhear(deltas))) as messages,
        ):
            async for message in messages:
                if not streams:
                    continue
                if isinstance(message, bytes):
                    reply.chunk(message, spoken.since() | (warned if reply.sent == 0 else {}))
                else:
                    reply.chunk(message)
                if reply.congested:
                    await reply.ready()
        if streams and not job.durable:
            return b""
        whole = answer.whole()
        return Seal(job).whole(whole, warned if isinstance(whole, bytes) else {})


class _Spoken:
    """The tokens behind text chunks: put beside them, they let another worker go on after the last one."""

    def __init__(self, *, record: bool) -> None:
        self._record = record
        self._token_ids: list[int] = []

    def overhear(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The same deltas, with their tokens noted."""
        return self._noted(deltas) if self._record else deltas

    def since(self) -> dict[str, list[int]]:
        """The tokens noted since the last call, as a chunk's field."""
        if not self._token_ids:
            return {}
        noted, self._token_ids = self._token_ids, []
        return {"token_ids": noted}

    async def _noted(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        async for delta in deltas:
            self._token_ids.extend(delta.token_ids)
            yield delta
