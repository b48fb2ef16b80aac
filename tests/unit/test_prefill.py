"""The prefill program: what an abort leaves behind, whenever it comes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import structlog

from inferbus.schemas import codec, handoff
from inferbus.schemas.subjects import Subjects
from inferbus.workers.admission import BATCH, LIVE, Admission, Budget, ServiceClass, engine_priority
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.engine.scripted import Rule, Script, ScriptedEngine
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.roles import endpoints
from inferbus.workers.roles.prefill import PrefillProgram
from tests.support import admitting
from tests.support.eventually import eventually

RID = "0123456789abcdef" * 2
SETTINGS = JobSettings(worker="w", subjects=Subjects())
ENDPOINTS = endpoints.of_prefill(SETTINGS.subjects, "scripted", SETTINGS.worker)


class _Bus:
    """Takes what a worker says."""

    subjects = Subjects()

    def __init__(self) -> None:
        self.said: list[handoff.FromPrefill] = []
        self.told: dict[str, list[str]] = {}

    async def subscribe(self, subject: str, callback: Any) -> None:
        self.deliver = callback

    def send(self, subject: str, data: bytes) -> None:
        answer = msgspec.msgpack.decode(data, type=handoff.FromPrefill)
        self.said.append(answer)
        self.told.setdefault(subject.removeprefix("_INBOX."), []).append(type(answer).__name__)


def order_for(engine: ScriptedEngine, rid: str = RID, *, service_class: ServiceClass = LIVE) -> Message:
    """A hand-off of a prompt of one token."""
    signature = engine.info.signature
    assert signature is not None
    order = handoff.Prefill(
        rid=rid,
        room=1,
        token_ids=[1],
        sampling={},
        options={"priority": engine_priority(service_class, None)},
        worker="d",
        job="j",
        signature=signature,
        timeout=20.0,
    )
    return Message("s", codec.encode(order, codec.MSGPACK), {}, f"_INBOX.{rid}")


async def test_a_hand_off_that_is_done_tells_and_logs_what_its_transfer_took() -> None:
    transfer = handoff.Transfer(seconds=0.012, bytes=163_840)
    engine = ScriptedEngine(Script(rules=[Rule(transfer=transfer)]), role="prefill")
    bus = _Bus()
    prefill = PrefillProgram(bus, engine, admitting.slots(1), SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    with structlog.testing.capture_logs() as events:
        bus.deliver(order_for(engine))
        await eventually(lambda: len(bus.said) == 2)
    done = bus.said[1]
    assert isinstance(done, handoff.Done)
    assert done.transfer == transfer
    [event] = [each for each in events if each["event"] == "handoff.done"]
    assert (event["transfer_seconds"], event["transfer_bytes"]) == (0.012, 163_840)
    assert event["seconds"] == done.seconds


async def test_a_hand_off_whose_transfer_is_not_known_is_done_without_figures() -> None:
    engine, bus = ScriptedEngine(role="prefill"), _Bus()
    prefill = PrefillProgram(bus, engine, admitting.slots(1), SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    with structlog.testing.capture_logs() as events:
        bus.deliver(order_for(engine))
        await eventually(lambda: len(bus.said) == 2)
    assert isinstance(bus.said[1], handoff.Done)
    assert bus.said[1].transfer is None
    [event] = [each for each in events if each["event"] == "handoff.done"]
    assert not any(name.startswith("transfer") for name in event)


async def test_a_prompt_beyond_the_window_waits_and_says_so_and_live_ones_overtake_it() -> None:
    engine = ScriptedEngine(Script(rules=[Rule(first_delay=60.0)]), role="prefill")
    budget = Budget(slots=9, kv_tokens=1000, window=1, staged=0, live_share=0.0)
    bus = _Bus()
    prefill = PrefillProgram(bus, engine, Admission(budget), SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    first, job, live = (name * 32 for name in "abc")
    for rid in (first, job):
        bus.deliver(order_for(engine, rid, service_class=BATCH))
    await eventually(lambda: bus.told == {first: ["Accepted"], job: ["Queued"]})
    bus.deliver(order_for(engine, live))
    await eventually(lambda: bus.told.get(live) == ["Accepted"])
    for rid in (first, live):
        assert bus.told[job] == ["Queued"]
        bus.deliver(Message("s", codec.encode(handoff.Abort(rid=rid), codec.MSGPACK), {}, ""))
        await eventually(lambda rid=rid: bus.told[rid] == ["Accepted", "Failed"])
    await eventually(lambda: bus.told[job] == ["Queued", "Accepted"])
    bus.deliver(Message("s", codec.encode(handoff.Abort(rid=job), codec.MSGPACK), {}, ""))
    await eventually(lambda: not engine.running)


@pytest.mark.parametrize("between", ["nothing", "a moment"])
async def test_an_aborted_hand_off_frees_its_slot_even_if_it_had_not_begun(between: str) -> None:
    """Both messages in one read from the socket: the task is cancelled before its first step."""
    engine = ScriptedEngine(Script(rules=[Rule(first_delay=60.0)]), role="prefill")
    bus, slots = _Bus(), admitting.slots(1)
    prefill = PrefillProgram(bus, engine, slots, SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    bus.deliver(order_for(engine))
    assert slots.busy == 1
    if between == "a moment":
        await eventually(lambda: engine.running == 1)
    bus.deliver(Message("s", codec.encode(handoff.Abort(rid=RID), codec.MSGPACK), {}, ""))
    await eventually(lambda: slots.busy == engine.running == 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 50_000,
        codec.encode({"type": "prefill"}, codec.MSGPACK),
        codec.encode({"type": "abort", "rid": "\x00"}, codec.MSGPACK),
        b"\x82\xa4type\xa5abort\xa3rid\xa2\xff\xfe",
        b"\x82\xa4type\xa5abort\xa3rid\xcf" + b"\xff" * 8,
    ],
    ids=["empty", "no-type", "deep", "without-fields", "bad-id", "not-utf-8", "number"],
)
async def test_a_hand_off_that_cannot_be_read_costs_no_slot(data: bytes) -> None:
    engine, bus, slots = ScriptedEngine(role="prefill"), _Bus(), admitting.slots(1)
    prefill = PrefillProgram(bus, engine, slots, SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    bus.deliver(Message("s", data, {}, "_INBOX.x"))
    bus.deliver(order_for(engine))
    await eventually(lambda: len(bus.said) == 2)
    assert isinstance(bus.said[1], handoff.Done)


async def test_a_hand_off_whose_engine_fails_in_every_way_frees_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine whose abort fails as well: the slot must not depend on it."""

    def broken(*_: object) -> None:
        raise KeyError("defect")

    engine, bus, slots = ScriptedEngine(role="prefill"), _Bus(), admitting.slots(1)
    monkeypatch.setattr(engine, "generate", broken)
    monkeypatch.setattr(engine, "abort", broken)
    prefill = PrefillProgram(bus, engine, slots, SETTINGS, ENDPOINTS)  # type: ignore[arg-type]
    await prefill.start()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for rid in ("a" * 32, "b" * 32):
        bus.deliver(order_for(engine, rid))
        await eventually(lambda rid=rid: bus.told.get(rid) == ["Accepted", "Failed"])
        await eventually(lambda: not slots.full)
