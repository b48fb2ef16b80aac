"""A model of SGLang's scheduler in virtual time: KV cache, chunks, mixed steps, priorities, retraction.

What decides when a prompt is computed is modelled as SGLang 0.5.23 has it (`schedule_policy.PrefillAdder`,
`scheduler._get_new_batch_prefill_raw`, `scheduler.update_running_batch`): the order of the waiting queue, the
tokens of a step, the KV cache kept for what runs, the `new_token_ratio`, and that the next step is planned
while one still runs. Left out: the prefix cache, pages, aborts inside a step.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from inferbus.workers.admission.classes import PREEMPTION_THRESHOLD

CLIP: Final = 4096
"""New tokens of a request beyond which SGLang keeps no KV cache for it."""

FIRST_RATIO: Final = 0.7
LEAST_RATIO: Final = FIRST_RATIO * 0.14
RATIO_DECAY: Final = (FIRST_RATIO - LEAST_RATIO) / 600
RETRACT_STEPS: Final = 20
"""Steps for which a retraction makes room."""


INSTANT: Final = 1e-6
"""Seconds that planning a step takes."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine, and how long its steps take.

    Attributes:
        kv_tokens: Tokens of its KV cache.
        chunk: Tokens of a step.
        mixed: Whether running requests take part in steps that compute prompts.
        overlap: Whether a step is planned while the one before it runs.
        max_running: Requests that run at once.
        latency: Seconds from the worker to the scheduler, and back.
        step_seconds: Of every step.
        prompt_seconds: More for each token of a prompt.
        running_seconds: More for each running request.
    """

    kv_tokens: int = 340_000
    chunk: int = 1536
    mixed: bool = True
    overlap: bool = True
    max_running: int = 4096
    latency: float = 0.001
    step_seconds: float = 0.006
    prompt_seconds: float = 26e-6
    running_seconds: float = 30e-6


class Request:
    """One request in the engine.

    Args:
        prompt: Its tokens.
        answer: Tokens that it will generate.
        allowed: Tokens that it may generate.
        priority: Higher ones start first.
        token: Called with every token that reaches the worker.
    """

    def __init__(
        self,
        prompt: int,
        answer: int,
        allowed: int | None = None,
        *,
        priority: int = 0,
        token: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt = prompt
        self.answer = answer
        self.allowed = answer if allowed is None else allowed
        self.priority = priority
        self.token = token
        self.entered = 0
        self.kv = 0
        self.generated = 0
        self.told = 0
        self.retractions = 0

    @property
    def to_compute(self) -> int:
        """Tokens whose KV cache is missing: of the prompt, and of the answer so far after a retraction."""
        return self.prompt + self.generated - self.kv

    @property
    def may_generate(self) -> int:
        """New tokens that SGLang keeps room for."""
        return min(self.allowed - self.generated, CLIP)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does at once.

    Attributes:
        prompt_tokens: Tokens of prompts.
        running: Requests that get a token without a prompt being computed.
        tokens: Requests that get a token.
        unused: Tokens of prompts that would have had room, and were not there.
        lacks_kv: Whether a waiting request did not start since the KV cache has no room for it.
    """

    prompt_tokens: int
    running: int
    tokens: list[Request]
    unused: int
    lacks_kv: bool


