"""Admission: which of the waiting requests starts, and whether there is room for another job.

Two budgets stand before the engine:

* **Prompt window.** A prompt goes to the engine while fewer tokens than these are ahead of it: of prompts
  that the engine has and that have no first token yet. SGLang plans a step while one runs, so a few steps
  of tokens keep its next one full, and its own queue stays that short.
  A live request counts live prompts only: SGLang orders its queue by priority, so jobs are not ahead of it.
* **KV tokens.** The forecast peak of everything that runs (see `forecast`) stays within the KV cache. Jobs
  leave a share of it to live requests.

A request is known in two steps. When it is taken, its size is what its class is expected to need; once it is
tokenised, it waits here with its real size until it fits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from inferbus.workers.admission.classes import BATCH, JOBS, LIVE, ORDER, ServiceClass
from inferbus.workers.admission.forecast import Expectation, peak
from inferbus.workers.admission.permit import Permit

JOBS_TURN: Final = 16
"""Windows of live prompts after which a job that waits in the engine has its turn."""

LONGEST_TURN: Final = 1.0
"""Seconds that live requests wait for such a turn at most: the job may lack KV cache rather than its turn."""

FORECAST_AGE: Final = 0.01
"""Seconds for which a forecast is used again; it takes a millisecond for thousands of requests."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker may hold.

    Attributes:
        slots: Requests, at least 1.
        kv_tokens: Tokens of the engine's KV cache.
        window: Tokens of prompts without a first token beyond which no further prompt starts.
        staged: Tokens of prompts beyond the window that may be prepared meanwhile.
        live_share: Share of slots and KV tokens that jobs leave to live requests; one slot always remains for
            jobs.
    """

    slots: int
    kv_tokens: int
    window: int
    staged: int
    live_share: float


class HeldPermit(Permit):
    """One request's place in a worker, from when it was taken until `close`.

    Attributes:
        service_class: Its class.
        waited: Seconds that it waited in `enter`.
    """

    def __init__(self, admission: Admission, service_class: ServiceClass) -> None:
        super().__init__(service_class)
        self._admission = admission
        self._expectation = admission._expectations[service_class]
        self._prompt = round(self._expectation.prompt)
        self._choices = 1
        self._allowed = 0
        self._certain = False
        self._generated = 0
        self._turn: asyncio.Future[None] | None = None
        self._admitted = False
        self._started = 0
        self._finished = 0
        self._closed = False

    @property
    def tokens(self) -> int:
        """Prompt tokens over all choices."""
        return self._prompt * self._choices

    @property
    def waits(self) -> bool:
        """Whether it is in the engine, and one of its choices has no first token yet."""
        return self._admitted and self._started < self._choices

    @property
    def worst(self) -> int:
        """KV tokens that it needs if it uses all that it is allowed."""
        return self.tokens + self._allowed * self._choices

    async def enter(self, prompt: int, allowed: int, *, choices: int = 1, certain: bool = False) -> None:
        """Waits until the request may start.

        Args:
            prompt: Its tokens.
            allowed: New tokens that each choice may have at most.
            choices: Sequences that are generated for it.
            certain: Whether it will use all of them (`ignore_eos`).
        """
        self._certain = certain
        self._expectation.saw_prompt(prompt)
        clock = self._admission._clock
        began = clock()
        try:
            await self._admission._enter(self, prompt, allowed, choices)
        finally:
            self.waited = clock() - began

    def first_token(self) -> None:
        """One of its choices has its first token: its prompt is computed."""
        if not self._closed and self.waits:
            self._started += 1
            if self._started == self._choices:
                self._admission._prompt_computed(self)

    def generated(self, tokens: int) -> None:
        """So many more tokens were generated, over all choices."""
        self._generated += tokens

    def finished(self) -> None:
        """One of its choices has come to its own end; a cancelled one never does."""
        self._finished += 1
        if self._finished == self._choices:
            self._expectation.saw_answer(self._generated, self._allowed * self._choices)

    def retracted(self) -> None:
        """The engine took its KV cache away, and will compute it again."""
        self._expectation.retracted()

    def close(self) -> None:
        """It is over, or goes back to its queue; may be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._admission._close(self)

    def _growth(self) -> tuple[int, int]:
        """Its KV tokens now, and those still to come, of all choices as one sequence."""
        allowed = self._allowed * self._choices
        left = (
            allowed - self._generated
            if self._certain
            else self._expectation.new_tokens(self._generated, allowed)
        )
        return self.tokens + self._generated, left


