"""What the engine generates for one answer, with what an earlier attempt generated before it."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import msgspec
import structlog

from inferbus.workers.admission import engine_priority
from inferbus.workers.engine.interface import Delta, Leg, Prompt
from inferbus.workers.jobs.history import ResumePoint
from inferbus.workers.jobs.runner import Work
from inferbus.workers.pairing.legs import RunLeg, RunningLeg, generate

log = structlog.get_logger()

WHOLE_STEP: Final = 32
"""Tokens that an engine gives at a time where no reader sees them before the answer is whole. One by one they
cost the worker 50 us each, and a fast GPU makes 20,000 a second for jobs that came in together."""

RESUME_TRIES: Final = 8
"""Resume points tried, from the latest: a text is settled within a few tokens, or this answer cannot be
resumed."""


class Generation:
    """The deltas of one answer from its beginning, whichever attempt generated them.

    Where an earlier attempt is resumed, the formatter gets what that one generated first, so that its state
    and the whole answer are right. The messages that it makes of that are not sent again.

    Args:
        work: The attempt; its reply and its request's warnings name what is resumed.
        prompt: The request's own.
        run: Runs one leg.

    Attributes:
        repeating: Whether the formatter is at what an earlier attempt has sent.
    """

    def __init__(self, work: Work, prompt: Prompt, run: RunLeg) -> None:
        self._work = work
        self._prompt = prompt
        self._run = run
        self._resumed, self._rest = _resumed(prompt, work.resume_points)
        # Text chunks carry their tokens where another worker may have to resume after them.
        self._records = work.attempt.durable and prompt.choices == 1 and work.attempt.kind != "tokens"
        self._token_ids: list[int] = []
        self.repeating = False
        if self._resumed is not None:
            self._announce(self._resumed)

    async def admitted(self) -> None:
        """Waits until the engine can start it."""
        legs = [self._rest.leg(index, rid="") for index in range(self._rest.choices)]
        await self._work.permit.enter(
            math.ceil(sum(len(leg.token_ids) for leg in legs) / len(legs)),
            max(leg.sampling.get("max_new_tokens") or 0 for leg in legs),
            choices=len(legs),
            certain=bool(legs[0].sampling.get("ignore_eos")),
        )

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """The deltas for the formatter.

        Raises:
            InferbusError: As the engine does, or the hand-off to prefill.
        """
        return generate(self._rest, self._leg)

    def take_tokens(self) -> dict[str, list[int]]:
        """The tokens generated since the last call, as a chunk's field, where chunks carry them."""
        if not self._token_ids:
            return {}
        taken, self._token_ids = self._token_ids, []
        return {"token_ids": taken}

    def _announce(self, resumed: ResumePoint) -> None:
        attempt, count = self._work.attempt, len(resumed.token_ids)
        self._work.reply.continue_after(resumed.after)
        self._work.request.warnings.append(f"continued after {count} tokens by another worker")
        log.info("job.continued", job=attempt.job, attempt=attempt.number, tokens=count)

    async def _leg(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        work, resumed = self._work, self._resumed
        priority = engine_priority(work.permit.service_class, leg.options.get("priority"))
        leg = msgspec.structs.replace(leg, options={**leg.options, "priority": priority})
        if not work.attempt.streams(work.request):
            leg = msgspec.structs.replace(leg, sampling={"stream_interval": WHOLE_STEP, **leg.sampling})
        if resumed is not None:
            self.repeating = True
            yield self._earlier(resumed)
            self.repeating = False
        started = False
        async with self._run(leg, work.attempt.job) as running:
            if leg.index == 0 and running.prefill is not None:
                work.reply.served_by(running.prefill)
            if running.first is not None:
                started = True
                work.permit.first_token()
                yield self._accounted(running.first, running)
            async for delta in running.deltas:
                if not started:
                    started = True
                    work.permit.first_token()
                yield self._accounted(delta, running)

    def _earlier(self, resumed: ResumePoint) -> Delta:
        """What the earlier attempt generated."""
        return Delta(
            index=0,
            token_ids=list(resumed.token_ids),
            text=resumed.text,
            finish=None,
            prompt_tokens=len(self._prompt.token_ids),
            completion_tokens=len(resumed.token_ids),
            cached_tokens=0,
        )

    def _accounted(self, delta: Delta, running: RunningLeg) -> Delta:
        """With the usage of the whole answer: this engine counts its own part."""
        self._work.permit.generated(len(delta.token_ids))
        if delta.finish is not None:
            self._work.permit.finished()
            if delta.meta.get("num_retractions"):
                self._work.permit.retracted()
        if running.cached_tokens is not None:
            delta.cached_tokens = running.cached_tokens
        if self._resumed is not None:
            delta.prompt_tokens = len(self._prompt.token_ids)
            delta.completion_tokens += len(self._resumed.token_ids)
        if self._records:
            self._token_ids.extend(delta.token_ids)
        return delta


def _resumed(prompt: Prompt, points: Sequence[ResumePoint]) -> tuple[ResumePoint | None, Prompt]:
    """The latest place from which the answer can be resumed, and what is left to generate; else all of it."""
    for point in points[:RESUME_TRIES]:
        rest = prompt.resumed(point.token_ids, point.text)
        if rest is not None:
            return point, rest
    return None, prompt
