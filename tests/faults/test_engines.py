"""What happens to requests and jobs when real engines die, hang, are replaced, or cannot be reached.

SGLang on the CPU, real KV transfers over NIXL, a real NATS server. Engines take half a minute to start, so
the tests share them, and where one kills a worker, its replacement serves those that follow.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from inferbus.schemas import codec, handoff
from inferbus.schemas.fleet import Bootstrap, WorkerInfo
from inferbus.schemas.subjects import Kind
from inferbus.workers.bus.fleet.registry import DELETE, OPERATION, announce, key
from inferbus.workers.engine.sglang.launch import ENGINE_DIED
from inferbus.workers.pairing.picker import Picker
from inferbus.workers.stack import models
from inferbus.workers.stack.processes import Child, session_members
from inferbus.workers.stack.server import NatsServer
from tests.support.asking import Answer, result
from tests.support.engine_fleet import EngineFleet, engine_fleet, freeze, kill, scheduler, thaw
from tests.support.eventually import eventually

# Starting an engine counts as part of the test that needs it, and others use the machine too.
pytestmark = [
    pytest.mark.faults,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

GREEDY = {"temperature": 0, "ignore_eos": True}
PROMPTS: dict[Kind, dict[str, Any]] = {
    "tokens": {"token_ids": list(range(100, 140))},
    "chat": {"messages": [{"role": "user", "content": "Where does the river go?"}]},
}
Answers = dict[Kind, Any]

SHORT, LONG = 24, 800
"""Tokens of an answer: at once, and long enough to be interrupted."""

BOUND = 30.0
"""Seconds within which a caller hears of whatever befell a prefill worker; SGLang's own bound is 300."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineFleet]:
    directory = tmp_path_factory.mktemp("engines")
    model = str(models.ensure("tiny"))
    async with (
        NatsServer(directory / "nats", sync_interval=None) as server,
        engine_fleet(server, directory, model) as found,
    ):
        await asyncio.gather(found.prefill(), found.decodes())
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nc(stack: EngineFleet) -> AsyncIterator[Client]:
    client = await nats.connect(stack.url)
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(nc: Client, stack: EngineFleet) -> Answers:
    """What long jobs answer that nothing happens to."""
    for kind in PROMPTS:
        await submit(nc, f"undisturbed-{kind}", kind, LONG)
    return {kind: said(await result(nc, f"undisturbed-{kind}", within=60)) for kind in PROMPTS}


def body(kind: Kind, length: int, **more: Any) -> bytes:
    return json.dumps(PROMPTS[kind] | GREEDY | {"max_tokens": length} | more).encode()


async def submit(nc: Client, job: str, kind: Kind = "tokens", length: int = SHORT) -> str:
    subject = f"infer.jobs.tiny.batch.acme.{kind}"
    await nc.jetstream().publish(subject, body(kind, length), headers={"Nats-Msg-Id": job})
    return job


async def request(nc: Client, length: int = SHORT, *, job: str | None = None, **more: Any) -> Answer:
    answer = await Answer.on(nc, nc.new_inbox())
    headers = {"Infer-Job-Id": job} if job else None
    data = body("tokens", length, **more)
    await nc.publish("infer.request.tiny.tokens", data, reply=answer.subject, headers=headers)
    return answer


def said(stored: Any) -> Any:
    """The answer of a stored result: tokens, or text."""
    assert stored.headers["Infer-Status"] == "ok", stored.data
    choice = json.loads(stored.data)["choices"][0]
    return choice.get("token_ids") or choice["message"]["content"]


def tokens(answer: Answer) -> list[int]:
    return [token for chunk in answer.chunks for token in chunk["token_ids"]]


async def failed(answer: Answer, within: float = BOUND) -> dict[str, Any]:
    """Waits for the end of a request that fails, for no fault of its caller's."""
    assert await answer.ended(within) == "error"
    error: dict[str, Any] = answer.chunks[-1]["error"]
    assert error["retryable"] is True
    return error


async def handed_off(stack: EngineFleet, prefill: Child, count: int) -> None:
    """Waits until a prefill worker has taken so many hand-offs and finished none."""
    await eventually(lambda: stack.load(prefill).busy == count, what="all hand-offs are taken")


async def test_a_cancel_while_the_cache_is_awaited_stops_both_legs(nc: Client, stack: EngineFleet) -> None:
    prefill, [decode] = await stack.prefill(), await stack.decodes()
    computing = scheduler(prefill)
    freeze(computing)
    answer = await request(nc, job="mine", token_ids=list(range(100, 3100)))
    await handed_off(stack, prefill, 1)
    await nc.jetstream().publish("infer.cancel.live.mine", b"")
    assert await answer.ended(within=1.0) == "cancelled"
    await eventually(lambda: not stack.load(prefill).busy, within=2.0)
    thaw(computing)
    await stack.idle(prefill, decode, within=10.0)