class Admission:
    """The budgets of one worker, and the requests that it holds.

    Args:
        budget: See `Budget`.
        clock: Monotonic seconds.

    Attributes:
        budget: As it is now.
        room: Set while another job may be taken.
        no_room: Set while none may.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.room = asyncio.Event()
        self.no_room = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._clock = clock
        self._job_slots = max(1, budget.slots - round(budget.slots * budget.live_share))
        self._job_tokens = budget.kv_tokens - math.floor(budget.kv_tokens * budget.live_share)
        self._expectations = {name: Expectation() for name in ORDER}
        self._held: dict[HeldPermit, None] = {}
        self._queues: dict[ServiceClass, deque[HeldPermit]] = {name: deque() for name in ORDER}
        self._jobs = 0
        self._jobs_admitted = 0
        self._worst = 0
        self._staged = dict.fromkeys(ORDER, 0)
        self._waiting = dict.fromkeys(ORDER, 0)
        self._forecast: tuple[float, int] = (-math.inf, 0)
        self._outdated = False
        self._look_again: asyncio.TimerHandle | None = None
        self._live_since_job = 0
        self._turn_until: float | None = None
        self._set_room()

    @property
    def busy(self) -> int:
        """Requests held."""
        return len(self._held)

    @property
    def full(self) -> bool:
        """Whether not even a live request can be taken."""
        return len(self._held) >= self.budget.slots

    @property
    def queued(self) -> int:
        """Requests that are prepared and wait here for their turn."""
        return sum(map(len, self._queues.values()))

    @property
    def window_used(self) -> int:
        """Tokens of prompts that the engine has and that have no first token yet."""
        return sum(self._waiting.values())

    @property
    def kv_forecast(self) -> int:
        """KV tokens that the admitted requests will need at most.

        SGLang itself keeps room for all that requests with `ignore_eos` may still generate, so what it would
        refuse is not promised here either.
        """
        admitted = [permit for permit in self._held if permit._admitted]
        certain = sum(permit.worst for permit in admitted if permit._certain)
        held = sum(permit._growth()[0] for permit in admitted if not permit._certain)
        return max(certain + held, peak(permit._growth() for permit in admitted))

    def set_window(self, window: int) -> None:
        """Changes the prompt window: the prefill workers of a decode worker come and go."""
        if window != self.budget.window:
            self.budget = msgspec.structs.replace(self.budget, window=window)
            self._update()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change; it must be quick."""
        self._listeners.append(listener)

    def take(self, service_class: ServiceClass) -> HeldPermit | None:
        """A place for a request that cannot wait outside, if a slot is free."""
        return None if self.full else self._take(service_class)

    async def take_job(self, service_class: ServiceClass) -> HeldPermit:
        """A place for a job that was delivered, as soon as a slot is free that live requests may spare."""
        while self.full or self._jobs >= self._job_slots:
            await self.room.wait()
        return self._take(service_class)

    def _take(self, service_class: ServiceClass) -> HeldPermit:
        permit = HeldPermit(self, service_class)
        self._held[permit] = None
        self._jobs += service_class != LIVE
        self._staged[permit.service_class] += permit.tokens
        self._update()
        return permit

    async def _enter(self, permit: HeldPermit, prompt: int, allowed: int, choices: int) -> None:
        self._staged[permit.service_class] -= permit.tokens
        permit._prompt, permit._allowed, permit._choices = prompt, allowed, choices
        self._staged[permit.service_class] += permit.tokens
        permit._turn = asyncio.get_running_loop().create_future()
        self._queues[permit.service_class].append(permit)
        self._update()
        await permit._turn

    def _admit(self, permit: HeldPermit) -> None:
        permit._admitted = True
        if permit._turn is not None and not permit._turn.done():
            permit._turn.set_result(None)
        self._jobs_admitted += permit.service_class != LIVE
        self._staged[permit.service_class] -= permit.tokens
        self._worst += permit.worst
        self._waiting[permit.service_class] += permit.tokens
        when, forecast = self._forecast
        self._forecast = (when, forecast + sum(permit._growth()))
        self._outdated = True
        if permit.service_class == LIVE and self._jobs_wait:
            self._live_since_job += permit.tokens

    def _prompt_computed(self, permit: HeldPermit) -> None:
        self._waiting[permit.service_class] -= permit.tokens
        if permit.service_class != LIVE:
            self._live_since_job, self._turn_until = 0, None
        self._update()

    def _close(self, permit: HeldPermit) -> None:
        del self._held[permit]
        self._jobs -= permit.service_class != LIVE
        if permit._admitted:
            self._jobs_admitted -= permit.service_class != LIVE
            self._outdated = True
            self._worst -= permit.worst
            self._waiting[permit.service_class] -= permit.tokens if permit.waits else 0
        else:
            self._staged[permit.service_class] -= permit.tokens
            with contextlib.suppress(ValueError):
                self._queues[permit.service_class].remove(permit)
        self._update()

    @property
    def _jobs_wait(self) -> bool:
        """Whether a job waits for its prompt to be computed, in the engine or here; for nothing else."""
        if any(self._waiting[name] for name in JOBS):
            return True
        first = next((self._queues[name][0] for name in JOBS if self._queues[name]), None)
        return first is not None and self._holds(first.worst, sum(first._growth()))

    def _update(self) -> None:
        """Admits whatever fits, the most urgent first, and tells whether another job may be taken."""
        for name in ORDER:
            queue = self._queues[name]
            while queue and self._fits(queue[0]):
                self._admit(queue.popleft())
        self._set_room()
        for listener in self._listeners:
            listener()

    def _set_room(self) -> None:
        room = self._has_room()
        gained, lost = (self.room, self.no_room) if room else (self.no_room, self.room)
        gained.set()
        lost.clear()

    def _fits(self, permit: HeldPermit) -> bool:
        live = permit.service_class == LIVE
        ahead = self._waiting[LIVE] if live else self.window_used
        if ahead >= self.budget.window:
            return False
        if live:
            return not (self._jobs_wait and self._jobs_turn())
        return self._holds(permit.worst, sum(permit._growth()))

    def _has_room(self) -> bool:
        if self.full or self._jobs >= self._job_slots:
            return False
        if any(self._queues[name] for name in JOBS):
            return False
        staged = sum(self._staged.values())
        if self.window_used + staged >= self.budget.window + self.budget.staged and self._prompts_of_jobs:
            # Beside any number of live requests one job is taken, and waits for its turn.
            return False
        expected = staged + round(self._expectations[BATCH].prompt)
        return self._holds(expected, expected)

    @property
    def _prompts_of_jobs(self) -> int:
        """Tokens of jobs' prompts that are not computed."""
        return sum(self._waiting[name] + self._staged[name] for name in JOBS)

    def _holds(self, worst: int, expected: int) -> bool:
        """Whether the KV cache holds so many more tokens beside what runs.

        A worker without a job tries any: live requests alone must not keep out one that is larger than the
        share of jobs.
        """
        if not self._jobs_admitted or self._worst + worst <= self._job_tokens:
            return True
        if self._recent_forecast() + expected <= self._job_tokens:
            return True
        if self._outdated and self._look_again is None:
            # Nothing else may happen for a long time.
            self._look_again = asyncio.get_running_loop().call_later(FORECAST_AGE, self._forecast_aged)
        return False

    def _recent_forecast(self) -> int:
        """The forecast, at most `FORECAST_AGE` old, with the final sizes of what was admitted since."""
        now = self._clock()
        if now - self._forecast[0] >= FORECAST_AGE:
            self._forecast, self._outdated = (now, self.kv_forecast), False
        return self._forecast[1]

    def _forecast_aged(self) -> None:
        self._look_again = None
        self._update()

    def _jobs_turn(self) -> bool:
        """Whether live requests have had so much that a job in the engine comes first."""
        if self._live_since_job < JOBS_TURN * self.budget.window:
            return False
        now = self._clock()
        if self._turn_until is None:
            self._turn_until = now + LONGEST_TURN
            asyncio.get_running_loop().call_later(LONGEST_TURN, self._update)
        if now < self._turn_until:
            return True
        self._live_since_job, self._turn_until = 0, None
        return False
