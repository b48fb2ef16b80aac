"""Answers one request: check, tokenise, generate, send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from structlog.contextvars import bind_contextvars

from inferbus.schemas.computed import AnyComputed, ComputedRequest, EmbeddingsRequest
from inferbus.schemas.errors import CallerError, ContextLengthExceeded, Misdirected, NotSupported
from inferbus.schemas.requests import AnyRequest
from inferbus.schemas.subjects import GENERATED
from inferbus.workers import tracing
from inferbus.workers.admission import engine_priority
from inferbus.workers.engine.interface import AnswerIdentity, Engine, EngineInfo
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.reply import ChunkEncoder
from inferbus.workers.jobs.runner import Work
from inferbus.workers.pairing.legs import RunLeg
from inferbus.workers.roles.generation import Generation
from inferbus.workers.roles.peers import Peers

T = TypeVar("T")


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
        bind_contextvars(job=work.attempt.job, attempt=work.attempt.number)
        if isinstance(work.request, ComputedRequest):
            return await self._computed(work, work.request)
        return await self._generated(work, work.request)

    async def _computed(self, work: Work, request: AnyComputed) -> bytes:
        """The answer to a request of a computed kind."""
        attempt, permit = work.attempt, work.permit
        with tracing.span("prepare"):
            computation = await self._checked(attempt, lambda: self._engine.plan(request))
        if computation.prompt_tokens:
            with tracing.span("admission"):
                await permit.enter(computation.prompt_tokens, 0)
        with tracing.span("compute"):
            own = request.priority if isinstance(request, EmbeddingsRequest) else None
            answer = await computation.answer(engine_priority(permit.service_class, own))
        permit.first_token()
        return ChunkEncoder(attempt).whole(answer, {"warnings": request.warnings})

    async def _generated(self, work: Work, request: AnyRequest) -> bytes:
        """The answer to a request that generates, after its chunks."""
        attempt, reply = work.attempt, work.reply
        with tracing.span("prepare"):
            prompt = await self._checked(attempt, lambda: self._engine.prepare(request))
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

    async def _checked(self, attempt: Attempt, check: Callable[[], Awaitable[T]]) -> T:
        """What a request was prepared as, unless this worker's own limits forbid it.

        Raises:
            Misdirected: They do, and those of another worker do not.
        """
        try:
            if attempt.kind not in self._engine.info.kinds:
                raise NotSupported(_why_unserved(attempt.kind, self._engine.info))
            return await check()
        except CallerError as error:
            limited = isinstance(error, ContextLengthExceeded) or attempt.kind not in self._engine.info.kinds
            other = self._peers.fitting(attempt, error, self._engine.info) if limited else None
            if other is None:
                raise
            raise Misdirected(f"the worker {other!r} can serve this, this one cannot", to=other) from error


def _why_unserved(kind: str, info: EngineInfo) -> str:
    """Why a worker does not serve a kind, by what its engine is."""
    if kind == "embeddings":
        return "this model generates; embeddings need a worker of the role both, started with --is-embedding"
    if kind in GENERATED and "embeddings" in info.kinds:
        return f"this is an embedding model: it serves {', '.join(info.kinds)}, and not the kind {kind!r}"
    if info.tokenizer:
        return f"this model has no chat template, which the kind {kind!r} needs"
    return f"this model's workers have no tokenizer, which the kind {kind!r} needs"
