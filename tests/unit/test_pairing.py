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
from inferbus.workers.pairing.handoff import Handoffs
from inferbus.workers.pairing.legs import Paired, RunLeg, RunningLeg, generate
from inferbus.workers.pairing.picker import PREFIX_TOKENS, Picker
from tests.support.eventually import eventually
from tests.support.virtual import in_virtual_time

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


class FakeTransport:
    """Answers hand-offs as told, and keeps what was sent."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.asked: list[tuple[str, handoff.Prefill]] = []
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.answers: dict[str, asyncio.Queue[bytes | None]] = {}

    def tell(self, rid: str, answer: handoff.FromPrefill | None) -> None:
        self.answers[rid].put_nowait(None if answer is None else codec.encode(answer, codec.MSGPACK))

    def request(self, worker: WorkerInfo, body: bytes, answers: asyncio.Queue[bytes | None]) -> str:
        order = msgspec.msgpack.decode(body, type=handoff.Prefill)
        self.asked.append((worker.worker, order))
        self.answers[order.rid] = answers
        for answer in self.answer(order, worker.worker):
            self.tell(order.rid, answer)
        self.open.add(order.rid)
        return order.rid

    def send(self, worker: WorkerInfo, body: bytes) -> None:
        self.aborted.append(msgspec.msgpack.decode(body, type=handoff.Abort).rid)

    def close(self, ticket: str) -> None:
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
                yield Delta(index=leg.index, token_ids=[step], text="", finish=finish, cached_tokens=0)
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


def paired(engine: FakeEngine, transport: FakeTransport, *names: str, timeout: float = 5.0) -> Paired:
    workers = [prefill_worker(name) for name in names or ("p1", "p2", "p3", "p4")]
    handoffs = Handoffs(transport, worker="d1", signature=SIGNATURE, accept_timeout=timeout, timeout=timeout)
    return Paired(engine, Picker(SIGNATURE, lambda: workers), handoffs)  # type: ignore[arg-type]


async def run(pair: RunLeg, *, choices: int = 1, ran: list[RunningLeg] | None = None) -> list[Delta]:
    async def deltas(leg: Leg) -> AsyncGenerator[Delta, None]:
        async with pair(leg, "j") as running:
            if ran is not None:
                ran.append(running)
            assert running.first is not None
            yield running.first
            async for delta in running.deltas:
                yield delta

    return [delta async for delta in generate(FakePrompt(choices), deltas)]  # type: ignore[arg-type]


async def test_both_legs_get_the_same_request_and_room_and_the_answer_names_both_workers() -> None:
    engine, transport, ran = FakeEngine(), FakeTransport(done), list[RunningLeg]()
    deltas = await run(paired(engine, transport), ran=ran)
    [(worker, order)] = transport.asked
    [leg] = engine.legs
    assert leg.rendezvous is not None
    assert (order.rid, order.room, order.token_ids) == (leg.rid, leg.rendezvous.room, leg.token_ids)
    assert 0 < order.room < 2**63
    assert [running.prefill for running in ran] == [worker]
    assert [delta.token_ids for delta in deltas] == [[0], [1]]
    assert not transport.open
    assert not transport.aborted


async def test_cached_tokens_are_what_prefill_says() -> None:
    ran: list[RunningLeg] = []
    await run(paired(FakeEngine(), FakeTransport(done)), ran=ran)
    assert [running.cached_tokens for running in ran] == [2]


async def test_choice_0_comes_first_however_late_it_is() -> None:
    """openai's own stream helper fails otherwise."""
    others = asyncio.Event()

    async def deltas(leg: Leg) -> AsyncGenerator[Delta, None]:
        if leg.index == 0:
            await others.wait()
        elif leg.index == 3:
            others.set()
        for step in range(4):
            finish = Finish(reason="length") if step == 3 else None
            yield Delta(index=leg.index, token_ids=[step], text="", finish=finish)

    found = [delta async for delta in generate(FakePrompt(4), deltas)]  # type: ignore[arg-type]
    assert found[0].index == 0
    for index in range(4):
        assert [delta.token_ids for delta in found if delta.index == index] == [[0], [1], [2], [3]]


async def test_three_choices_get_three_rooms_and_three_ids_of_one_length() -> None:
    engine, transport = FakeEngine(), FakeTransport(done)
    deltas = await run(paired(engine, transport), choices=3)
    assert sorted(delta.index for delta in deltas) == [0, 0, 1, 1, 2, 2]
    assert len({order.room for _, order in transport.asked}) == 3
    rids = {leg.rid for leg in engine.legs}
    assert len(rids) == 3
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize(
    ("defect", "seen"), [(KeyError("a defect"), KeyError), (asyncio.CancelledError(), EngineFailed)]
)
async def test_whatever_ends_one_of_several_legs_ends_the_request(
    defect: BaseException, seen: type[Exception]
) -> None:
    """It hung for ever, and held its slot, where that was no error of ours."""
    closed: list[int] = []

    async def deltas(leg: Leg) -> AsyncGenerator[Delta, None]:
        try:
            yield Delta(index=leg.index, token_ids=[1], text="", finish=None)
            if leg.index == 1:
                raise defect
            await asyncio.Event().wait()
        finally:
            closed.append(leg.index)

    async with asyncio.timeout(5):
        with pytest.raises(seen):
            async for _ in generate(FakePrompt(3), deltas):  # type: ignore[arg-type]
                pass
    assert sorted(closed) == [0, 1, 2]


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

    engine, transport = FakeEngine(), FakeTransport(answer)
    engine.hold.clear()
    pair = paired(engine, transport)
    running = asyncio.create_task(run(pair))
    async with asyncio.timeout(5):
        await eventually(lambda: len(transport.asked) == 2)
        engine.hold.set()
        deltas = await running
    assert len(deltas) == 2
    first, second = transport.asked
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
        await run(paired(FakeEngine(), FakeTransport(failed_later)))
    assert "p" in caught.value.message


