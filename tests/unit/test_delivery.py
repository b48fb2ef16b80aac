"""The delivery contract, line by line, over a broker in memory."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import pytest

from inferbus.schemas import headers
from inferbus.schemas.errors import BusUnavailable, Draining, EngineFailed, InvalidRequest, PrefillUnavailable
from inferbus.schemas.subjects import JobKey, Subjects
from inferbus.workers.bus.errors import NotPermitted, StreamFull
from inferbus.workers.bus.interface import PubAck, Stored
from inferbus.workers.jobs.attempt import Attempt
from inferbus.workers.jobs.cancel import Cancels
from inferbus.workers.jobs.delivery import Deliveries
from inferbus.workers.jobs.reply import Reply
from inferbus.workers.jobs.retry import RetryPolicy
from inferbus.workers.jobs.runner import AttemptRunner, Work
from inferbus.workers.jobs.settings import JobSettings
from tests.support.eventually import eventually
from tests.support.memory import MemoryBroker, MemoryDelivery

SUBJECTS = Subjects()
SUBJECT = SUBJECTS.job("m", "batch", "acme", "tokens")
RESULT = SUBJECTS.result("acme", "j1")
STREAM = SUBJECTS.stream("acme", "j1")
BODY = b'{"token_ids":[1,2]}'

Answerer = Callable[[Attempt, Reply], Awaitable[bytes]]


class Bench:
    """One worker's delivery code, and what it did."""

    def __init__(self, work: Answerer, *, attempts: int = 3, window: float = 600.0) -> None:
        self.broker = MemoryBroker()
        self.runs = 0

        async def generate(task: Work) -> bytes:
            self.runs += 1
            return await work(task.attempt, task.reply)

        policy = RetryPolicy(attempts=attempts, jitter=0)
        settings = JobSettings(worker="w1", subjects=SUBJECTS, policy=policy, window=window)
        self.runner = AttemptRunner(self.broker, generate, settings, now=self.broker.now)
        self.cancels = Cancels(self.broker, self.runner.scopes, SUBJECTS)
        self.deliveries = Deliveries(self.broker, self.runner, self.cancels, settings)

    def job(
        self, *, attempt: int = 1, sequence: int = 7, found: Mapping[str, str] | None = None
    ) -> MemoryDelivery:
        message = Stored(
            subject=SUBJECT,
            data=BODY,
            headers={headers.JOB_ID: "j1", **(found or {})},
            sequence=sequence,
            time=self.broker.now(),
        )
        return MemoryDelivery(message, attempt)

    async def begun(self, attempts: int, *, sequence: int = 7, job: str = "j1") -> None:
        """So many attempts at a job began before, and left nothing but that."""
        fields = {headers.BEGUN: str(attempts), headers.ATTEMPT: str(attempts)}
        await self.broker.store(SUBJECTS.attempts("acme", job, sequence), b"", fields)

    async def handle(self, delivery: MemoryDelivery) -> tuple[str, object]:
        await self.deliveries.handle(delivery)
        assert len(delivery.ended) == 1
        return delivery.ended[0]

    async def dies(self, delivery: MemoryDelivery) -> None:
        """The worker is killed while it has a job."""
        runs = self.runs
        handling = asyncio.create_task(self.deliveries.handle(delivery))
        await eventually(lambda: self.runs > runs)
        handling.cancel()
        await asyncio.wait({handling})

    @property
    def results(self) -> list[Stored]:
        stored = self.broker.streams["INFER_RESULTS"]
        return [message for message in stored if message.subject.startswith("infer.results.")]

    @property
    def dead(self) -> list[Stored]:
        return self.broker.streams["INFER_DEAD"]

    @property
    def ends(self) -> list[str]:
        return [message.headers[headers.STATUS] for message in self.broker.sent if not message.data]


