"""Answers one request: check, tokenise, generate, send."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from structlog.contextvars import bind_contextvars

from inferbus.schemas.errors import CallerError, ContextLengthExceeded, Misdirected, NotSupported
from inferbus.schemas.requests import AnyRequest
from inferbus.workers import tracing
from inferbus.workers.engine.interface import AnswerIdentity, Engine, Prompt
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.reply import ChunkEncoder
from inferbus.workers.jobs.runner import Work
from inferbus.workers.pairing.legs import RunLeg
from inferbus.workers.roles.generation import Generation
from inferbus.workers.roles.peers import Peers


class Answering:
    """Answers requests with one engine.

    Args:
        engine: Checks, tokenises, and formats; generates unless `run` pairs it with another.
        run: Runs one leg.
        peers: The other workers of the model.
    """

    def __init__(self, engine: Engine, run: RunLeg, peers: Peers | None = None) -> None:
        self._engine = engine
        self._run = run
        self._peers = peers or Peers(list)

    async def __call__(self, work: Work) -> bytes:
        """One attempt; see `inferbus.workers.jobs.runner.Generate`."""
        attempt, request, reply = work.attempt, work.request, work.reply
        bind_contextvars(job=attempt.job, attempt=attempt.number)
        with tracing.span("prepare"):
            prompt = await self._prepare(attempt, request)
        formatter = prompt.answer(AnswerIdentity(attempt.answer_id, int(attempt.arrived.timestamp())))
        generation = Generation(work, prompt, self._run)
        with tracing.span("admission"):
            await generation.admitted()
        streams = attempt.streams(request)
        warnings: dict[str, Any] = {"warnings": request.warnings} if request.warnings else {}
        async with (
            aclosing(generation.deltas()) as deltas,
            aclosing(formatter.chunks(deltas)) as messages,
        ):
            async for message in messages:
                if not streams or generation.repeating:
                    continue
                if isinstance(message, bytes):
                    reply.chunk(message, generation.take_tokens() | (warnings if reply.sent == 0 else {}))
                else:
                    reply.chunk(message)
                if reply.congested:
                    await reply.ready()
        if streams and not attempt.durable:
            return b""
        whole = formatter.whole()
        return ChunkEncoder(attempt).whole(whole, warnings if isinstance(whole, bytes) else {})

    async def _prepare(self, attempt: Attempt, request: AnyRequest) -> Prompt:
        """The prompt, unless this worker's own limits forbid it.

        Raises:
            Misdirected: They do, and those of another worker do not.
        """
        try:
            if attempt.kind not in self._engine.info.kinds:
                raise NotSupported(
                    f"this model's workers have no tokenizer, which the kind {attempt.kind!r} needs"
                )
            return await self._engine.prepare(request)
        except CallerError as error:
            limited = isinstance(error, ContextLengthExceeded) or attempt.kind not in self._engine.info.kinds
            other = self._peers.fitting(attempt, error, self._engine.info) if limited else None
            if other is None:
                raise
            raise Misdirected(f"the worker {other!r} can serve this, this one cannot", to=other) from error
