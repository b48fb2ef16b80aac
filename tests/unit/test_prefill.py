"""The prefill program: what an abort leaves behind, whenever it comes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas import codec, handoff
from schemas.subjects import Subjects
from tests.support.eventually import eventually
from workers.bus.message import Message
from workers.engine.scripted import Rule, Script, ScriptedEngine
from workers.roles.prefill import Prefill
from workers.roles.slots import Slots

RID = "0123456789abcdef" * 2


class _Bus:
    """Takes what a worker says."""

    subjects = Subjects()

    def __init__(self) -> None:
        self.said: list[handoff.FromPrefill] = []

    async def subscribe(self, subject: str, callback: Any) -> None:
        self.deliver = callback

    def send(self, subject: str, data: bytes) -> None:
        self.said.append(msgspec.msgpack.decode(data, type=handoff.FromPrefill))


@pytest.mark.parametrize("between", ["nothing", "a moment"])
async def test_an_aborted_hand_off_frees_its_slot_even_if_it_had_not_begun(between: str) -> None:
    """Both messages in one read from the socket: the task is cancelled before its first step."""
    engine = ScriptedEngine(Script(rules=[Rule(first_delay=60.0)]), role="prefill")
    bus, slots = _Bus(), Slots(1, live_share=1.0)
    prefill = Prefill(bus, engine, slots, worker="w", replies=("_INBOX.",))  # type: ignore[arg-type]
    await prefill.start()
    signature = engine.info.signature
    assert signature is not None
    order = handoff.Prefill(
        rid=RID,
        room=1,
        token_ids=[1],
        sampling={},
        options={},
        worker="d",
        job="j",
        signature=signature,
        timeout=20.0,
    )
    bus.deliver(Message("s", codec.encode(order, codec.MSGPACK), {}, "_INBOX.x"))
    assert slots.busy == 1
    if between == "a moment":
        await eventually(lambda: engine.running == 1)
    bus.deliver(Message("s", codec.encode(handoff.Abort(rid=RID), codec.MSGPACK), {}, ""))
    await eventually(lambda: slots.busy == engine.running == 0)
    assert isinstance(bus.said[0], handoff.Accepted)