async def answer(attempt: Attempt, reply: Reply) -> bytes:
    reply.chunk(b'{"text":"a"}')
    reply.chunk(b'{"text":"b"}')
    return b'{"whole":true}'


async def dying(attempt: Attempt, reply: Reply) -> bytes:
    reply.chunk(b'{"text":"a"}')
    await asyncio.Event().wait()
    return b""


def failing(error: Exception) -> Answerer:
    async def fail(attempt: Attempt, reply: Reply) -> bytes:
        raise error

    return fail


async def test_a_finished_job_leaves_one_result_one_end_mark_and_is_acknowledged() -> None:
    bench = Bench(answer)
    assert await bench.handle(bench.job()) == ("ack", None)
    assert [message.data for message in bench.results] == [b'{"whole":true}']
    assert bench.results[0].headers[headers.STATUS] == "ok"
    assert bench.results[0].headers[headers.SUBMISSION] == "7"
    assert bench.ends == ["ok"]
    chunks = [msgspec.json.decode(message.data) for message in bench.broker.sent if message.data]
    assert chunks == [
        {"job": "j1", "attempt": 1, "seq": 0, "text": "a"},
        {"job": "j1", "attempt": 1, "seq": 1, "text": "b"},
    ]
    assert bench.broker.sent[-1].headers[headers.CHUNKS] == "2"


async def test_the_result_is_stored_before_the_end_mark_and_the_acknowledgement() -> None:
    bench = Bench(answer)
    delivery = bench.job()
    stored_when_acked: list[int] = []

    async def ack() -> None:
        stored_when_acked.append(len(bench.results))
        assert bench.ends == ["ok"]

    delivery.ack = ack  # type: ignore[method-assign]
    await bench.deliveries.handle(delivery)
    assert stored_when_acked == [1]


async def test_a_redelivered_job_whose_result_is_stored_does_not_run_and_its_readers_are_told() -> None:
    """Whoever stored it may have died before it sent the answer."""
    bench = Bench(answer)
    await bench.handle(bench.job())
    sent = len(bench.broker.sent)
    assert await bench.handle(bench.job(attempt=2)) == ("ack", None)
    assert (bench.runs, len(bench.results)) == (1, 1)
    whole, end = bench.broker.sent[sent:]
    assert whole.data == bench.results[0].data
    assert (end.headers[headers.STATUS], end.headers[headers.ATTEMPT]) == ("ok", "1")


async def test_a_later_submission_with_the_same_id_is_run_and_stores_its_own_result() -> None:
    bench = Bench(answer)
    await bench.handle(bench.job(sequence=7))
    await bench.handle(bench.job(sequence=9))
    assert [message.headers[headers.SUBMISSION] for message in bench.results] == ["7", "9"]


async def test_a_submission_that_repeats_one_that_has_ended_gets_its_answer_and_does_not_run() -> None:
    """A server that restarted has forgotten the message ids of jobs that are in its queue no more."""
    bench = Bench(answer)
    await bench.handle(bench.job(sequence=7, found={headers.MSG_ID: "m1"}))
    await bench.handle(bench.job(sequence=8, found={headers.MSG_ID: "m2"}))
    sent = len(bench.broker.sent)
    bench.broker.seconds = 599.0
    assert await bench.handle(bench.job(sequence=9, found={headers.MSG_ID: "m1"})) == ("ack", None)
    assert bench.runs == 2
    assert [message.headers[headers.SUBMISSION] for message in bench.results] == ["7", "8", "9"]
    assert bench.results[2].data == bench.results[0].data
    assert [(each.data, each.headers[headers.SUBMISSION]) for each in bench.broker.sent[sent:]] == [
        (bench.results[0].data, "9"),
        (b"", "9"),
    ]
    bench.broker.seconds = 601.0
    await bench.handle(bench.job(sequence=10, found={headers.MSG_ID: "m1"}))
    assert bench.runs == 3


