"""Bundles on the worker's side, over a broker in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from inferbus.schemas import headers
from inferbus.schemas.bundles import CONTENT_TYPE, BundleAnswer
from inferbus.schemas.errors import BusUnavailable, EngineFailed, InferbusError, InvalidRequest
from inferbus.schemas.subjects import Subjects
from inferbus.workers.admission import Permit
from inferbus.workers.bus.interface import Stored
from inferbus.workers.jobs import bundle
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.runner import AttemptRunner, Work
from inferbus.workers.jobs.settings import JobSettings
from tests.support.eventually import eventually
from tests.support.memory import MemoryBroker, MemoryDelivery

SUBJECTS = Subjects()
RESULT = SUBJECTS.result("acme", "b1")


class Places:
    """Gives so many permits, and then is draining."""

    def __init__(self, permits: int = 1000) -> None:
        self.left = permits

    @contextmanager
    def feeding(self) -> Iterator[None]:
        yield

    async def take(self) -> Permit | None:
        self.left -= 1
        return Permit() if self.left >= 0 else None


class Bench:
    """One worker's delivery code; a request's answer is its first token, or the error of that token."""

    def __init__(self, errors: dict[int, InferbusError] | None = None) -> None:
        self.broker = MemoryBroker()
        self.started: list[int] = []
        self.block: set[int] = set()

        async def generate(work: Work) -> bytes:
            token = work.request.token_ids[0]  # type: ignore[union-attr]
            self.started.append(token)
            assert not work.attempt.streams(work.request)
            if token in self.block:
                await asyncio.Event().wait()
            if errors and token in errors:
                raise errors[token]
            return b'{"token":%d}' % token

        settings = JobSettings(worker="w1", subjects=SUBJECTS)
        runner = AttemptRunner(self.broker, generate, settings, now=self.broker.now)
        self.cancels = Cancels(self.broker, runner.scopes, SUBJECTS)
        self.deliveries = Deliveries(self.broker, runner, self.cancels, settings)

    def bundle(self, tokens: list[int], *, attempt: int = 1) -> MemoryDelivery:
        items = [{"id": n, "body": {"token_ids": [token], "stream": True}} for n, token in enumerate(tokens)]
        fields = {headers.JOB_ID: "b1", headers.CONTENT_TYPE: CONTENT_TYPE, headers.REPLY_TO: "_INBOX.me.b1"}
        message = Stored(
            subject=SUBJECTS.job("m", "batch", "acme", "tokens"),
            data=json.dumps({"items": items}).encode(),
            headers=fields,
            sequence=7,
            time=self.broker.now(),
        )
        return MemoryDelivery(message, attempt)

    async def handle(self, delivery: MemoryDelivery, places: Places | None = None) -> dict[str, Any]:
        await self.deliveries.handle_bundle(delivery, places or Places())
        assert delivery.ended == [("ack", None)]
        (stored,) = [each for each in self.broker.streams["INFER_RESULTS"] if each.subject == RESULT]
        assert stored.headers[headers.CONTENT_TYPE] == CONTENT_TYPE
        msgspec.json.decode(stored.data, type=BundleAnswer)
        found: dict[str, Any] = json.loads(stored.data)
        return found


async def test_every_request_has_its_answer_or_its_callers_error() -> None:
    bench = Bench({11: InvalidRequest("no")})
    result = await bench.handle(bench.bundle([10, 11, 12]))
    assert {each["id"]: each["answer"]["token"] for each in result["answers"]} == {0: 10, 2: 12}
    assert {each["id"]: each["error"]["code"] for each in result["errors"]} == {1: "invalid_request"}
    assert [each.subject for each in bench.broker.sent] == ["_INBOX.me.b1"]


async def test_a_request_that_failed_is_left_to_its_submitter() -> None:
    bench = Bench({11: EngineFailed("out of luck")})
    result = await bench.handle(bench.bundle([10, 11]))
    assert [each["id"] for each in result["answers"]] == [0]
    assert "unstarted" not in result


async def test_a_bundle_whose_worker_died_runs_nothing_again() -> None:
    bench = Bench()
    delivery = bench.bundle([10, 11], attempt=2)
    count = SUBJECTS.attempts("acme", "b1", delivery.message.sequence)
    await bench.broker.store(count, b"", {headers.BEGUN: "1", headers.ATTEMPT: "1"})
    result = await bench.handle(delivery)
    assert (result["answers"], result["attempt"], bench.started) == ([], 2, [])
    assert result["died"]


async def test_a_bundle_that_was_put_back_before_it_began_is_run() -> None:
    bench = Bench()
    result = await bench.handle(bench.bundle([10, 11], attempt=5))
    assert len(result["answers"]) == 2
    assert "died" not in result, "a line of it that fails is no suspect"


async def test_a_draining_worker_answers_what_it_has_begun_and_names_the_rest() -> None:
    bench = Bench()
    result = await bench.handle(bench.bundle([10, 11, 12]), Places(2))
    assert ([each["id"] for each in result["answers"]], result["unstarted"]) == ([0, 1], [2])


async def test_a_cancel_ends_what_runs_and_keeps_what_is_done() -> None:
    bench = Bench()
    bench.block = {11}
    delivery = bench.bundle([10, 11])
    handling = asyncio.create_task(bench.handle(delivery))
    await eventually(lambda: len(bench.started) == 2)
    bench.cancels.arrived(SUBJECTS.cancel("acme", "b1"), {})
    result = await handling
    assert {each["id"]: each["answer"]["token"] for each in result["answers"]} == {0: 10}
    assert {each["id"]: each["error"]["code"] for each in result["errors"]} == {1: "cancelled"}


async def test_answers_that_do_not_fit_into_a_message_are_left_to_the_submitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.broker, "max_payload", 4096 + 200)
    result = await bench.handle(bench.bundle([10, 11, 12, 13]))
    assert 0 < len(result["answers"]) < 4


async def test_a_bundle_whose_result_is_stored_is_only_acknowledged() -> None:
    bench = Bench()
    await bench.handle(bench.bundle([10]))
    again = bench.bundle([10], attempt=2)
    await bench.handle(again)
    assert bench.started == [10]


async def test_a_worker_that_is_killed_just_as_a_bundle_ends_leaves_no_count() -> None:
    bench = Bench()
    delivery = bench.bundle([10])
    bench.broker.purged = BusUnavailable("away")
    await bench.deliveries.handle_bundle(delivery, Places())
    assert delivery.ended == [], "a job that is acknowledged does not come again"
    bench.broker.purged = None
    await bench.handle(bench.bundle([10], attempt=2))
    assert bench.started == [10]
    assert [each.subject for each in bench.broker.streams["INFER_RESULTS"]] == [RESULT]


async def test_an_unreadable_bundle_answers_nothing_and_stops_nobody() -> None:
    bench = Bench()
    delivery = bench.bundle([])
    broken = Stored(
        subject=delivery.message.subject,
        data=b"\xff",
        headers=delivery.message.headers,
        sequence=7,
        time=bench.broker.now(),
    )
    assert (await bench.handle(MemoryDelivery(broken)))["answers"] == []


async def test_what_has_ended_is_told_while_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "TOLD_EVERY", 0.0)
    bench = Bench({11: InvalidRequest("no")})
    bench.block = {12}
    delivery = bench.bundle([10, 11, 12])
    running = asyncio.create_task(bench.handle(delivery))
    await eventually(lambda: len(told(bench)) >= 1 and sum(map(ended, told(bench))) == 2)
    assert all(part.partial for part in told(bench))
    running.cancel()


def told(bench: Bench) -> list[BundleAnswer]:
    """What the submitter heard."""
    sent = [each for each in bench.broker.sent if each.subject == "_INBOX.me.b1"]
    return [msgspec.json.decode(each.data, type=BundleAnswer) for each in sent]


def ended(answer: BundleAnswer) -> int:
    return len(answer.answers) + len(answer.errors)