async def test_a_transfer_that_failed_is_tried_on_another_prefill_worker() -> None:
    engine, transport = FakeEngine(fail_at=0, error=TransferFailed("lost"), times=1), FakeTransport(done)
    assert len(await run(paired(engine, transport))) == 2
    assert len(transport.asked) == 2


async def test_a_transfer_that_failed_names_the_prefill_worker() -> None:
    engine = FakeEngine(fail_at=0, error=TransferFailed("lost"))
    transport = FakeTransport(lambda order, worker: [handoff.Accepted(worker=worker)])
    with pytest.raises(TransferFailed, match="prefill worker p1: lost"):
        await run(paired(engine, transport, "p1"))


async def test_a_worker_that_nobody_answers_for_is_lost_and_one_that_fails_is_not() -> None:
    lost: list[str] = []
    for answer in (None, handoff.Failed(worker="p1", error=PrefillFailed("no").body())):
        handoffs = Handoffs(
            FakeTransport(always(answer)),
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
    engine, transport = FakeEngine(fail_at=1, error=TransferFailed("lost")), FakeTransport(done)
    with pytest.raises(TransferFailed):
        await run(paired(engine, transport))
    assert len(transport.asked) == 1


async def test_a_leg_gives_up_after_three_prefill_workers() -> None:
    transport = FakeTransport(lambda order, worker: [None])
    with pytest.raises(PrefillUnavailable):
        await run(paired(FakeEngine(), transport))
    assert len({worker for worker, _ in transport.asked}) == 3


async def test_the_callers_mistake_found_by_prefill_is_not_retried() -> None:
    error = ContextLengthExceeded("too long").body()
    transport = FakeTransport(lambda order, worker: [handoff.Refused(worker=worker, error=error)])
    engine = FakeEngine()
    engine.hold.clear()
    with pytest.raises(ContextLengthExceeded):
        await run(paired(engine, transport))
    assert len(transport.asked) == 1


async def test_prefill_that_never_finishes_is_given_up_and_aborted() -> None:
    transport = FakeTransport(lambda order, worker: [handoff.Accepted(worker=worker)])
    engine = FakeEngine()
    engine.hold.clear()
    with pytest.raises(PrefillFailed):
        await run(paired(engine, transport, "p1", timeout=0.02))


def test_a_hand_off_that_waits_at_prefill_does_not_time_out_and_holds_nothing_at_decode() -> None:
    async def program() -> None:
        engine, transport = FakeEngine(), FakeTransport(always(handoff.Queued(worker="p1")))
        running = asyncio.create_task(run(paired(engine, transport, "p1")))
        for _ in range(100):
            await asyncio.sleep(handoff.QUEUED_EVERY)
            [(_, order)] = transport.asked
            transport.tell(order.rid, handoff.Queued(worker="p1"))
        assert not engine.legs
        for answer in done(order, "p1"):
            transport.tell(order.rid, answer)
        assert [delta.token_ids for delta in await running] == [[0], [1]]

    assert in_virtual_time(program()) >= 100 * handoff.QUEUED_EVERY


def test_a_hand_off_whose_prefill_falls_silent_while_it_waits_is_tried_elsewhere() -> None:
    async def program() -> None:
        def answer(order: handoff.Prefill, worker: str) -> list[handoff.FromPrefill | None]:
            return done(order, worker) if len(transport.asked) > 1 else [handoff.Queued(worker=worker)]

        transport = FakeTransport(answer)
        assert len(await run(paired(FakeEngine(), transport, "p1", "p2"))) == 2
        first, second = (worker for worker, _ in transport.asked)
        assert first != second

    in_virtual_time(program())


async def test_leaving_early_aborts_both_legs() -> None:
    engine = FakeEngine()
    engine.hold.clear()
    transport = FakeTransport(lambda order, worker: [handoff.Accepted(worker=worker)])
    running = asyncio.create_task(run(paired(engine, transport)))
    await eventually(lambda: bool(engine.legs))
    running.cancel()
    await asyncio.wait([running])
    assert transport.aborted == [engine.legs[0].rid]
    assert engine.closed == [engine.legs[0].rid]
    assert not transport.open


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


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", b"\x91" * 50_000, b"\x82\xa4type\xa8accepted\xa6worker\xa2\xff\xfe", b"\x80", b"\x01"],
    ids=["empty", "no-type", "deep", "not-utf-8", "no-fields", "number"],
)
async def test_an_answer_to_a_hand_off_that_cannot_be_read_ends_it_and_another_worker_is_tried(
    answer: bytes,
) -> None:
    transport = FakeTransport(lambda order, worker: done(order, worker) if len(transport.asked) > 1 else [])
    engine = FakeEngine()
    waiting = asyncio.create_task(run(paired(engine, transport, "p1", "p2")))
    await eventually(lambda: bool(transport.asked))
    transport.answers[transport.asked[0][1].rid].put_nowait(answer)
    await waiting
    assert len({worker for worker, _ in transport.asked}) == 2
    assert not transport.open