async def test_a_second_owner_cannot_store_a_second_result() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(attempt: Attempt, reply: Reply) -> bytes:
        started.set()
        await go_on.wait()
        return b'{"by":"%d"}' % attempt.number

    bench = Bench(slow)
    first, second = bench.job(attempt=1), bench.job(attempt=2)
    stale = asyncio.create_task(bench.deliveries.handle(first))
    await started.wait()
    owner = asyncio.create_task(bench.deliveries.handle(second))
    await eventually(lambda: bench.runs == 2)
    go_on.set()
    await asyncio.gather(stale, owner)
    assert len(bench.results) == 1
    assert set(bench.ends) == {"ok"}


async def test_the_readers_of_an_owner_that_stalled_hear_its_result_from_its_successor() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def slow(attempt: Attempt, reply: Reply) -> bytes:
        if attempt.number == 1:
            stalled.stale = True
            return b'{"by":"1"}'
        started.set()
        await go_on.wait()
        return b'{"by":"2"}'

    bench = Bench(slow)
    stalled, successor = bench.job(attempt=1), bench.job(attempt=2)
    owner = asyncio.create_task(bench.deliveries.handle(successor))
    await started.wait()
    await bench.deliveries.handle(stalled)
    assert [result.data for result in bench.results] == [b'{"by":"1"}']
    assert not bench.broker.sent
    go_on.set()
    await owner
    assert [message.data for message in bench.broker.sent] == [b'{"by":"1"}', b""]


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"{", "undecodable_body"), (b'{"messages":[]}', "wrong_kind"), (b"{}", "invalid_request")],
)
async def test_the_callers_mistake_is_answered_stored_and_never_retried(body: bytes, code: str) -> None:
    bench = Bench(answer)
    delivery = bench.job()
    delivery.message = msgspec.structs.replace(delivery.message, data=body)
    assert await bench.handle(delivery) == ("ack", None)
    assert bench.runs == 0
    assert msgspec.json.decode(bench.results[0].data)["error"]["code"] == code
    assert bench.ends == ["error"]


async def test_an_engines_refusal_is_the_callers_mistake_too() -> None:
    bench = Bench(failing(InvalidRequest("top_p", param="top_p")))
    assert await bench.handle(bench.job()) == ("ack", None)
    assert not bench.dead


@pytest.mark.parametrize(
    "reply", ["a.*", "$JS.API.STREAM.DELETE.X", "infer.jobs.m.batch.acme.chat", "a..b", ""]
)
async def test_a_refused_reply_subject_is_told_on_the_owners_stream(reply: str) -> None:
    bench = Bench(answer)
    assert await bench.handle(bench.job(found={headers.REPLY_TO: reply})) == ("ack", None)
    assert bench.runs == 0
    assert {message.subject for message in bench.broker.sent} == {STREAM}
    assert msgspec.json.decode(bench.results[0].data)["error"]["code"] == "invalid_reply_subject"


async def test_an_infrastructure_failure_is_retried_with_growing_delays() -> None:
    bench = Bench(failing(PrefillUnavailable("none")), attempts=4)
    delays = [(await bench.handle(bench.job(attempt=attempt)))[1] for attempt in (1, 2, 3)]
    assert delays == [1.0, 2.0, 4.0]
    assert not bench.results
    assert bench.ends == []
    assert "retrying" in msgspec.json.decode(bench.broker.sent[-1].data)


async def test_an_attempts_number_is_above_all_that_readers_have_seen() -> None:
    """A server that was killed may have forgotten a delivery, and counts anew."""
    bench = Bench(failing(PrefillUnavailable("down")))
    assert (await bench.handle(bench.job(attempt=1)))[0] == "nak"
    assert (await bench.handle(bench.job(attempt=1)))[0] == "nak"
    other = bench.job(attempt=1, sequence=8)
    assert (await bench.handle(other))[0] == "nak"
    told = [(each.headers[headers.SUBMISSION], each.headers[headers.ATTEMPT]) for each in bench.broker.sent]
    assert told == [("7", "1"), ("7", "2"), ("8", "1")]


