"""The scripted engine itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator

from inferbus.schemas.computed import AnyComputed
from inferbus.schemas.errors import BY_CODE, Cancelled, EngineFailed, InferbusError
from inferbus.schemas.fleet import Capacity, Role, Signature
from inferbus.schemas.requests import AnyRequest
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import Computation, Delta, EngineInfo, EngineLoad, Leg
from inferbus.workers.engine.scripted.computing import plan
from inferbus.workers.engine.scripted.play import play, prefilled
from inferbus.workers.engine.scripted.prefill_queue import Place, PrefillQueue
from inferbus.workers.engine.scripted.prompt import ScriptedPrompt, prepare
from inferbus.workers.engine.scripted.script import Fault, Rule, Script
from inferbus.workers.engine.scripted.text import ByteTokenizer


class _Running:
    """A leg under way, and the means to end it."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._turn = asyncio.Event()
        self.problem: InferbusError | None = None

    def end(self, problem: InferbusError) -> None:
        """Ends it with an error, at its next step."""
        if self.problem is None:
            self.problem = problem
        self._ended.set()
        self._turn.set()

    def take_turn(self) -> None:
        """Its prompt may be computed."""
        self._turn.set()

    async def turn(self) -> None:
        """Waits for that.

        Raises:
            InferbusError: It was ended meanwhile.
        """
        await self._turn.wait()
        if self.problem is not None:
            raise self.problem

    async def pause(self, seconds: float | None = None) -> None:
        """Waits, for ever where no time is given.

        Raises:
            InferbusError: It was ended meanwhile.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return
        if self.problem is not None:
            raise self.problem


class ScriptedEngine:
    """`inferbus.workers.engine.interface.Engine` that replays a script.

    Of the sampling parameters, `max_new_tokens`, `stop_token_ids` and `ignore_eos` mean what they mean to
    a model; the others that a script cannot follow are refused where they would change what a caller sees
    (stop strings, grammars) and have no effect otherwise (temperature).

    Args:
        script: What it does.
        role: prefill, decode or both. The first two insist on a rendezvous, but nothing is transferred:
            a prefill leg is done after its delay.
        model: The served model name.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        role: Role = "both",
        model: str = "scripted",
    ) -> None:
        self._script = script or Script()
        self._role = role
        self._tokenizer = ByteTokenizer(self._script.words)
        self._info = _info(self._script, role, model)
        self._running: dict[str, _Running] = {}
        self._prompts = PrefillQueue(self._script.kv_tokens)
        self._struck: Counter[int] = Counter()
        self._closed = False
        self.sound = True
        """The result of `healthy` until the engine is closed; for tests to set."""

    @property
    def info(self) -> EngineInfo:
        """Fixed."""
        return self._info

    @property
    def running(self) -> int:
        """Legs under way; 0 once every generator is exhausted or closed."""
        return len(self._running)

    async def prepare(self, request: AnyRequest) -> ScriptedPrompt:
        """Checks, renders and tokenises.

        Raises:
            CallerError: The request cannot be served.
        """
        checked = prepare(request, self._info, self._tokenizer)
        return ScriptedPrompt(request, checked, self._info.model, tokenizer=self._tokenizer)

    async def plan(self, request: AnyComputed) -> Computation:
        """Checks and tokenises a request of a computed kind; embeddings are legs of one token.

        Raises:
            CallerError: The request cannot be served.
        """
        return plan(request, self._info, self._tokenizer, self._script.embedding, self.generate)

    async def generate(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        """Plays the first rule that fits the leg.

        Raises:
            Cancelled: `abort` was called.
            EngineFailed: The engine is closed, the request id is running already, or a rendezvous is missing.
            InferbusError: As scripted.
        """
        if self._closed:
            raise EngineFailed("the engine is closed")
        if leg.rid in self._running:
            raise EngineFailed("this request id is running already")
        if self._role != "both" and leg.rendezvous is None:
            raise EngineFailed(f"a leg of the role {self._role} needs a rendezvous")
        self._running[leg.rid] = running = _Running()
        place = self._place(leg, running)
        try:
            await self._compute_prompt(leg, place, running)
            rule = self._script.rule(leg)
            fault = self._due(rule)
            if rule.first_delay:
                await running.pause(rule.first_delay)
            if fault is not None and (fault.at == 0 or self._role == "prefill"):
                await _strike(fault, running)
            if self._role == "prefill":
                yield prefilled(leg, rule)
                return
            deltas = play(leg, rule, self._info, self._tokenizer, stops_at=fault.at if fault else None)
            burst, delay, done = self._script.burst, rule.delay, 0
            for step, delta in enumerate(deltas, 1):
                if running.problem is not None:
                    raise running.problem
                place.generated += len(delta.token_ids)
                yield delta
                if delta.finish is not None:
                    return
                if fault is not None:
                    done += len(delta.token_ids)
                    if done == fault.at:
                        await _strike(fault, running)
                if delay:
                    await running.pause(delay)
                elif step % burst == 0:
                    await asyncio.sleep(0)
        finally:
            del self._running[leg.rid]
            self._prompts.leave(place)

    def abort(self, rid: str) -> None:
        """Ends a leg."""
        if (running := self._running.get(rid)) is not None:
            running.end(Cancelled("the request was aborted"))

    async def load(self) -> EngineLoad:
        """How busy it is."""
        waiting = self._prompts.waiting
        return EngineLoad(
            running=len(self._running) - waiting, waiting=waiting, kv_used=self._prompts.kv_used
        )

    async def healthy(self) -> bool:
        """Whether it works."""
        return self.sound and not self._closed

    async def close(self) -> None:
        """Ends every leg, as the death of a real engine does."""
        self._closed = True
        for running in self._running.values():
            running.end(EngineFailed("the engine was closed"))

    def _place(self, leg: Leg, running: _Running) -> Place:
        left = self._info.capacity.context_length - len(leg.token_ids)
        answer = 0 if self._role == "prefill" else min(leg.sampling.get("max_new_tokens") or left, left)
        return Place(len(leg.token_ids), answer, running.take_turn)

    async def _compute_prompt(self, leg: Leg, place: Place, running: _Running) -> None:
        """Waits for the prompt's turn, and as long as it takes; a decode engine finds it computed."""
        rate = self._script.prefill_tokens_per_second
        if not rate:
            return
        self._prompts.enter(place, priority=leg.options.get("priority") or 0)
        await running.turn()
        if self._role != "decode":
            await running.pause(place.prompt / rate)
        self._prompts.computed(place)

    def _due(self, rule: Rule) -> Fault | None:
        """The rule's fault, if it is to happen once more."""
        fault = rule.fault
        if fault is None or (fault.times is not None and self._struck[id(rule)] >= fault.times):
            return None
        self._struck[id(rule)] += 1
        return fault


async def _strike(fault: Fault, running: _Running) -> None:
    if fault.once is not None:
        try:
            os.close(os.open(fault.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    match fault.do:
        case "fail":
            raise BY_CODE[fault.code](f"failed as scripted after {fault.at} tokens")
        case "hang":
            await running.pause()
        case "crash":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def _info(script: Script, role: Role, model: str) -> EngineInfo:
    signature = Signature(
        model=model,
        dtype="scripted",
        kv_dtype="scripted",
        page_size=script.page_size,
        layers=0,
        kv_heads=0,
        head_dim=0,
        tp=1,
        dp=1,
        pp=1,
        backend="scripted",
    )
    kinds: tuple[Kind, ...] = ("embeddings",) if script.embedding else ("tokens",)
    if script.tokenizer:
        kinds = (*kinds, *(() if script.embedding else ("chat", "completions")), "tokenize", "detokenize")
    return EngineInfo(
        name="scripted",
        model=model,
        kinds=() if role == "prefill" else kinds,
        tokenizer=script.tokenizer,
        capacity=Capacity(
            context_length=script.context_length,
            kv_tokens=script.kv_tokens,
            page_size=script.page_size,
            max_running=script.max_running,
            max_prefill_tokens=script.max_prefill_tokens,
            vocabulary=script.vocabulary,
            step_tokens=script.step_tokens,
        ),
        signature=None if role == "both" else signature,
        bootstrap=script.bootstrap if role == "prefill" else None,
    )
