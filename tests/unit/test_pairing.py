"""Two legs of one choice: picking, the hand-off, failures before and after the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack

import msgspec
import pytest

from inferbus.schemas import codec, handoff
from inferbus.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InferbusError,
    Overloaded,
    PrefillFailed,
    PrefillUnavailable,
    TransferFailed,
)
from inferbus.schemas.fleet import Bootstrap, Capacity, Load, Signature, WorkerInfo
from inferbus.workers.engine.interface import Delta, EngineInfo, Finish, Leg
from inferbus.workers.jobs.reply import Served
from inferbus.workers.pairing.handoff import Handoffs
from inferbus.workers.pairing.legs import Paired, generate
from inferbus.workers.pairing.picker import PREFIX_TOKENS, Picker
from tests.support.eventually import eventually

SIGNATURE = Signature(
    model="m",
    dtype="f32",
    kv_dtype="f32",
    page_size=1,
    layers=2,
    kv_heads=2,
    head_dim=8,
    tp=1,
    dp=1,
    pp=1,
    backend="nixl",
)
CAPACITY = Capacity(
    context_length=4096, kv_tokens=4096, page_size=1, max_running=8, max_prefill_tokens=4096, vocabulary=100
)


def prefill_worker(name: str, **changes: object) -> WorkerInfo:
    info = WorkerInfo(
        worker=name,
        role="prefill",
        state="ready",
        model="m",
        kinds=[],
        tokenizer=True,
        engine="scripted",
        version="0",
        host="h",
        started=0.0,
        load=Load(slots=8),
        capacity=CAPACITY,
        signature=SIGNATURE,
        bootstrap=Bootstrap(host="127.0.0.1", port=8998),
    )
    return msgspec.structs.replace(info, **changes)


Answering = Callable[[handoff.Prefill, str], list[handoff.FromPrefill | None]]


def always(answer: handoff.FromPrefill | None) -> Answering:
    """The same answer, whatever is asked of whom; None says that nobody is there."""
    return lambda order, worker: [answer]


class FakeWire:
    """Answers hand-offs as told, and keeps what was sent."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.asked: list[tuple[str, handoff.Prefill]] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()

    def ask(self, worker: WorkerInfo, body: bytes, answers: asyncio.Queue[bytes | None]) -> str:
        order = msgspec.msgpack.decode(body, type=handoff.Prefill)
        self.asked.append((worker.worker, order))
        for answer in self.answer(order, worker.worker):
            answers.put_nowait(None if answer is None else codec.encode(answer, codec.MSGPACK))
        self.open.add(order.rid)
        return order.rid

    def tell(self, worker: WorkerInfo, body: bytes) -> None:
        self.aborted.append(msgspec.msgpack.decode(body, type=handoff.Abort).rid)

    def forget(self, ticket: str) -> None:
        self.open.discard(ticket)