async def test_the_last_failed_attempt_becomes_a_dead_letter_a_result_and_a_term() -> None:
    bench = Bench(failing(EngineFailed("cuda")), attempts=2)
    await bench.begun(1)
    assert await bench.handle(
        bench.job(attempt=2, found={headers.TRACEPARENT: "00-x", "Nats-Expected-Stream": "INFER_JOBS"})
    ) == (
        "term",
        "engine_failed",
    )
    letter = bench.dead[0]
    assert (letter.subject, letter.data) == ("infer.dead.m.tokens", BODY)
    assert letter.headers[headers.SUBJECT] == SUBJECT
    assert letter.headers[headers.REASON] == "engine_failed"
    assert letter.headers[headers.ATTEMPT] == "2"
    assert letter.headers[headers.TRACEPARENT] == "00-x"
    assert "Nats-Expected-Stream" not in letter.headers
    assert msgspec.json.decode(bench.results[0].data)["error"]["code"] == "engine_failed"
    assert bench.ends == ["error"]


async def test_a_job_that_killed_every_worker_is_buried_without_another_try() -> None:
    bench = Bench(dying, attempts=3)
    for attempt in (1, 2, 3, 4):
        await bench.dies(bench.job(attempt=attempt))
    bench.broker.streams["INFER_STREAM"].clear()  # It forgets much sooner than a queue does.
    assert await bench.handle(bench.job(attempt=5)) == ("term", "attempts_exhausted")
    assert bench.runs == 4
    assert bench.dead[0].headers[headers.REASON] == "attempts_exhausted"
    assert bench.ends == ["error"]


async def test_a_job_that_came_too_often_without_being_tried_has_its_last_attempt() -> None:
    """It waited in workers that were killed by others."""
    bench = Bench(answer, attempts=3)
    assert await bench.handle(bench.job(attempt=9)) == ("ack", None)
    assert bench.results[0].headers[headers.STATUS] == "ok"
    assert not bench.dead


async def test_what_may_be_tried_once_is_not_tried_again() -> None:
    bench = Bench(dying, attempts=1)
    await bench.dies(bench.job(attempt=1))
    assert await bench.handle(bench.job(attempt=2)) == ("term", "attempts_exhausted")
    assert bench.runs == 1


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_a_job_that_was_delivered_again_and_again_and_never_began_is_tried(attempts: int) -> None:
    bench = Bench(answer, attempts=attempts)
    assert await bench.handle(bench.job(attempt=9)) == ("ack", None)
    assert bench.runs == 1
    assert bench.results[0].headers[headers.STATUS] == "ok"


async def test_a_job_that_fails_has_all_its_attempts_however_often_it_was_put_back_between() -> None:
    bench = Bench(failing(EngineFailed("cuda")), attempts=3)
    for attempt in (4, 9):
        assert (await bench.handle(bench.job(attempt=attempt)))[0] == "nak"
    assert await bench.handle(bench.job(attempt=17)) == ("term", "engine_failed")
    assert bench.runs == 3


async def test_a_job_whose_answers_go_to_an_inbox_has_its_failures_counted() -> None:
    """They leave nothing in the stream of chunks."""
    bench = Bench(failing(EngineFailed("cuda")), attempts=2)
    found = {headers.REPLY_TO: "_INBOX.x"}
    assert (await bench.handle(bench.job(attempt=1, found=found)))[0] == "nak"
    assert await bench.handle(bench.job(attempt=2, found=found)) == ("term", "engine_failed")


