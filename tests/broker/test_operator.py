"""What an operator does, against a real server: dead letters, queues, pauses, streams."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import io
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.errors import BusUnavailable, InvalidSubject, ModelNotFound, Overloaded
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import client, layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import ensure_consumer, provision
from inferbus.workers.bus.queue.consumers import job_consumers, job_queue
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.cli import main
from inferbus.workers.client import Client
from inferbus.workers.client.operator import Operator
from inferbus.workers.client.records import QueuedJob
from inferbus.workers.config import MIB, BusSettings, Settings, StreamSettings, WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet, fleet

BODY = b'{"token_ids": [1, 2]}'
SUBJECT = "infer.jobs.m.batch.acme.tokens"


async def bury(
    bus: Bus,
    job: str,
    *,
    model: str = "m",
    subject: str = SUBJECT,
    submission: int = 7,
    more: Mapping[str, str] | None = None,
) -> int:
    """A dead letter as a worker writes it; returns its sequence."""
    headers = {
        "Infer-Reason": "engine_failed",
        "Infer-Detail": "the engine failed",
        "Infer-Attempt": "5",
        "Infer-Job-Id": job,
        "Infer-Subject": subject,
        "Infer-Submission": str(submission),
        "Infer-Worker": "w1",
        "Nats-Msg-Id": f"dead-{job}",
        **(more or {}),
    }
    return (await JetStream(bus).store(f"infer.dead.{model}.tokens", BODY, headers)).sequence


async def submit(bus: Bus, job: str, subject: str = SUBJECT) -> int:
    return (await JetStream(bus).store(subject, BODY, {"Infer-Job-Id": job})).sequence


async def names(operator: Operator, **of: Any) -> list[str | None]:
    return [letter.job async for letter in operator.dead_letters(**of)]


def ids(found: tuple[list[QueuedJob], int]) -> list[str]:
    return [job.job for job in found[0]]


@pytest.fixture
def operator(streams: Bus) -> Operator:
    return Operator(streams)


@pytest.fixture
async def queue(streams: Bus) -> AsyncIterator[JobQueue]:
    """The jobs of the model `m`, in both classes."""
    queue = await job_queue(streams, "m", WorkerSettings())
    yield queue
    await queue.stop()


@contextlib.asynccontextmanager
async def denying(tmp_path: Path, *subjects: str) -> AsyncIterator[tuple[Bus, Bus]]:
    """A user who may do everything, and one who may not publish there."""
    denied = json.dumps(list(subjects))
    users = f"""accounts {{ A {{ jetstream: enabled, users: [ {{ user: all, password: p }},
        {{ user: some, password: p, permissions: {{ publish: {{ deny: {denied} }} }} }} ] }} }}"""
    async with NatsServer(tmp_path / "nats", sync_interval=None, extra=users) as server:
        buses = [
            await Bus.connect(BusSettings(urls=(server.url,), user=user, password="p"), name="test")
            for user in ("all", "some")
        ]
        await provision(buses[0], StreamSettings(), model="m")
        yield buses[0], buses[1]
        for bus in buses:
            await bus.close()


async def test_a_letter_says_what_died_and_why(streams: Bus, operator: Operator) -> None:
    sequence = await bury(streams, "j", more={"Infer-Deadline": "60"})
    [letter] = [letter async for letter in operator.dead_letters()]
    assert letter.letter == sequence
    assert (letter.owner, letter.job, letter.model, letter.job_class, letter.kind) == (
        "acme",
        "j",
        "m",
        "batch",
        "tokens",
    )
    assert (letter.code, letter.reason) == ("engine_failed", "the engine failed")
    assert (letter.attempts, letter.worker, letter.submission, letter.deadline) == (5, "w1", 7, "60")
    assert letter.size == len(BODY)
    assert 0 <= letter.age < 60
    found = await operator.dead_letter(sequence)
    assert found is not None
    assert found[1].data == BODY
    assert await operator.dead_letter(sequence + 1) is None


async def test_letters_are_listed_by_model_and_over_many_pages(streams: Bus, operator: Operator) -> None:
    await asyncio.gather(*(bury(streams, f"j{number}") for number in range(1100)))
    await bury(streams, "other", model="n", subject="infer.jobs.n.batch.acme.tokens")
    assert await names(operator, model="n") == ["other"]
    assert len(await names(operator, model="m")) == 1100
    assert len(set(await names(operator))) == 1101


async def test_a_letter_that_is_nonsense_is_listed_all_the_same(streams: Bus, operator: Operator) -> None:
    await JetStream(streams).store("infer.dead.m.tokens", b"", {"Infer-Attempt": "many"})
    [letter] = [letter async for letter in operator.dead_letters()]
    assert (letter.model, letter.kind, letter.job, letter.attempts) == ("m", "tokens", None, None)
    with pytest.raises(InvalidSubject, match="dead letter 1"):
        await operator.replay(1)


async def test_replaying_queues_the_job_as_it_was_submitted(streams: Bus, operator: Operator) -> None:
    own = {"Content-Type": "application/json", "traceparent": "00-1", "Infer-Deadline": "60"}
    first = await bury(streams, "j", more={**own, "Nats-Expected-Stream": "INFER_DEAD"})
    done = await operator.replay(first)
    assert done is not None
    assert (done.letter, done.before) == (first, False)
    assert (done.job.id, done.job.owner) == ("j", "acme")
    job = await JetStream(streams).last(layout.JOBS, SUBJECT)
    assert job is not None
    assert (job.sequence, job.data) == (done.job.submission, BODY)
    found = dict(job.headers)
    assert found.pop("Nats-Msg-Id").startswith(f"replay-{first}-")
    assert found == {"Infer-Job-Id": "j", **own}
    assert await names(operator) == []


async def test_a_replay_may_leave_the_deadline_behind(streams: Bus, operator: Operator) -> None:
    await operator.replay(
        await bury(streams, "j", more={"Infer-Deadline": "2020-01-01T00:00:00Z"}), deadline=False
    )
    job = await JetStream(streams).last(layout.JOBS, SUBJECT)
    assert job is not None
    assert "Infer-Deadline" not in job.headers


async def test_two_letters_of_one_job_are_two_submissions(streams: Bus, operator: Operator) -> None:
    for submission in (7, 9):
        sequence = await bury(streams, "j", submission=submission, more={"Nats-Msg-Id": f"dead-{submission}"})
        assert await operator.replay(sequence) is not None
    assert ids(await operator.jobs()) == ["j", "j"]


async def test_replaying_twice_queues_once(streams: Bus, operator: Operator) -> None:
    sequence = await bury(streams, "j")
    done = await asyncio.gather(*(operator.replay(sequence) for _ in range(4)))
    assert len({each.job.submission for each in done if each is not None}) == 1
    assert await operator.replay(sequence) is None
    assert ids(await operator.jobs()) == ["j"]


async def test_a_replay_that_was_interrupted_before_it_removed_the_letter_is_finished_by_another(
    tmp_path: Path,
) -> None:
    async with denying(tmp_path, "$JS.API.STREAM.MSG.DELETE.>") as (bus, some):
        sequence = await bury(bus, "j")
        with pytest.raises(BusUnavailable, match=r"replayed as submission \d+ .*STREAM\.MSG\.DELETE"):
            await Operator(some).replay(sequence)
        assert await names(Operator(bus)) == ["j"]
        done = await Operator(bus).replay(sequence)
        assert done is not None
        assert done.before
        assert await names(Operator(bus)) == []
        assert ids(await Operator(bus).jobs()) == ["j"]


@pytest.mark.parametrize(
    "subject",
    ["$JS.API.STREAM.DELETE.INFER_JOBS", "infer.results.acme.j", "infer.jobs.m.batch.acme.poem", ">", ""],
)
async def test_a_letter_cannot_make_an_operator_publish_elsewhere(
    streams: Bus, operator: Operator, subject: str
) -> None:
    sequence = await bury(streams, "j", subject=subject)
    with pytest.raises(InvalidSubject, match=f"dead letter {sequence}"):
        await operator.replay(sequence)
    assert await names(operator) == ["j"]


async def test_a_full_queue_leaves_the_letter_where_it_is(bus: Bus) -> None:
    await provision(bus, StreamSettings(jobs_max_bytes=MIB), model="m")
    await JetStream(bus).store(SUBJECT, b"x" * (MIB - 8192))
    sequence = await bury(bus, "j", more={"traceparent": "x" * 8192})
    with pytest.raises(Overloaded, match="the queue is full: maximum bytes exceeded"):
        await Operator(bus).replay(sequence)
    assert await names(Operator(bus)) == ["j"]


async def test_letters_that_are_written_meanwhile_are_left_for_the_next_time(
    streams: Bus, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a job that dies at once would be replayed for ever."""
    monkeypatch.setattr(client, "PAGE", 1)
    for job in ("first", "second"):
        await bury(streams, job)
    seen = []
    async for letter in operator.dead_letters():
        seen.append(letter.job)
        await operator.replay(letter.letter)
        await bury(streams, f"again-{len(seen)}")
    assert seen == ["first", "second"]
    assert await names(operator) == ["again-1", "again-2"]


