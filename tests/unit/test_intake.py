"""Live requests: what their callers hear, whatever happens to them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from inferbus.schemas import headers
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection.message import Callback, Message
from inferbus.workers.bus.connection.subscription import Subscription
from inferbus.workers.jobs.runner import AttemptRunner, Work
from inferbus.workers.jobs.settings import JobSettings
from inferbus.workers.roles.intake import LiveIntake, Tasks
from tests.support import admitting
from tests.support.memory import BoundedBroker

SETTINGS = JobSettings(worker="w1", subjects=Subjects())
INBOX = "_INBOX.caller.1"


async def heard(
    subject: str, body: bytes, work: Callable[[Work], Awaitable[bytes]]
) -> tuple[list[bytes], str | None]:
    """What the caller of a live request is sent: bodies, and the status of the end mark."""
    broker, tasks, slots = BoundedBroker(), Tasks(), admitting.slots(1)
    callbacks: list[Callback] = []

    async def subscribe(callback: Callback) -> Subscription:
        callbacks.append(callback)
        return cast(Subscription, None)

    intake = LiveIntake(subscribe, AttemptRunner(broker, work, SETTINGS), tasks, slots, SETTINGS)
    await intake.join()
    callbacks[0](Message(subject, body, {}, INBOX))
    await tasks.settled()
    assert not slots.full
    assert {message.subject for message in broker.sent} <= {INBOX}
    *said, end = broker.sent
    return [message.data for message in said], end.headers.get(headers.STATUS)


async def whole(work: Work) -> bytes:
    return b'{"choices":[]}'


async def enormous(work: Work) -> bytes:
    return b"x" * 20_000


async def defective(work: Work) -> bytes:
    raise KeyError("defect")


async def unsendable(work: Work) -> bytes:
    return cast(bytes, None)


async def test_a_live_request_of_an_unknown_kind_is_answered() -> None:
    [answer], status = await heard("infer.request.m.images", b"{}", whole)
    assert json.loads(answer)["error"]["code"] == "invalid_subject"
    assert status == "error"


async def test_a_whole_answer_over_the_servers_limit_is_an_error_that_says_what_to_do() -> None:
    [answer], status = await heard("infer.request.m.tokens", b'{"token_ids":[1],"stream":false}', enormous)
    error = json.loads(answer)["error"]
    assert error["code"] == "payload_too_large"
    assert "20000 bytes" in error["message"]
    assert "stream" in error["message"]
    assert status == "error"


@pytest.mark.parametrize("work", [defective, unsendable])
async def test_a_caller_hears_of_a_defect_wherever_it_is(work: Callable[[Work], Awaitable[bytes]]) -> None:
    [answer], status = await heard("infer.request.m.tokens", b'{"token_ids":[1],"stream":false}', work)
    assert json.loads(answer)["error"]["code"] == "internal_error"
    assert status == "error"