async def test_last_attempts_of_jobs_whose_workers_died_are_made_one_at_a_time() -> None:
    go_on = asyncio.Event()

    async def slow(attempt: Attempt, reply: Reply) -> bytes:
        await go_on.wait()
        return b"{}"

    bench = Bench(slow, attempts=3)
    await bench.begun(2)
    await bench.begun(2, sequence=8, job="j2")
    first = asyncio.create_task(bench.handle(bench.job(attempt=3, sequence=7)))
    await eventually(lambda: bench.runs == 1)
    second = bench.job(attempt=4, sequence=8, found={headers.JOB_ID: "j2"})
    assert await bench.handle(second) == ("nak", 5.0)
    go_on.set()
    assert await first == ("ack", None)
    again = bench.job(attempt=5, sequence=8, found={headers.JOB_ID: "j2"})
    assert await bench.handle(again) == ("ack", None)
    assert bench.runs == 2


async def test_a_job_that_waits_for_its_last_attempt_can_be_cancelled_and_expires() -> None:
    bench = Bench(dying, attempts=3)
    await bench.begun(2, job="j2")
    await bench.begun(2, sequence=8)
    await bench.begun(2, sequence=9)
    first = asyncio.create_task(bench.handle(bench.job(attempt=3, sequence=7, found={headers.JOB_ID: "j2"})))
    await eventually(lambda: bench.runs == 1)
    late = bench.job(attempt=3, sequence=8, found={headers.DEADLINE: "5"})
    bench.broker.seconds = 10.0
    assert await bench.handle(late) == ("ack", None)
    unwanted = bench.job(attempt=3, sequence=9)
    await bench.broker.store(SUBJECTS.cancel("acme", "j1"), b"")
    assert await bench.handle(unwanted) == ("ack", None)
    assert [result.headers[headers.STATUS] for result in bench.results] == ["expired", "cancelled"]
    assert bench.runs == 1
    first.cancel()
    await asyncio.wait({first})


async def test_last_attempts_of_jobs_that_failed_in_good_order_are_not_held_up() -> None:
    go_on = asyncio.Event()

    async def slow(attempt: Attempt, reply: Reply) -> bytes:
        if attempt.number < 3:
            raise PrefillUnavailable("none")
        await go_on.wait()
        return b"{}"

    bench = Bench(slow, attempts=3)
    names = {7: "j1", 8: "j2"}
    for sequence, name in names.items():
        for attempt in (1, 2):
            failed = bench.job(attempt=attempt, sequence=sequence, found={headers.JOB_ID: name})
            assert (await bench.handle(failed))[0] == "nak"
    last = [
        asyncio.create_task(
            bench.handle(bench.job(attempt=3, sequence=sequence, found={headers.JOB_ID: name}))
        )
        for sequence, name in names.items()
    ]
    await eventually(lambda: bench.runs == 6)
    go_on.set()
    assert await asyncio.gather(*last) == [("ack", None)] * 2


async def test_nats_going_away_before_a_last_attempt_begins_costs_none() -> None:
    bench = Bench(answer, attempts=3)
    read = bench.broker.read

    async def away(stream: str, subject: str) -> list[Stored]:
        raise BusUnavailable("NATS is away")

    for attempt in (3, 4, 5):
        bench.broker.read = away  # type: ignore[method-assign]
        delivery = bench.job(attempt=attempt)
        await bench.deliveries.handle(delivery)
        assert not delivery.ended
    bench.broker.read = read  # type: ignore[method-assign]
    assert await bench.handle(bench.job(attempt=6)) == ("ack", None)
    assert bench.runs == 1


async def test_a_last_attempt_whose_worker_lost_touch_is_not_counted() -> None:
    held: list[MemoryDelivery] = []

    async def stalled(attempt: Attempt, reply: Reply) -> bytes:
        held[-1].stale = attempt.number < 6
        reply.chunk(b'{"text":"a"}')
        return b"{}"

    bench = Bench(stalled, attempts=3)
    for attempt in (3, 4, 5):
        held.append(bench.job(attempt=attempt))
        await bench.deliveries.handle(held[-1])
        assert not held[-1].ended
    held.append(bench.job(attempt=6))
    assert await bench.handle(held[-1]) == ("ack", None)


