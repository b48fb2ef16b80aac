"""The story of one request on the side that answers it: check, tokenise, generate, send."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import msgspec
import structlog
from structlog.contextvars import bind_contextvars

from inferbus.schemas.errors import NotSupported
from inferbus.workers.engine.interface import Delta, Engine, Leg, Prompt
from inferbus.workers.jobs.attempt import Work
from inferbus.workers.jobs.history import ResumePoint
from inferbus.workers.jobs.job import Job
from inferbus.workers.jobs.reply import ChunkEncoder, Served
from inferbus.workers.pairing.legs import RunLeg, generate

log = structlog.get_logger()

WHOLE_STEP: Final = 32
"""Tokens that an engine gives at a time where nobody sees them before the answer is whole. One by one they
cost the worker 50 us each, and a fast GPU makes 20,000 a second for jobs that came in together."""

PLACES: Final = 8
"""Places tried, from the latest: text is settled within a few tokens, or this answer cannot be gone on."""


class Answering:
    """Answers requests with one engine.

    Args:
        engine: Checks, tokenises, and formats; generates unless `run` pairs it with another.
        run: How one leg is run.
    """

    def __init__(self, engine: Engine, run: RunLeg) -> None:
        self._engine = engine
        self._run = run

    async def __call__(self, work: Work) -> bytes:
        """One attempt; see `inferbus.workers.jobs.attempt.Generate`."""
        job, request, reply = work.job, work.request, work.reply
        bind_contextvars(job=job.id, attempt=job.attempt)
        if job.kind not in self._engine.info.kinds:
            raise NotSupported(f"this model's workers have no tokenizer, which the kind {job.kind!r} needs")
        prompt = await self._engine.prepare(request)
        answer = prompt.answer()
        point, rest = _resumed(prompt, work.points)
        if point is not None:
            reply.continues = point.after
            request.warnings.append(f"continued after {len(point.token_ids)} tokens by another worker")
            log.info("job.continued", job=job.id, attempt=job.attempt, tokens=len(point.token_ids))
        streams = job.streams(request)
        warned: dict[str, Any] = {"warnings": request.warnings} if request.warnings else {}
        story = ResumedDeltas(point, prompt=len(prompt.token_ids), record=_records(job, prompt))
        run = self._run if streams else self._run_in_steps
        async with (
            aclosing(generate(rest, run, job=job.id, served=work.served)) as deltas,
            aclosing(answer.chunks(story.told(deltas))) as messages,
        ):
            async for message in messages:
                if not streams or story.repeating:
                    continue
                if isinstance(message, bytes):
                    reply.chunk(message, story.since() | (warned if reply.sent == 0 else {}))
                else:
                    reply.chunk(message)
                if reply.congested:
                    await reply.ready()
        if streams and not job.durable:
            return b""
        whole = answer.whole()
        return ChunkEncoder(job).whole(whole, warned if isinstance(whole, bytes) else {})

    def _run_in_steps(self, leg: Leg, job: str, served: Served) -> AsyncGenerator[Delta, None]:
        """Runs a leg of an answer that is sent whole."""
        sampling = {"stream_interval": WHOLE_STEP, **leg.sampling}
        return self._run(msgspec.structs.replace(leg, sampling=sampling), job, served)


def _resumed(prompt: Prompt, points: list[ResumePoint]) -> tuple[ResumePoint | None, Prompt]:
    """The latest place that can be gone on from, and what is left to generate; else everything is."""
    for point in points[:PLACES]:
        rest = prompt.resumed(point.token_ids, point.text)
        if rest is not None:
            return point, rest
    return None, prompt


def _records(job: Job, prompt: Prompt) -> bool:
    """Whether text chunks carry their tokens, so that another worker can go on after them."""
    return job.durable and prompt.choices == 1 and job.kind != "tokens"


class ResumedDeltas:
    """The deltas of an answer from its beginning, whoever told it; notes the tokens behind text chunks.

    The formatter hears first what an earlier attempt said, so that its state and the whole answer are
    right; what it makes of that is not sent again.

    Args:
        point: Where an earlier attempt is gone on from.
        prompt: Tokens of the request's own prompt.
        record: Whether to note tokens.
    """

    def __init__(self, point: ResumePoint | None, *, prompt: int, record: bool) -> None:
        self._point = point
        self._prompt = prompt
        self._record = record
        self._token_ids: list[int] = []
        self.repeating = False

    def told(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The deltas for the formatter."""
        return self._from_the_start(deltas) if self._point is not None or self._record else deltas

    def since(self) -> dict[str, list[int]]:
        """The tokens noted since the last call, as a chunk's field."""
        if not self._token_ids:
            return {}
        noted, self._token_ids = self._token_ids, []
        return {"token_ids": noted}

    async def _from_the_start(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        said = self._point.token_ids if self._point is not None else []
        if self._point is not None:
            self.repeating = True
            meta = {"prompt_tokens": self._prompt, "completion_tokens": len(said), "cached_tokens": 0}
            yield Delta(index=0, token_ids=list(said), text=self._point.text, finish=None, meta=meta)
            self.repeating = False
        async for delta in deltas:
            if said:
                delta.meta["prompt_tokens"] = self._prompt
                delta.meta["completion_tokens"] = delta.meta.get("completion_tokens", 0) + len(said)
            if self._record:
                self._token_ids.extend(delta.token_ids)
            yield delta