async def test_cancels_of_long_prompts_before_their_first_token_leave_nothing_behind(
    nc: Client, stack: EngineFleet
) -> None:
    prefill, [decode] = await stack.prefill(), await stack.decodes()
    # More than the cache holds at once: some are computed, some are sent, most wait.
    answers = [
        await request(nc, LONG, job=f"long-{i}", token_ids=list(range(100 + i, 2600 + i))) for i in range(6)
    ]
    await eventually(lambda: stack.load(decode).busy == 6, what="all are taken")
    for i in range(6):
        await nc.jetstream().publish(f"infer.cancel.live.long-{i}", b"")
    assert [await answer.ended(within=1.0) for answer in answers] == ["cancelled"] * 6
    await stack.idle(prefill, decode, within=10.0)


async def test_a_prefill_that_hangs_fails_a_request_in_time_and_a_job_finishes_when_it_goes_on(
    nc: Client, stack: EngineFleet, undisturbed: Answers
) -> None:
    prefill, [decode] = await stack.prefill(), await stack.decodes()
    computing = scheduler(prefill)
    freeze(computing)
    answer, job = await request(nc), await submit(nc, "hung")
    await handed_off(stack, prefill, 2)
    freeze(prefill.pid)
    await failed(answer)
    thaw(computing, prefill.pid)
    assert said(await result(nc, job, within=60)) == undisturbed["tokens"][:SHORT]
    await stack.idle(prefill, decode, within=BOUND)


@pytest.mark.parametrize("address", ["nobody listens", "nobody answers"])
async def test_a_prefill_that_cannot_be_reached_is_passed_over_and_both_legs_end(
    nc: Client, stack: EngineFleet, undisturbed: Answers, address: str
) -> None:
    prefill, [decode] = await stack.prefill(), await stack.decodes()
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        if address == "nobody answers":
            silent.listen()
        host, port = silent.getsockname()
        async with elsewhere(nc, stack, prefill, Bootstrap(host=host, port=port)) as (name, orders):
            answer = await request(nc)
            assert await answer.ended(within=BOUND) == "ok"
    assert tokens(answer) == undisturbed["tokens"][:SHORT]
    taken = orders[0]
    assert isinstance(taken, handoff.Prefill)
    assert orders[1:] == [handoff.Abort(rid=taken.rid)]
    reason = stack.fleet.events(decode, "leg.retried")[-1]["reason"]
    assert name in reason
    assert f"{host}:{port}" in reason
    await stack.idle(prefill, decode, within=10.0)


@asynccontextmanager
async def elsewhere(
    nc: Client, stack: EngineFleet, prefill: Child, bootstrap: Bootstrap
) -> AsyncIterator[tuple[str, list[handoff.ToPrefill]]]:
    """A prefill worker that takes hand-offs, is asked first, and cannot be reached; what it is told."""
    info = announced(stack, prefill)
    fakes = (msgspec.structs.replace(info, worker=f"fake-{i}", bootstrap=bootstrap) for i in range(99))
    fake = next(each for each in fakes if _first([info, each]) == each.worker)
    orders: list[handoff.ToPrefill] = []

    async def ordered(message: Msg) -> None:
        orders.append(msgspec.msgpack.decode(message.data, type=handoff.ToPrefill))
        if message.reply:
            await message.respond(codec.encode(handoff.Accepted(worker=fake.worker), codec.MSGPACK))

    subscription = await nc.subscribe(f"infer.prefill.tiny.{fake.worker}", cb=ordered)
    announce(stack.fleet.bus, fake)
    await eventually(lambda: stack.fleet.info(fake.worker))
    yield fake.worker, orders
    await nc.publish(f"$KV.INFER_WORKERS.{key(fake)}", b"", headers={OPERATION: DELETE})
    await eventually(lambda: not stack.fleet.info(fake.worker))
    await subscription.unsubscribe()


def announced(stack: EngineFleet, worker: Child) -> WorkerInfo:
    """What a worker tells of itself."""
    info = stack.fleet.info(worker.name)
    assert info is not None
    return info


def _first(workers: list[WorkerInfo]) -> str:
    return Picker(None, lambda: workers).pick(PROMPTS["tokens"]["token_ids"]).worker


async def test_answers_go_on_without_their_prefill_and_one_at_its_address_serves_the_next(
    nc: Client, stack: EngineFleet, undisturbed: Answers
) -> None:
    """The replacement is there at once, as behind a Kubernetes service: sgl-project/sglang#34289."""
    prefill = await stack.prefill()
    here = announced(stack, prefill)
    # It has the same address and is not to be asked yet, so its name makes it the second choice.
    others = (msgspec.structs.replace(here, worker=f"standby-{i}") for i in range(99))
    name = next(other.worker for other in others if _first([here, other]) == prefill.name)
    replacement = await stack.another_prefill(name)
    answer = await Answer.on(nc, "infer.stream.acme.under-way")
    await submit(nc, "under-way", length=LONG)
    await eventually(lambda: len(answer.messages) > 20, within=BOUND)
    # In this order SGLang's heartbeats miss nothing, and its connection to the dead one stays in use.
    await stack.take_over(replacement)
    await kill(prefill)
    stored = await result(nc, "under-way", within=60)
    assert said(stored) == undisturbed["tokens"]
    assert stored.headers["Infer-Attempt"] == "1"
    stored = await result(nc, await submit(nc, "next"), within=60)
    assert said(stored) == undisturbed["tokens"][:SHORT]
    assert int(stored.headers["Infer-Attempt"]) <= 2
    assert stored.headers["Infer-Prefill-Worker"] == replacement.name
    assert await (await request(nc)).ended() == "ok"