class Scheduler:
    """The scheduler alone; knows no time.

    Attributes:
        waiting: Requests that have not started, or were retracted.
        running: Requests whose prompt is computed, or is being computed by the step under way.
        retractions: Of running requests, for want of KV cache.
        preemptions: Of running requests, for urgent ones.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.waiting: list[Request] = []
        self.running: dict[Request, None] = {}
        self.retractions = 0
        self.preemptions = 0
        self._chunked: Request | None = None
        self._kv_used = 0
        self._ratio = FIRST_RATIO
        self._count = itertools.count()

    @property
    def kv_free(self) -> int:
        """Tokens of the KV cache that nothing holds."""
        return self.spec.kv_tokens - self._kv_used

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self.waiting or self.running or self._chunked)

    @property
    def queued_tokens(self) -> int:
        """Tokens of prompts that no step has computed yet."""
        begun = self._chunked.to_compute if self._chunked is not None else 0
        return begun + sum(request.to_compute for request in self.waiting)

    def add(self, request: Request) -> None:
        """A request arrives, or comes back."""
        request.entered = next(self._count)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Nothing of it is left."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.running.pop(request, None)
        if request is self._chunked:
            self._chunked = None
        self._release(request)

    def plan(self) -> Step | None:
        """The next step; None where there is none."""
        # What gets its last token from the step under way still counts, but needs no further step.
        rows = [request for request in self.running if request.generated < request.answer]
        whole, prompt_tokens, unused, lacks_kv = self._prompts()
        rows = [request for request in rows if request in self.running]
        if prompt_tokens:
            if not self.spec.mixed or len(rows) > self.kv_free:
                rows = []
        elif rows:
            rows = self._decoding(rows)
        if not (prompt_tokens or rows):
            return None
        for request in rows:
            self._hold(request, 1)
        tokens = [*rows, *whole]
        for request in tokens:
            request.generated += 1
        self.running.update(dict.fromkeys(whole))
        return Step(
            prompt_tokens=prompt_tokens, running=len(rows), tokens=tokens, unused=unused, lacks_kv=lacks_kv
        )

    def ended(self, step: Step) -> None:
        """The tokens of a step are there."""
        for request in step.tokens:
            request.told += 1
            if request.told == request.answer:
                self.running.pop(request, None)
                self._release(request)

    def _prompts(self) -> tuple[list[Request], int, int, bool]:
        """Prompts for the next step.

        Returns:
            Requests whose prompts it completes; tokens of prompts; tokens that would have had room;
            whether a request did not start for want of KV cache.
        """
        spec, whole, tokens, lacks_kv = self.spec, list[Request](), 0, False
        mixed_rows = len(self.running) if spec.mixed else 0
        left = spec.chunk - mixed_rows
        free = self.kv_free - mixed_rows - sum(map(self._kept, self.running))

        def compute(request: Request, size: int) -> None:
            nonlocal left, free, tokens
            self._hold(request, size)
            left, tokens = left - size, tokens + size
            free -= size + 1
            if request.to_compute == 0:
                free -= request.may_generate
                whole.append(request)
                self._chunked = None
            else:
                self._chunked = request

        if self._chunked is not None and left > 0:
            room = min(left, int(free))
            compute(self._chunked, min(self._chunked.to_compute, room if room > 0 else left))
        self.waiting.sort(key=lambda request: (-request.priority, request.entered))
        started = set[Request]()
        for request in self.waiting.copy():
            if left <= 0 or self._chunked is not None:
                break
            if len(self.running) + len(whole) >= spec.max_running:
                freed = self._preempt(request, free)
                if freed is None:
                    break
                free += freed
            if request.to_compute + request.may_generate + 1 >= free:
                lacks_kv = True
                break
            started.add(request)
            compute(request, min(request.to_compute, left))
        self.waiting = [request for request in self.waiting if request not in started]
        return whole, tokens, max(0, left) if self._chunked is None else 0, lacks_kv

    def _kept(self, request: Request) -> float:
        """Tokens of the KV cache that are kept for a running request."""
        return request.may_generate * (1.0 if request.allowed == request.answer else self._ratio)

    def _preempt(self, request: Request, free: float) -> float | None:
        """Takes running requests back for an urgent one; the room that this gives, None where it cannot be.

        SGLang does this where too many requests run, never where the KV cache is full.
        """
        lacking = request.to_compute + request.may_generate - free
        freed, chosen = 0.0, list[Request]()
        for each in sorted(self.running, key=lambda other: (other.priority, -other.entered)):
            if each.generated == each.answer:
                continue
            if request.priority - each.priority <= PREEMPTION_THRESHOLD:
                break
            chosen.append(each)
            freed += self._kept(each)
            if lacking <= freed:
                break
        if not chosen or lacking > freed:
            return None
        for each in chosen:
            self.preemptions += 1
            freed += each.kv
            self._back(each)
        return freed

    def _decoding(self, rows: list[Request]) -> list[Request]:
        """The running requests that the next step takes further; others lose their KV cache if it is full."""
        if len(rows) <= self.kv_free:
            self._ratio = max(self._ratio - RATIO_DECAY, LEAST_RATIO)
            return rows
        if len(rows) < len(self.running):
            # The step under way frees something.
            return []
        rows = sorted(rows, key=lambda each: (each.priority, each.generated, -each.prompt), reverse=True)
        while len(rows) > self.kv_free and len(rows) > 1:
            self.retractions += 1
            self._back(rows.pop())
        if len(rows) > self.kv_free:
            raise AssertionError("one request alone does not fit")
        made = sum(each.generated for each in rows) + RETRACT_STEPS * len(rows)
        self._ratio = min(1.0, made / (sum(each.allowed for each in rows) + 1))
        return rows

    def _back(self, request: Request) -> None:
        request.retractions += 1
        del self.running[request]
        self._release(request)
        self.add(request)

    def _hold(self, request: Request, tokens: int) -> None:
        request.kv += tokens
        self._kv_used += tokens

    def _release(self, request: Request) -> None:
        self._kv_used -= request.kv
        request.kv = 0


class Engine:
    """The scheduler in time.

    Args:
        spec: See `Spec`.
        planned: Called with every step.
    """

    def __init__(self, spec: Spec, *, planned: Callable[[Step], None] = lambda step: None) -> None:
        self.spec = spec
        self.scheduler = Scheduler(spec)
        self._planned = planned
        self._arrived = asyncio.Event()
        # Timers of one moment have no order; messages have.
        self._sent = deque[Request]()
        self._gone = set[Request]()

    def send(self, request: Request) -> None:
        """Sends a request to it."""
        self._sent.append(request)
        asyncio.get_running_loop().call_later(self.spec.latency, self._add)

    def abort(self, request: Request) -> None:
        """Ends a request; no further token of it comes."""
        self._gone.add(request)
        self.scheduler.abort(request)

    async def run(self) -> None:
        """Runs for ever."""
        loop, previous, ends = asyncio.get_running_loop(), None, 0.0
        while True:
            step = self.scheduler.plan()
            if step is None and previous is None:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if step is not None:
                self._planned(step)
            if previous is not None:
                await self._end(previous, ends)
                previous = None
            if step is not None:
                ends = max(loop.time(), ends) + self._seconds(step)
                if self.spec.overlap:
                    previous = step
                else:
                    await self._end(step, ends)

    def _seconds(self, step: Step) -> float:
        spec = self.spec
        prompts, running = spec.prompt_seconds * step.prompt_tokens, spec.running_seconds * step.running
        return spec.step_seconds + prompts + running

    def _add(self) -> None:
        request = self._sent.popleft()
        if request not in self._gone:
            self.scheduler.add(request)
            self._arrived.set()

    async def _end(self, step: Step, when: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(when - loop.time())
        self.scheduler.ended(step)
        loop.call_later(self.spec.latency, self._tell, step.tokens)
        # Without a latency, what these tokens set off comes before the next step is planned.
        await asyncio.sleep(INSTANT)

    def _tell(self, requests: list[Request]) -> None:
        for request in requests:
            if request not in self._gone:
                request.token()