async def test_purging_removes_what_is_named_and_nothing_else(streams: Bus, operator: Operator) -> None:
    one, _, _ = [await bury(streams, job) for job in ("one", "two", "three")]
    await bury(streams, "other", model="n")
    assert await operator.discard(one)
    assert not await operator.discard(one)
    assert not await operator.discard(99)
    assert await names(operator) == ["two", "three", "other"]
    assert await operator.discard_all(model="m") == 2
    assert await names(operator) == ["other"]
    assert await operator.discard_all() == 1


async def test_a_job_is_queued_until_it_is_taken_and_gone_when_it_has_ended(
    streams: Bus, operator: Operator, queue: JobQueue
) -> None:
    for job in ("a", "b"):
        await submit(streams, job)
    taken = await queue.take()
    found, more = await operator.jobs()
    assert [(job.job, job.taken, job.model, job.job_class, job.owner, job.kind) for job in found] == [
        ("a", True, "m", "batch", "acme", "tokens"),
        ("b", False, "m", "batch", "acme", "tokens"),
    ]
    assert (found[0].size, more) == (len(BODY), 0)
    [batch] = await operator.queues(job_class="batch")
    assert (batch.pending, batch.ack_pending, batch.redelivered, batch.paused_until) == (1, 1, 0, None)
    await taken.nak(0)
    again = await queue.take()
    assert again.attempt == 2
    [batch] = await operator.queues(job_class="batch")
    assert (batch.pending, batch.ack_pending, batch.redelivered) == (1, 1, 1)
    await again.ack()
    assert ids(await operator.jobs()) == ["b"]


