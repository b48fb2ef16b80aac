"""A worker is killed in mid-load: are all durable jobs answered, once and whole, and do live requests end?"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from benchmarks.load import SILENT, Sent, Wire, encode
from benchmarks.traces import Goal, Outcome, Trace, arrivals
from inferbus.schemas.answers import TokenChunk
from inferbus.schemas.fleet import Role
from inferbus.schemas.subjects import Subjects, escape
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.client.assembler import Restarted
from inferbus.workers.client.jobs import Job
from inferbus.workers.stack.local import LocalStack

OWNER: Final = "bench"
SETTINGS: Final = {"INFERBUS_ACK_WAIT": "4", "INFERBUS_ANNOUNCE_INTERVAL": "0.2"}
"""A job whose worker is gone comes again after 4 s, not 30: the load is as short as that."""
SILENCE: Final = 15.0
JOB_SECONDS: Final = 240.0


class Killed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        role: Of the worker that was killed.
        at: When, in seconds after the first request.
        replaced: Seconds until another of that role was ready.
        jobs: Durable jobs that were handed in beside the live load.
        lost: Of those, without a result.
        results: Stored results; each job has one.
        whole: Jobs of all tokens whose reader saw the tokens that the result has, each once.
        wrong: Other ones, by what is wrong with them.
        attempts: How many jobs took how many.
        slowest: Seconds to the last result.
        live: What became of the live requests.
        silent: Of those, the ones that nothing more came for: their worker is gone, and callers give up.
        silent_after: Of those, the ones sent after the kill.
    """

    role: Role
    at: float
    replaced: float
    jobs: int
    lost: int
    results: int
    whole: int
    wrong: dict[str, int]
    attempts: dict[int, int]
    slowest: float
    live: Outcome
    silent: int
    silent_after: int

    @property
    def well(self) -> bool:
        """Whether every job ended once and whole, and every live request after the kill came to an end."""
        return self.lost == 0 and self.results == self.whole == self.jobs and self.silent_after == 0


class Killing:
    """One such run.

    Args:
        stack: A fleet; started.
        model: As it is served.
        trace: Of live requests and jobs.
        goal: Of answers.
        rate: Live requests a second; as many jobs come beside them.
        seconds: Of arrivals; the kill comes after a third of them.
        seed: Of everything.
    """

    def __init__(
        self,
        stack: LocalStack,
        model: str,
        trace: Trace,
        goal: Goal,
        *,
        rate: float,
        seconds: float,
        seed: str,
    ) -> None:
        self._stack = stack
        self._model = model
        self._trace = trace
        self._goal = goal
        self._due = arrivals(rate, seconds, seed=seed)
        self._bodies = trace.bodies(2 * len(self._due), seed=f"{seed} kill")
        self._at = seconds / 3

    async def run(self, role: Role, flags: Sequence[str]) -> Killed:
        """Kills the first worker of a role under load, and starts another at once.

        Args:
            role: Whom.
            flags: For its successor.
        """
        count = len(self._due)
        async with Client.connect(self._stack.url, owner=OWNER) as client:
            started = time.monotonic()
            live = asyncio.create_task(asyncio.to_thread(self._live))
            jobs = [asyncio.create_task(self._job(client, k, started)) for k in range(count)]
            await asyncio.sleep(self._at)
            victim = next(name for name in self._stack.workers if name.startswith(f"{role}-"))
            self._stack.workers[victim].kill()
            at = time.monotonic() - started
            await self._stack.add(role, flags)
            replaced = time.monotonic() - started - at
            sent, ends = await live, await asyncio.gather(*jobs)
            stored = await JetStream(client.bus).read(layout.RESULTS, f"infer.results.{escape(OWNER)}.>")
        silent = [request for request in sent if request.fate == SILENT]
        return Killed(
            role=role,
            at=round(at, 2),
            replaced=round(replaced, 2),
            jobs=count,
            lost=sum(end.wrong == "lost" for end in ends),
            results=len(stored),
            whole=sum(not end.wrong for end in ends),
            wrong=dict(Counter(end.wrong for end in ends if end.wrong)),
            attempts=dict(Counter(end.attempt for end in ends)),
            slowest=round(max(end.after for end in ends), 2),
            live=Outcome.of(sent, self._trace.answer, self._goal),
            silent=len(silent),
            silent_after=sum(request.sent > at for request in silent),
        )

    def _live(self) -> list[Sent]:
        bodies = [encode(body) for body in self._bodies[: len(self._due)]]
        with Wire(self._stack.url) as wire:
            return wire.paced(Subjects().request(self._model, "tokens"), bodies, self._due, silence=SILENCE)

    async def _job(self, client: Client, number: int, started: float) -> _End:
        await asyncio.sleep(self._due[number])
        job = await client.submit("tokens", self._model, self._bodies[len(self._due) + number])
        handed_in = time.monotonic()
        try:
            async with asyncio.timeout(JOB_SECONDS):
                seen, result = await asyncio.gather(_seen(client, job), client.result(job))
        except TimeoutError:
            return _End(wrong="lost", attempt=0, after=time.monotonic() - handed_in)
        except Exception as error:  # noqa: BLE001 - whatever a job ends with is what is counted
            wrong = str(getattr(error, "code", type(error).__name__))
            return _End(wrong=wrong, attempt=0, after=time.monotonic() - handed_in)
        answer: Any = result.answer
        tokens = answer.choices[0].token_ids
        wrong = "" if len(tokens) == self._trace.answer else "too short"
        if seen != tokens:
            wrong = "reader saw another answer"
        return _End(wrong=wrong, attempt=result.attempt, after=time.monotonic() - handed_in)


class _End(msgspec.Struct, frozen=True, kw_only=True):
    wrong: str
    attempt: int
    after: float


async def _seen(client: Client, job: Job) -> list[int]:
    """The tokens of a job as its reader has them in the end."""
    tokens: list[int] = []
    async for event in client.stream(job):
        if isinstance(event, Restarted):
            tokens.clear()
        elif isinstance(event, TokenChunk):
            tokens += event.token_ids
    return tokens