class FakeEngine:
    """Yields two deltas a leg, or fails as told."""

    info = EngineInfo(
        name="fake", model="m", kinds=("tokens",), tokenizer=False, capacity=CAPACITY, signature=SIGNATURE
    )

    def __init__(
        self, *, fail_at: int | None = None, error: InferbusError | None = None, times: int = 99
    ) -> None:
        self.fail_at, self.error, self.times = fail_at, error, times
        self.legs: list[Leg] = []
        self.closed: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def generate(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        self.legs.append(leg)
        try:
            await self.hold.wait()
            for step in range(2):
                if step == self.fail_at and self.error is not None and self.times > 0:
                    self.times -= 1
                    raise self.error
                finish = Finish(reason="length") if step == 1 else None
                meta = {"prompt_tokens": len(leg.token_ids), "cached_tokens": 0}
                yield Delta(index=leg.index, token_ids=[step], text="", finish=finish, meta=meta)
        finally:
            self.closed.append(leg.rid)


class FakePrompt:
    def __init__(self, choices: int = 1) -> None:
        self.token_ids = [1, 2, 3]
        self.choices = choices

    def leg(self, index: int, *, rid: str) -> Leg:
        return Leg(rid=rid, index=index, token_ids=self.token_ids, sampling={"max_new_tokens": 2})


def done(order: handoff.Prefill, worker: str) -> list[handoff.FromPrefill | None]:
    return [handoff.Accepted(worker=worker), handoff.Done(worker=worker, cached_tokens=2, seconds=0.1)]


def paired(engine: FakeEngine, wire: FakeWire, *names: str, timeout: float = 5.0) -> Paired:
    workers = [prefill_worker(name) for name in names or ("p1", "p2", "p3", "p4")]
    handoffs = Handoffs(wire, worker="d1", signature=SIGNATURE, accept_timeout=timeout, timeout=timeout)
    return Paired(engine, Picker(SIGNATURE, lambda: workers), handoffs)  # type: ignore[arg-type]


async def run(pair: Paired, *, choices: int = 1, served: Served | None = None) -> list[Delta]:
    served = served or Served(worker="d1")
    return [delta async for delta in generate(FakePrompt(choices), pair, job="j", served=served)]  # type: ignore[arg-type]


async def test_both_legs_get_the_same_request_and_room_and_the_answer_names_both_workers() -> None:
    engine, wire, served = FakeEngine(), FakeWire(done), Served(worker="d1")
    deltas = await run(paired(engine, wire), served=served)
    [(worker, order)] = wire.asked
    [leg] = engine.legs
    assert leg.rendezvous is not None
    assert (order.rid, order.room, order.token_ids) == (leg.rid, leg.rendezvous.room, leg.token_ids)
    assert 0 < order.room < 2**63
    assert served.prefill == worker
    assert [delta.token_ids for delta in deltas] == [[0], [1]]
    assert not wire.open
    assert not wire.aborted


async def test_cached_tokens_are_what_prefill_says() -> None:
    deltas = await run(paired(FakeEngine(), FakeWire(done)))
    assert {delta.meta["cached_tokens"] for delta in deltas} == {2}


async def test_three_choices_get_three_rooms_and_three_ids_of_one_length() -> None:
    engine, wire = FakeEngine(), FakeWire(done)
    deltas = await run(paired(engine, wire), choices=3)
    assert sorted(delta.index for delta in deltas) == [0, 0, 1, 1, 2, 2]
    assert len({order.room for _, order in wire.asked}) == 3
    rids = {leg.rid for leg in engine.legs}
    assert len(rids) == 3
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize(
    "refusal",
    [
        lambda order, worker: [handoff.Refused(worker=worker, error=Overloaded("full").body())],
        lambda order, worker: [
            handoff.Accepted(worker=worker),
            handoff.Failed(worker=worker, error=EngineFailed("cuda").body()),
        ],
        lambda order, worker: [None],
    ],
    ids=["refused-c5", "failed", "gone"],
)
async def test_another_prefill_worker_is_tried_when_one_fails_before_the_first_token(
    refusal: Answering,
) -> None:
    bad: set[str] = set()

    def answer(order: handoff.Prefill, worker: str) -> list[handoff.FromPrefill | None]:
        if not bad:
            bad.add(worker)
            return refusal(order, worker)
        return done(order, worker)

    engine, wire = FakeEngine(), FakeWire(answer)
    engine.hold.clear()
    pair = paired(engine, wire)
    running = asyncio.create_task(run(pair))
    async with asyncio.timeout(5):
        await eventually(lambda: len(wire.asked) == 2)
        engine.hold.set()
        deltas = await running
    assert len(deltas) == 2
    first, second = wire.asked
    assert first[0] != second[0]
    assert first[1].rid != second[1].rid
    assert first[1].room != second[1].room
    assert sorted(engine.closed) == sorted(leg.rid for leg in engine.legs)


async def test_a_decode_result_is_not_trusted_while_prefill_has_not_said_that_it_succeeded() -> None:
    def failed_later(order: handoff.Prefill, worker: str) -> list[handoff.FromPrefill | None]:
        return [
            handoff.Accepted(worker=worker),
            handoff.Failed(worker=worker, error=PrefillFailed("no").body()),
        ]

    with pytest.raises(PrefillFailed) as caught:
        await run(paired(FakeEngine(), FakeWire(failed_later)))
    assert "p" in caught.value.message


async def test_a_transfer_that_failed_is_tried_on_another_prefill_worker() -> None:
    engine, wire = FakeEngine(fail_at=0, error=TransferFailed("lost"), times=1), FakeWire(done)
    assert len(await run(paired(engine, wire))) == 2
    assert len(wire.asked) == 2


async def test_a_transfer_that_failed_names_the_prefill_worker() -> None:
    engine = FakeEngine(fail_at=0, error=TransferFailed("lost"))
    wire = FakeWire(lambda order, worker: [handoff.Accepted(worker=worker)])
    with pytest.raises(TransferFailed, match="prefill worker p1: lost"):
        await run(paired(engine, wire, "p1"))


async def test_a_worker_that_nobody_answers_for_is_lost_and_one_that_fails_is_not() -> None:
    lost: list[str] = []
    for answer in (None, handoff.Failed(worker="p1", error=PrefillFailed("no").body())):
        handoffs = Handoffs(
            FakeWire(always(answer)),
            worker="d1",
            signature=SIGNATURE,
            accept_timeout=5.0,
            timeout=5.0,
            lost=lambda info: lost.append(info.worker),
        )
        picker = Picker(SIGNATURE, lambda: [prefill_worker("p1")])
        with pytest.raises(InferbusError):
            await run(Paired(FakeEngine(), picker, handoffs))  # type: ignore[arg-type]
    assert lost == ["p1"]


async def test_a_failure_after_the_first_token_is_not_retried_here() -> None:
    engine, wire = FakeEngine(fail_at=1, error=TransferFailed("lost")), FakeWire(done)
    with pytest.raises(TransferFailed):
        await run(paired(engine, wire))
    assert len(wire.asked) == 1


async def test_a_leg_gives_up_after_three_prefill_workers() -> None:
    wire = FakeWire(lambda order, worker: [None])
    with pytest.raises(PrefillUnavailable):
        await run(paired(FakeEngine(), wire))
    assert len({worker for worker, _ in wire.asked}) == 3


async def test_the_callers_mistake_found_by_prefill_is_not_retried() -> None:
    error = ContextLengthExceeded("too long").body()
    wire = FakeWire(lambda order, worker: [handoff.Refused(worker=worker, error=error)])
    engine = FakeEngine()
    engine.hold.clear()
    with pytest.raises(ContextLengthExceeded):
        await run(paired(engine, wire))
    assert len(wire.asked) == 1


async def test_prefill_that_never_finishes_is_given_up_and_aborted() -> None:
    wire = FakeWire(lambda order, worker: [handoff.Accepted(worker=worker)])
    engine = FakeEngine()
    engine.hold.clear()
    with pytest.raises(PrefillFailed):
        await run(paired(engine, wire, "p1", timeout=0.02))


async def test_leaving_early_aborts_both_legs() -> None:
    engine = FakeEngine()
    engine.hold.clear()
    wire = FakeWire(lambda order, worker: [handoff.Accepted(worker=worker)])
    running = asyncio.create_task(run(paired(engine, wire)))
    await eventually(lambda: bool(engine.legs))
    running.cancel()
    await asyncio.wait([running])
    assert wire.aborted == [engine.legs[0].rid]
    assert engine.closed == [engine.legs[0].rid]
    assert not wire.open


def test_a_worker_with_another_signature_is_never_picked_and_the_reason_says_so() -> None:
    other = msgspec.structs.replace(SIGNATURE, tp=4)
    picker = Picker(SIGNATURE, lambda: [prefill_worker("p1", signature=other)])
    with pytest.raises(PrefillUnavailable, match="1 with another signature"):
        picker.pick([1])


def test_a_picker_says_why_no_prompt_has_a_worker() -> None:
    other = msgspec.structs.replace(SIGNATURE, tp=4)
    workers: list[WorkerInfo] = []
    picker = Picker(SIGNATURE, lambda: workers)
    assert picker.unavailable_reason == "no prefill worker: 0 ready, 0 with another signature"
    workers += [prefill_worker("p1", signature=other), prefill_worker("p2", state="draining")]
    assert picker.unavailable_reason == "no prefill worker: 1 ready, 1 with another signature"
    workers.append(prefill_worker("p3"))
    assert picker.unavailable_reason is None


def test_a_draining_worker_is_never_picked() -> None:
    with pytest.raises(PrefillUnavailable):
        Picker(SIGNATURE, lambda: [prefill_worker("p1", state="draining")]).pick([1])


def test_a_prompt_larger_than_every_kv_cache_is_refused() -> None:
    with pytest.raises(PrefillUnavailable, match="KV cache"):
        Picker(SIGNATURE, lambda: [prefill_worker("p1")]).pick([1] * 5000)


def test_equal_prefixes_meet_the_same_worker_and_others_spread() -> None:
    workers = [prefill_worker(f"p{i}") for i in range(8)]
    picker = Picker(SIGNATURE, lambda: workers)
    prefix = list(range(PREFIX_TOKENS))
    assert len({picker.pick([*prefix, tail]).worker for tail in range(20)}) == 1
    assert len({picker.pick([first]).worker for first in range(100)}) == 8


def test_few_prefixes_move_when_a_worker_leaves() -> None:
    workers = [prefill_worker(f"p{i}") for i in range(8)]
    before = {first: Picker(SIGNATURE, lambda: workers).pick([first]).worker for first in range(200)}
    left = workers[:-1]
    after = {first: Picker(SIGNATURE, lambda: left).pick([first]).worker for first in range(200)}
    assert all(after[first] == worker for first, worker in before.items() if worker != "p7")


def test_one_hot_prefix_does_not_swamp_its_worker() -> None:
    workers = [prefill_worker(f"p{i}") for i in range(4)]
    picker = Picker(SIGNATURE, lambda: workers)
    counts: dict[str, int] = {}
    with ExitStack() as held:
        for _ in range(40):
            worker = picker.pick([1, 2, 3]).worker
            held.enter_context(picker.using(worker))
            counts[worker] = counts.get(worker, 0) + 1
    assert max(counts.values()) <= 13
    assert len(counts) == 4