async def test_jobs_are_listed_by_model_class_and_owner_and_no_more_than_asked_for(
    streams: Bus, operator: Operator
) -> None:
    await provision(streams, StreamSettings(), model="org/n")
    await submit(streams, "a")
    await submit(streams, "b", "infer.jobs.m.interactive.acme.chat")
    await submit(streams, "c", "infer.jobs.org=2Fn.batch.zoo.chat")
    assert ids(await operator.jobs()) == ["a", "b", "c"]
    assert ids(await operator.jobs(model="m")) == ["a", "b"]
    assert ids(await operator.jobs(model="org/n")) == ["c"]
    assert ids(await operator.jobs(job_class="batch")) == ["a", "c"]
    assert ids(await operator.jobs(owner="zoo")) == ["c"]
    assert ids(await operator.jobs(owner="nobody")) == []
    found = await operator.jobs(most=2)
    assert (ids(found), found[1]) == (["a", "b"], 1)


async def test_large_jobs_are_listed_page_by_page(streams: Bus, operator: Operator) -> None:
    for number in range(12):
        await JetStream(streams).store(SUBJECT, b"x" * (MIB * 3 // 4), {"Infer-Job-Id": f"j{number}"})
    assert ids(await operator.jobs()) == [f"j{number}" for number in range(12)]


async def test_a_stream_that_somebody_made_without_direct_access_can_be_read_too(
    bus: Bus,
) -> None:
    config = next(
        each for each in layout.stream_configs(bus.subjects, StreamSettings()) if each["name"] == layout.JOBS
    )
    config |= {"subjects": ["infer.jobs.>"], "allow_direct": False}
    await JetStream(bus).call(f"STREAM.CREATE.{layout.JOBS}", config)
    for job in ("a", "b", "c"):
        await submit(bus, job)
    assert ids(await Operator(bus).jobs()) == ["a", "b", "c"]


async def test_a_job_is_named_as_its_worker_names_it(streams: Bus, operator: Operator) -> None:
    await JetStream(streams).store(SUBJECT, BODY, {"Nats-Msg-Id": "by-message-id"})
    ack = await JetStream(streams).store(SUBJECT, BODY, {"Infer-Job-Id": "x" * 200})
    assert ids(await operator.jobs()) == ["by-message-id", str(ack.sequence)]


async def test_a_report_of_a_job_tells_where_it_is(streams: Bus, operator: Operator, queue: JobQueue) -> None:
    assert not (await operator.job("acme", "j")).known
    first = await submit(streams, "j")
    report = await operator.job("acme", "j")
    assert [(each.submission, each.taken) for each in report.queued] == [(first, False)]
    assert (report.result, report.cancel, report.letters, report.attempts) == (None, None, [], None)
    await queue.take()
    chunk = {"Infer-Submission": str(first), "Infer-Attempt": "2"}
    await JetStream(streams).store("infer.stream.acme.j", b"{}", chunk)
    await operator.cancel("acme", "j")
    report = await operator.job("acme", "j")
    assert [each.taken for each in report.queued] == [True]
    assert report.attempts == 2
    assert report.cancel is not None
    assert report.cancel.submission is None
    assert not (await operator.job("other", "j")).known


async def test_attempts_at_an_older_submission_do_not_count(streams: Bus, operator: Operator) -> None:
    older = {"Infer-Submission": "1", "Infer-Attempt": "4", "Infer-Status": "error"}
    failed = b'{"error": {"code": "engine_failed", "message": "x"}, "job": "j", "attempt": 4}'
    await JetStream(streams).store("infer.results.acme.j", failed, older)
    report = await operator.job("acme", "j")
    assert report.attempts == 4
    assert report.result is not None
    assert (report.result.status, report.result.code, report.result.attempt) == ("error", "engine_failed", 4)
    await submit(streams, "before")
    await submit(streams, "j")
    assert (await operator.job("acme", "j")).attempts is None


async def test_a_paused_class_gives_out_nothing_until_it_is_resumed(
    streams: Bus, operator: Operator, queue: JobQueue
) -> None:
    [paused] = await operator.pause("m", job_class="batch")
    assert paused.paused_until is not None
    assert paused.paused_until > dt.datetime.now(dt.UTC) + dt.timedelta(days=365)
    await submit(streams, "waits")
    await submit(streams, "goes", "infer.jobs.m.interactive.acme.tokens")
    first, second = asyncio.create_task(queue.take()), asyncio.create_task(queue.take())
    async with asyncio.timeout(20):
        assert (await first).message.headers["Infer-Job-Id"] == "goes"
    # The other taker has asked both classes by now, and its requests are open.
    await eventually(lambda: _waiting(operator, 2), within=20)
    numbers = {each.job_class: (each.pending, each.ack_pending) for each in await operator.queues()}
    assert numbers == {"batch": (1, 0), "interactive": (0, 1)}
    assert not second.done()
    [resumed] = await operator.resume("m", job_class="batch")
    assert resumed.paused_until is None
    async with asyncio.timeout(20):
        assert (await second).message.headers["Infer-Job-Id"] == "waits"
    assert (queue.troubles, queue.healthy) == (0, True)


async def _waiting(operator: Operator, count: int) -> bool:
    return sum(each.waiting for each in await operator.queues()) >= count


async def test_a_pause_with_an_end_ends_by_itself(streams: Bus, operator: Operator, queue: JobQueue) -> None:
    both = await operator.pause("m", seconds=1.5)
    assert {each.job_class for each in both} == {"batch", "interactive"}
    until = both[0].paused_until
    assert until is not None
    await submit(streams, "j")
    async with asyncio.timeout(30):
        await queue.take()
    assert dt.datetime.now(dt.UTC) >= until
    assert [each.paused_until for each in await operator.queues()] == [None, None]


async def test_jobs_that_run_are_not_touched_by_a_pause(
    streams: Bus, operator: Operator, queue: JobQueue
) -> None:
    await submit(streams, "j")
    taken = await queue.take()
    await operator.pause("m")
    await taken.ack()
    assert ids(await operator.jobs()) == []


async def test_only_a_queue_that_is_there_can_be_paused(operator: Operator, queue: JobQueue) -> None:
    with pytest.raises(ModelNotFound, match=r"no worker has ever served durable jobs of other; .*: m"):
        await operator.pause("other")
    with pytest.raises(ModelNotFound, match="no worker has ever served batch jobs of other"):
        await operator.resume("other", job_class="batch")


CALLS: Mapping[str, Callable[[Operator], Awaitable[Any]]] = {
    "$JS.API.STREAM.INFO.INFER_DEAD": names,
    "$JS.API.DIRECT.GET.INFER_DEAD": names,
    "$JS.API.STREAM.MSG.GET.INFER_DEAD": lambda operator: operator.replay(1),
    "infer.jobs.m.batch.acme.tokens": lambda operator: operator.replay(1),
    "$JS.API.STREAM.MSG.DELETE.INFER_DEAD": lambda operator: operator.discard(1),
    "$JS.API.STREAM.PURGE.INFER_DEAD": lambda operator: operator.discard_all(),
    "$JS.API.CONSUMER.LIST.INFER_JOBS": lambda operator: operator.jobs(),
    "$JS.API.CONSUMER.PAUSE.INFER_JOBS.m-batch": lambda operator: operator.pause("m"),
    "$JS.API.STREAM.INFO.INFER_JOBS": lambda operator: operator.streams(Settings()),
    "infer.cancel.acme.j": lambda operator: operator.cancel("acme", "j"),
}


@pytest.mark.parametrize("subject", list(CALLS))
async def test_every_call_says_which_permission_it_lacks(tmp_path: Path, subject: str) -> None:
    async with denying(tmp_path, subject) as (bus, some):
        await bury(bus, "j")
        await job_consumers(bus, "m", ["batch"], ack_wait=30)
        with pytest.raises(BusUnavailable) as refused:
            await CALLS[subject](Operator(some))
        assert "not permitted to publish to" in refused.value.message
        assert subject.lower() in refused.value.message.lower()


async def test_jetstream_that_is_off_is_told(tmp_path: Path) -> None:
    users = 'accounts { A { users: [ { user: "u", password: "p" } ] } }'
    async with NatsServer(tmp_path, extra=users) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        operator = Operator(bus)
        calls: list[Awaitable[Any]] = [
            names(operator),
            operator.replay(1),
            operator.discard(1),
            operator.jobs(),
            operator.pause("m"),
            operator.streams(Settings()),
        ]
        for call in calls:
            with pytest.raises(BusUnavailable, match="JetStream does not answer: is it enabled"):
                await call
        await bus.close()


async def test_streams_that_nobody_made_are_told(bus: Bus) -> None:
    operator = Operator(bus)
    with pytest.raises(BusUnavailable, match="stream INFER_DEAD is not there"):
        await names(operator)
    with pytest.raises(BusUnavailable, match="stream INFER_JOBS is not there"):
        await operator.queues()
    found = await operator.streams(Settings())
    assert not any(each.exists or each.fine for each in found)
    await operator.adopt(Settings())
    assert all(each.fine for each in await operator.streams(Settings()))


async def test_what_is_weaker_is_told_and_raised_on_demand(streams: Bus, operator: Operator) -> None:
    consumer = layout.job_consumer(streams.subjects, "m", "batch", ack_wait=5)
    await ensure_consumer(streams, layout.JOBS, consumer | {"max_deliver": 3})
    await submit(streams, "j")
    await JetStream(streams).call(
        "CONSUMER.CREATE.INFER_RESULTS.mine",
        {"stream_name": "INFER_RESULTS", "config": {"durable_name": "mine", "ack_policy": "explicit"}},
    )
    settings = Settings(streams=StreamSettings(dead_max_bytes=512 * MIB), worker=WorkerSettings(ack_wait=30))
    before = {each.stream: each for each in await operator.streams(settings)}
    assert before[layout.DEAD].differences == ["max_bytes is 268435456, wanted 536870912"]
    [jobs] = before[layout.JOBS].consumers
    assert jobs.differences == ["ack_wait is 5 s, wanted 30 s", "max_deliver is 3, wanted unlimited"]
    assert before[layout.JOBS].messages == 1
    assert not before[layout.JOBS].fine
    [foreign] = before[layout.RESULTS].consumers
    assert (foreign.consumer, foreign.queue, foreign.differences) == ("mine", None, [])
    assert before[layout.RESULTS].fine
    await operator.adopt(settings)
    assert all(each.fine for each in await operator.streams(settings))
    assert ids(await operator.jobs()) == ["j"]


async def test_adopting_does_not_end_a_pause(streams: Bus, operator: Operator) -> None:
    await job_consumers(streams, "m", ["batch"], ack_wait=5)
    await operator.pause("m")
    await operator.adopt(Settings())
    [batch] = await operator.queues()
    assert batch.paused_until is not None


async def test_another_prefix_is_followed(connect: Connect) -> None:
    bus = await connect(prefix="acme.llm")
    await provision(bus, StreamSettings())
    await job_consumers(bus, "m", ["batch"], ack_wait=30)
    subject = "acme.llm.jobs.m.batch.o.tokens"
    await submit(bus, "j", subject)
    operator = Operator(bus)
    assert ids(await operator.jobs(model="m")) == ["j"]
    await JetStream(bus).store(
        "acme.llm.dead.m.tokens", BODY, {"Infer-Subject": subject, "Infer-Job-Id": "k"}
    )
    done = await operator.replay(1)
    assert done is not None
    assert ids(await operator.jobs()) == ["j", "k"]
    assert [each.model for each in await operator.pause("m")] == ["m"]


SCRIPT = """
tokenizer = true
[[rules]]
user = "breaks-once"
text = "In the end."
[rules.fault]
at = 2
do = "fail"
code = "engine_failed"
times = 1
[[rules]]
text = "Well."
"""

Run = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    """One worker, which tries every job once."""
    async with fleet(server, tmp_path) as found:
        await found.start("both", SCRIPT, max_attempts=1)
        yield found


@pytest.fixture
def run(server: NatsServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command; its exit code, and what it wrote to standard output and standard error."""
    monkeypatch.setenv("INFERBUS_NATS_URL", server.url)

    async def running(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = await asyncio.to_thread(main, arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, said.out, said.err

    return running


@pytest.mark.faults
async def test_a_job_that_died_is_replayed_and_succeeds(workers: Fleet, run: Run) -> None:
    body = '{"token_ids": [1], "user": "breaks-once"}'
    assert (await run("submit", "tokens", MODEL, "--job-id", "j", stdin=body))[0] == 0
    code, _, err = await run("result", "j", "--timeout", "30")
    assert (code, err[:24]) == (1, "inferbus: engine_failed:")
    await eventually(lambda: _letters(workers.bus, 1), within=20)
    code, out, _ = await run("dead", "ls")
    head, row = out.splitlines()
    assert head.split()[:6] == ["seq", "age", "model", "kind", "owner", "job"]
    assert row.split()[0] == "1"
    assert all(each in row for each in (MODEL, "tokens", "default", "j", "engine_failed"))
    code, out, _ = await run("dead", "show", "1")
    assert "Infer-Reason: engine_failed" in out
    assert "breaks-once" not in out
    assert "breaks-once" in (await run("dead", "show", "1", "--body"))[1]
    code, out, _ = await run("jobs", "show", "default", "j")
    assert "attempts: 1" in out
    assert "result: error (engine_failed)" in out
    assert re.search(r"dead letter 1: submission \d+, engine_failed:", out)

    code, out, _ = await run("dead", "replay", "1")
    assert code == 0
    assert re.fullmatch(r"1: default j is queued as submission \d+\n", out)
    submission = int(out.split()[-1])
    answer = "In the end."

    async def answered() -> bool:
        code, out, _ = await run("result", "j", "--timeout", "5")
        return code == 0 and bytes(map(int, out.split())).decode() == answer

    await eventually(answered, within=60)
    assert (await run("dead", "ls"))[1:] == ("", "no dead letters\n")
    assert await run("dead", "replay", "1") == (1, "", "inferbus: there is no dead letter 1\n")
    code, out, _ = await run("jobs", "show", "default", "j", "--json")
    report = json.loads(out)
    assert (report["result"]["status"], report["result"]["submission"]) == ("ok", submission)
    assert report["letters"] == []


async def _letters(bus: Bus, count: int) -> bool:
    return len(await names(Operator(bus))) == count


@pytest.mark.faults
async def test_a_paused_model_serves_live_requests_and_its_jobs_wait(
    workers: Fleet, server: NatsServer, run: Run
) -> None:
    code, out, _ = await run("pause", MODEL)
    assert (code, out.splitlines()) == (
        0,
        [f"{MODEL} batch: paused until it is resumed", f"{MODEL} interactive: paused until it is resumed"],
    )
    async with Client.connect(server.url) as client:
        job = await client.submit("tokens", MODEL, {"token_ids": [1]})
        answer = await client.tokens(MODEL, [1]).answer()
        assert answer.choices[0].token_ids == list(b"Well.")  # type: ignore[union-attr]
        code, out, _ = await run("jobs", "ls", "--json")
        listed = json.loads(out)
        assert [(each["job"], each["taken"]) for each in listed["jobs"]] == [(job.id, False)]
        assert all(each["paused_until"] for each in listed["queues"])
        code, out, _ = await run("jobs", "ls", "--class", "batch")
        assert "paused until it is resumed" in out
        assert job.id in out
        code, _, err = await run("workers")
        assert err.splitlines()[0] == f"{MODEL} batch: paused until it is resumed"
        code, out, _ = await run("resume", MODEL)
        assert (code, out.splitlines()) == (0, [f"{MODEL} batch: open", f"{MODEL} interactive: open"])
        result = await client.result(job, 60)
        assert result.status == "ok"
        assert (await run("workers"))[2] == ""
    assert workers.info("w1") is not None


async def test_commands_tell_how_it_went(streams: Bus, run: Run) -> None:
    for number in (1, 2, 3):
        await bury(streams, f"j{number}\x1b[2J")
    code, out, _ = await run("dead", "ls", "--model", "m")
    assert "j1\\x1b[2J" in out
    code, out, _ = await run("dead", "ls", "--json")
    assert [letter["letter"] for letter in json.loads(out)] == [1, 2, 3]
    assert await run("dead", "purge", "2", "9") == (
        1,
        "2: removed\n",
        "inferbus: there is no dead letter 9\n",
    )
    assert await run("dead", "purge", "--all", "--yes") == (0, "2 dead letters removed\n", "")
    await bury(streams, "k", subject="infer.results.acme.k")
    await bury(streams, "l")
    code, out, err = await run("dead", "replay", "--all")
    assert code == 1
    assert out.startswith("5: acme l is queued as submission ")
    submission = out.split()[-1]
    assert err.startswith("inferbus: invalid_subject: dead letter 4 ")
    assert (await run("jobs", "cancel", "acme", "l", "other"))[:2] == (
        0,
        f"l: removed submission {submission}, as no worker has ever served its model m\n",
    )
    code, out, _ = await run("jobs", "show", "acme", "l")
    assert code == 0
    assert [line.partition(":")[0] for line in out.splitlines()] == ["cancelled"]
    assert (await run("jobs", "show", "acme", "never"))[0] == 1
    for number in range(3):
        await submit(streams, f"n{number}")
    code, out, err = await run("jobs", "ls", "--limit", "2")
    assert (code, err) == (0, "1 more; --limit lists more\n")
    assert (await run("pause", "m"))[0] == 1


async def test_streams_are_shown_and_adopted(bus: Bus, run: Run) -> None:
    code, out, err = await run("streams")
    assert code == 1
    assert out.count("missing") == len(layout.CONTRACT)
    assert "--adopt" in err
    code, out, err = await run("streams", "--adopt")
    assert code == 0
    assert set(err.splitlines()) == {f"{name}: made" for name in layout.CONTRACT}
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:]}
    assert set(rows.values()) == {"ok"}
    code, out, err = await run("streams", "--streams-dead-max-bytes", str(512 * MIB))
    assert code == 1
    assert "max_bytes is 268435456, wanted 536870912" in out
    code, _, err = await run("streams", "--streams-dead-max-bytes", str(512 * MIB), "--adopt")
    assert (code, err) == (0, "INFER_DEAD: max_bytes from 268435456 to 536870912\n")
    code, out, _ = await run("streams", "--json")
    assert {each["stream"]: each["max_bytes"] for each in json.loads(out)}[layout.DEAD] == 512 * MIB


async def test_streams_are_shown_with_their_consumers_and_with_jobs_of_models_that_have_none(
    streams: Bus, run: Run
) -> None:
    await job_consumers(streams, "m", ["batch"], ack_wait=30)
    await submit(streams, "j1")
    await provision(streams, StreamSettings(), model="n")
    await submit(streams, "other", "infer.jobs.n.batch.acme.tokens")
    code, out, _ = await run("streams")
    assert code == 0
    assert "1 jobs that no consumer delivers" in out
    [consumer] = [line for line in out.splitlines() if line.startswith(layout.durable("m", "batch"))]
    assert consumer.split()[1:] == [layout.JOBS, "1", "0", "0", "0", "open", "ok"]


async def test_jobs_that_no_consumer_delivers_are_counted(streams: Bus, operator: Operator) -> None:
    async def unclaimed() -> int:
        found = {each.stream: each for each in await operator.streams(Settings())}
        return found[layout.JOBS].unclaimed

    await submit(streams, "j1")
    await submit(streams, "j2")
    assert await unclaimed() == 2
    queue = await job_queue(streams, "m", WorkerSettings())
    assert await unclaimed() == 0
    taken = await queue.take()
    assert await unclaimed() == 0
    await taken.ack()
    assert await unclaimed() == 0
    await queue.stop()