async def test_a_job_whose_workers_were_stopped_again_and_again_is_no_dead_letter() -> None:
    bench = Bench(failing(Draining("shutting down")), attempts=2)
    for attempt in (1, 2, 3, 4):
        assert await bench.handle(bench.job(attempt=attempt)) == ("nak", 0.0)
    # Stopped in its last attempt, after deliveries that nothing is known of.
    for attempt in (7, 8):
        assert await bench.handle(bench.job(attempt=attempt)) == ("nak", 0.0)
    assert not bench.dead


async def test_a_defect_is_retried_and_says_nothing_of_the_request() -> None:
    bench = Bench(failing(KeyError("secret prompt")))
    assert (await bench.handle(bench.job()))[0] == "nak"
    assert b"secret" not in bench.broker.sent[-1].data


async def test_a_draining_worker_hands_a_job_back_at_once() -> None:
    bench = Bench(failing(Draining("shutting down")), attempts=1)
    assert await bench.handle(bench.job()) == ("nak", 0.0)
    assert not bench.dead


async def test_a_job_that_was_cancelled_while_queued_never_runs() -> None:
    bench = Bench(answer)
    delivery = bench.job()
    bench.broker.seconds = 5
    await bench.broker.store(SUBJECTS.cancel("acme", "j1"), b"")
    assert await bench.handle(delivery) == ("ack", None)
    assert bench.runs == 0
    assert bench.ends == ["cancelled"]


@pytest.mark.parametrize("forwarded", [True, False])
async def test_what_the_server_sends_for_somebody_is_no_cancel(forwarded: bool) -> None:
    """A client can have an acknowledgement, or its own message, sent to another owner's cancel subject."""
    bench = Bench(answer)
    delivery = bench.job()
    bench.broker.seconds = 5
    await bench.broker.store(
        SUBJECTS.cancel("acme", "j1"), b"" if forwarded else b'{"stream":"INFER_JOBS","seq":1}'
    )
    marks = bench.broker.streams["INFER_CANCEL"]
    marks[-1] = msgspec.structs.replace(marks[-1], forwarded=forwarded)
    assert await bench.handle(delivery) == ("ack", None)
    assert bench.ends == ["ok"]


async def test_a_job_that_the_server_forwarded_for_somebody_does_not_run() -> None:
    bench = Bench(answer)
    delivery = bench.job()
    delivery.message = msgspec.structs.replace(delivery.message, forwarded=True)
    assert (await bench.handle(delivery))[0] == "term"
    assert bench.runs == 0
    assert not bench.results


async def test_a_job_that_cannot_be_read_waits_for_room_and_keeps_no_other_from_running() -> None:
    """Anybody can submit such jobs, and so fill the stream of dead letters."""
    bench = Bench(answer)
    store = bench.broker.store

    async def full(subject: str, data: bytes, found: Any = None, **options: Any) -> PubAck | None:
        if subject.startswith("infer.dead."):
            raise StreamFull("no room")
        return await store(subject, data, found, **options)

    bench.broker.store = full  # type: ignore[assignment]
    unreadable = bench.job()
    unreadable.message = msgspec.structs.replace(unreadable.message, undecodable=b"\xff")
    await asyncio.wait_for(bench.deliveries.handle(unreadable), 5)
    assert not unreadable.ended
    assert bench.deliveries.storage.full is None
    assert await bench.handle(bench.job()) == ("ack", None)


async def test_a_running_job_ends_when_it_is_cancelled() -> None:
    started = asyncio.Event()

    async def endless(attempt: Attempt, reply: Reply) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b"{}"

    bench = Bench(endless)
    delivery = bench.job()
    running = asyncio.create_task(bench.deliveries.handle(delivery))
    await started.wait()
    await bench.broker.store(SUBJECTS.cancel("acme", "j1"), b"")
    bench.cancels.arrived(SUBJECTS.cancel("acme", "j1"), {})
    await running
    assert delivery.ended == [("ack", None)]
    assert bench.results[0].headers[headers.STATUS] == "cancelled"
    assert len(bench.runner.scopes) == 0