async def test_a_prefill_killed_before_it_sent_the_cache_fails_a_request_in_time_and_a_job_waits_for_the_next(
    nc: Client, stack: EngineFleet, undisturbed: Answers
) -> None:
    prefill, [decode] = await stack.prefill(), await stack.decodes()
    computing = scheduler(prefill)
    freeze(computing)
    answer, job = await request(nc), await submit(nc, "lost")
    await handed_off(stack, prefill, 2)
    # The tests that follow need a second one; it starts while this one waits.
    another = asyncio.create_task(stack.decodes(2))
    await stack.address.close()
    await kill(prefill)
    await failed(answer)
    # Without any prefill worker: at once for a live request, and not at all for a job.
    late, later = await request(nc), await submit(nc, "later")
    assert (await failed(late, within=10))["code"] == "prefill_unavailable"
    await asyncio.gather(stack.prefill(), another)
    assert said(await result(nc, job, within=60)) == undisturbed["tokens"][:SHORT]
    assert said(await result(nc, later, within=60)) == undisturbed["tokens"][:SHORT]
    assert await (await request(nc)).ended() == "ok"
    # The engine keeps what a dead peer might still write to for half a minute, and then no longer.
    await stack.idle(decode, within=60)


async def on_one(nc: Client, stack: EngineFleet, decodes: list[Child], name: str) -> tuple[Child, list[str]]:
    """Submits long jobs until one worker answers one of each kind; that worker, and all jobs."""
    jobs: dict[str, Answer] = {}
    started: dict[Child, set[str]] = {worker: set() for worker in decodes}

    def taken() -> bool:
        for worker in decodes:
            started[worker] = {event["job"] for event in stack.fleet.events(worker, "job.started")} & set(
                jobs
            )
        return sum(map(len, started.values())) == len(jobs)

    for i in range(4):
        # Two workers that ask in turn would otherwise each get one kind only.
        for kind in list(PROMPTS)[:: -1 if i % 2 else 1]:
            job = f"{name}-{kind}-{i}"
            jobs[job] = await Answer.on(nc, f"infer.stream.acme.{job}")
            await submit(nc, job, kind, LONG)
        await eventually(taken, what="all jobs are taken")
        for worker, mine in started.items():
            if len({job.split("-")[1] for job in mine}) == len(PROMPTS):
                await eventually(
                    lambda mine=mine: all(len(jobs[job].messages) > 20 for job in mine), within=BOUND
                )
                return worker, list(jobs)
    raise AssertionError("one worker took all jobs of one kind")


async def all_done(nc: Client, jobs: list[str], undisturbed: Answers) -> set[str]:
    """Waits for all results, which are the undisturbed ones; the attempts that it took."""
    attempts = set()
    for job in jobs:
        kind: Kind = "chat" if "-chat-" in job else "tokens"
        stored = await result(nc, job, within=120)
        assert said(stored) == undisturbed[kind]
        attempts.add(stored.headers["Infer-Attempt"])
    return attempts


async def test_jobs_of_a_killed_decode_worker_go_on_in_mid_sentence_on_another(
    nc: Client, stack: EngineFleet, undisturbed: Answers
) -> None:
    prefill, decodes = await stack.prefill(), await stack.decodes(2)
    victim, jobs = await on_one(nc, stack, decodes, "killed")
    await kill(victim)
    assert "2" in await all_done(nc, jobs, undisturbed)
    [other] = await stack.decodes()
    assert stack.fleet.events(other, "job.continued")
    await stack.idle(prefill, other, within=BOUND)


async def test_a_worker_whose_engine_dies_ends_with_it_and_its_jobs_go_on_elsewhere(
    nc: Client, stack: EngineFleet, undisturbed: Answers
) -> None:
    prefill, decodes = await stack.prefill(), await stack.decodes(2)
    victim, jobs = await on_one(nc, stack, decodes, "crashed")
    os.kill(scheduler(victim), signal.SIGKILL)
    async with asyncio.timeout(10):
        assert await victim.wait() == ENGINE_DIED
    await eventually(lambda: not session_members(victim.pid), what="nothing is left of it")
    assert "2" in await all_done(nc, jobs, undisturbed)
    [other] = await stack.decodes()
    await stack.idle(prefill, other, within=BOUND)