async def test_every_chunk_of_a_cancelled_answer_is_accounted_for() -> None:
    said = asyncio.Event()

    async def talk(attempt: Attempt, reply: Reply) -> bytes:
        for _ in range(3):
            reply.chunk(b'{"text":"a"}')
        said.set()
        await asyncio.Event().wait()
        return b"{}"

    bench = Bench(talk)
    running = asyncio.create_task(bench.handle(bench.job()))
    await said.wait()
    bench.cancels.arrived(SUBJECTS.cancel("acme", "j1"), {})
    await running
    *told, end = bench.broker.sent
    assert [msgspec.json.decode(message.data).get("seq") for message in told] == [0, 1, 2, None]
    assert end.headers[headers.CHUNKS] == "4"


@pytest.mark.parametrize("aim", ["7", None])
async def test_a_cancel_never_hits_a_later_submission(aim: str | None) -> None:
    bench = Bench(answer)
    found = {headers.SUBMISSION: aim} if aim else {}
    await bench.broker.store(SUBJECTS.cancel("acme", "j1"), b"", found)
    bench.broker.seconds = 5
    assert await bench.handle(bench.job(sequence=9)) == ("ack", None)
    assert bench.runs == 1
    assert bench.ends == ["ok"]


async def test_a_job_whose_deadline_passed_in_the_queue_expires_without_running() -> None:
    bench = Bench(answer)
    delivery = bench.job(found={headers.DEADLINE: "10"})
    bench.broker.seconds = 11
    assert await bench.handle(delivery) == ("ack", None)
    assert bench.runs == 0
    assert bench.ends == ["expired"]


async def test_a_running_job_expires_at_its_deadline() -> None:
    async def endless(attempt: Attempt, reply: Reply) -> bytes:
        await asyncio.Event().wait()
        return b"{}"

    bench = Bench(endless)
    soon = (bench.broker.now() + dt.timedelta(milliseconds=30)).isoformat()
    assert await bench.handle(bench.job(found={headers.DEADLINE: soon})) == ("ack", None)
    assert bench.results[0].headers[headers.STATUS] == "expired"


async def test_a_job_is_left_alone_while_nats_is_away() -> None:
    bench = Bench(answer)
    bench.broker.away = True
    delivery = bench.job()
    await bench.deliveries.handle(delivery)
    assert delivery.ended == []


async def test_a_finished_answer_is_stored_when_nats_is_back() -> None:
    async def outlived(attempt: Attempt, reply: Reply) -> bytes:
        bench.broker.away = True
        return b'{"whole":true}'

    bench = Bench(outlived)
    delivery = bench.job()
    running = asyncio.create_task(bench.deliveries.handle(delivery))
    await eventually(lambda: bench.broker.away)
    assert not bench.results
    bench.broker.away = False
    await running
    assert delivery.ended == [("ack", None)]
    assert bench.ends == ["ok"]


async def test_an_owner_that_was_out_of_touch_sends_nothing_more() -> None:
    async def stalled(attempt: Attempt, reply: Reply) -> bytes:
        reply.chunk(b'{"text":"a"}')
        delivery.stale = True
        reply.chunk(b'{"text":"b"}')
        return b'{"whole":true}'

    bench = Bench(stalled)
    delivery = bench.job()
    await bench.deliveries.handle(delivery)
    assert delivery.ended == []
    assert not bench.results
    assert len(bench.broker.sent) == 1


async def test_a_stale_owners_finished_result_counts_but_its_readers_hear_no_more_of_it() -> None:
    async def late(attempt: Attempt, reply: Reply) -> bytes:
        delivery.stale = True
        return b'{"whole":true}'

    bench = Bench(late)
    delivery = bench.job()
    assert await bench.handle(delivery) == ("ack", None)
    assert len(bench.results) == 1
    assert bench.ends == []


@pytest.mark.parametrize(
    "subject",
    [
        "infer.jobs.m.urgent.acme.tokens",
        "infer.jobs.m.batch.live.tokens",
        "infer.jobs.m.batch.a=2e.tokens",
        "infer.jobs.m.batch.tokens",
    ],
)
async def test_a_job_whose_owner_cannot_be_told_becomes_a_dead_letter(subject: str) -> None:
    bench = Bench(answer)
    delivery = bench.job(found={"X-Odd name": "a\x0bb\x9b", "Café": "ü\udcff"})
    delivery.message = msgspec.structs.replace(delivery.message, subject=subject)
    assert await bench.handle(delivery) == ("term", "invalid_subject")
    [letter] = bench.dead
    assert letter.subject == "infer.dead.m.unknown"
    assert (letter.data, letter.headers[headers.SUBJECT]) == (BODY, subject)
    assert letter.headers[headers.REASON] == "invalid_subject"
    assert letter.headers["X-Odd%20name"] == "a%0Bb%C2%9B"
    assert letter.headers["Caf%C3%A9"] == "ü%ED%B3%BF"
    assert bench.runs == 0


async def test_a_job_of_an_unknown_kind_has_an_error_as_its_result() -> None:
    bench = Bench(answer)
    delivery = bench.job()
    delivery.message = msgspec.structs.replace(delivery.message, subject="infer.jobs.m.batch.acme.images")
    assert await bench.handle(delivery) == ("ack", None)
    [result] = bench.results
    assert json.loads(result.data)["error"]["code"] == "invalid_subject"
    assert bench.ends == ["error"]


async def test_a_job_is_given_back_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(answer)

    async def broken(*_: object) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(bench.broker, "last", broken)
    ended, _ = await bench.handle(bench.job())
    assert ended == "nak"


async def test_the_stream_sequence_is_the_id_of_a_job_without_one() -> None:
    bench = Bench(answer)
    delivery = bench.job()
    delivery.message = msgspec.structs.replace(delivery.message, headers={})
    await bench.handle(delivery)
    assert bench.results[0].subject == SUBJECTS.result("acme", "7")


async def test_msgpack_jobs_get_msgpack_answers() -> None:
    bench = Bench(answer)
    delivery = bench.job(found={headers.CONTENT_TYPE: "application/msgpack"})
    delivery.message = msgspec.structs.replace(
        delivery.message, data=msgspec.msgpack.encode({"token_ids": [1]})
    )
    await bench.handle(delivery)
    first = msgspec.msgpack.decode(bench.broker.sent[0].data)
    assert first == {"job": "j1", "attempt": 1, "seq": 0, "text": "a"}


def test_a_job_key_names_owner_and_job() -> None:
    assert SUBJECTS.parse_key(RESULT, "results") == JobKey("acme", "j1")


async def test_a_worker_that_is_killed_just_as_a_job_ends_leaves_no_count() -> None:
    bench = Bench(answer)
    await bench.begun(1)
    delivery = bench.job(attempt=2)
    bench.broker.purged = BusUnavailable("away")
    await bench.deliveries.handle(delivery)
    assert delivery.ended == [], "a job that is acknowledged does not come again"
    bench.broker.purged = None
    assert await bench.handle(bench.job(attempt=3)) == ("ack", None)
    assert (bench.runs, len(bench.results)) == (1, 1)
    assert bench.broker.streams["INFER_RESULTS"] == bench.results


async def test_where_counts_may_not_be_removed_jobs_end_all_the_same() -> None:
    bench = Bench(answer)
    await bench.begun(1)
    bench.broker.purged = NotPermitted("no")
    assert await bench.handle(bench.job(attempt=2)) == ("ack", None)
