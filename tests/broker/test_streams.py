"""Provisioning on a real server: repeatable, and never for the worse."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import CLASSES, KINDS, Subjects
from inferbus.workers.batch.state import Batches
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import ApiError, NoResponders, NotPermitted, ProvisionError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.models import covers
from inferbus.workers.bus.jetstream.provision import ensure_consumer, provision
from inferbus.workers.bus.jetstream.shares import ResultShares
from inferbus.workers.bus.queue import job_queue as job_queue_module
from inferbus.workers.bus.queue.consumers import job_consumers, job_queue
from inferbus.workers.bus.queue.job_queue import JobQueue
from inferbus.workers.config import MIB, BusSettings, StreamSettings, WorkerSettings
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually


async def config(bus: Bus, stream: str) -> dict[str, Any]:
    return dict((await JetStream(bus).call(f"STREAM.INFO.{stream}"))["config"])


async def test_every_stream_of_the_contract_is_made(streams: Bus) -> None:
    names = (await JetStream(streams).call("STREAM.NAMES"))["streams"]
    assert sorted(names) == [
        "INFER_CANCEL",
        "INFER_DEAD",
        "INFER_FILES",
        "INFER_JOBS",
        "INFER_OBJECTS",
        "INFER_RESULTS",
        "INFER_STREAM",
        "KV_INFER_BATCHES",
        "KV_INFER_KEYS",
        "KV_INFER_WORKERS",
    ]
    jobs = await config(streams, layout.JOBS)
    assert (jobs["retention"], jobs["storage"], jobs["discard"]) == ("workqueue", "file", "new")
    assert (await config(streams, layout.STREAM))["persist_mode"] == "async"
    assert (await config(streams, layout.CANCEL))["max_msgs_per_subject"] == layout.CANCELS_KEPT


async def test_doing_it_again_changes_nothing(streams: Bus, connect: Connect) -> None:
    before = [
        await config(streams, each["name"])
        for each in layout.stream_configs(streams.subjects, StreamSettings())
    ]
    others = [await connect() for _ in range(3)]
    await asyncio.gather(*(provision(bus, StreamSettings()) for bus in (streams, *others)))
    after = [await config(streams, each["name"]) for each in before]
    assert after == before


async def test_many_workers_may_start_at_once(connect: Connect) -> None:
    buses = [await connect() for _ in range(8)]

    async def start(bus: Bus) -> None:
        await provision(bus, StreamSettings())
        await job_queue(bus, "m", WorkerSettings())

    await asyncio.gather(*(start(bus) for bus in buses))


async def test_what_is_weaker_is_refused_with_every_field_and_left_alone(streams: Bus) -> None:
    settings = StreamSettings(jobs_max_bytes=2048 * MIB, results_max_age=30 * 86400.0)
    before = await config(streams, layout.JOBS)
    with pytest.raises(ProvisionError) as refused:
        await provision(streams, settings)
    for part in (
        "stream INFER_JOBS: max_bytes is 1073741824, wanted 2147483648",
        "stream INFER_RESULTS: max_age is 604800 s, wanted 2.592e+06 s",
        "inferbus streams --adopt",
    ):
        assert part in refused.value.message
    assert await config(streams, layout.JOBS) == before


async def test_what_is_stronger_is_kept(streams: Bus) -> None:
    await provision(
        streams, StreamSettings(jobs_max_bytes=16 * MIB, stream_max_age=60.0, duplicate_window=60.0)
    )
    assert (await config(streams, layout.JOBS))["max_bytes"] == 1024 * MIB


async def test_adopting_raises_what_is_weaker_and_lowers_nothing(streams: Bus) -> None:
    await provision(
        streams, StreamSettings(jobs_max_bytes=2048 * MIB, results_max_bytes=16 * MIB), adopt=True
    )
    assert (await config(streams, layout.JOBS))["max_bytes"] == 2048 * MIB
    assert (await config(streams, layout.RESULTS))["max_bytes"] == 1024 * MIB
    await provision(streams, StreamSettings(jobs_max_bytes=2048 * MIB))


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({"retention": "limits"}, "retention is limits, wanted workqueue"),
        ({"storage": "memory"}, "storage is memory, wanted file"),
        ({"discard": "old", "discard_new_per_subject": False}, "discard is old, wanted new"),
        ({"max_msgs": 100}, "max_msgs is 100, wanted unlimited"),
        ({"allow_direct": False}, "allow_direct is off, wanted on"),
    ],
)
async def test_a_stream_of_somebody_else_is_not_taken_over(
    bus: Bus, there: dict[str, Any], message: str
) -> None:
    """`discard: old`, the server's default, would drop the oldest jobs without a word."""
    ours = next(each for each in layout.stream_configs(bus.subjects, StreamSettings()))
    ours = layout.new_stream(ours, bus.subjects)
    await JetStream(bus).call("STREAM.CREATE.INFER_JOBS", ours | there)
    with pytest.raises(ProvisionError, match=message):
        await provision(bus, StreamSettings())


async def test_a_consumer_that_is_weaker_is_refused_and_can_be_adopted(streams: Bus) -> None:
    consumer = layout.job_consumer(streams.subjects, "m", "batch", ack_wait=10)
    await ensure_consumer(streams, layout.JOBS, consumer | {"max_deliver": 3})
    weaker = "ack_wait is 10 s, wanted 30 s; max_deliver is 3, wanted unlimited"
    with pytest.raises(ProvisionError, match=weaker):
        await job_consumers(streams, "m", ["batch"], ack_wait=30)
    [adopted] = await job_consumers(streams, "m", ["batch"], ack_wait=30, adopt=True)
    assert adopted.ack_wait == 30
    [kept] = await job_consumers(streams, "m", ["batch"], ack_wait=5)
    assert kept.ack_wait == 30


async def test_model_names_of_any_length_and_spelling_have_consumers(streams: Bus) -> None:
    names = ["meta-llama/Llama 3.1", "模型" * 21, "x" * 128, "x" * 127 + "y", "a.b", "a-interactive", "a"]
    for name in names:
        await job_consumers(streams, name, ["interactive", "batch"], ack_wait=30)
    info = await JetStream(streams).call(f"STREAM.INFO.{layout.JOBS}")
    assert info["state"]["consumer_count"] == 2 * len(names)


@pytest.mark.parametrize(
    ("stream", "subject"), [(layout.JOBS, "infer.jobs.m.batch.o.chat"), (layout.RESULTS, "infer.results.o.j")]
)
async def test_a_stream_that_was_made_anew_gives_no_number_a_second_time(
    streams: Bus, stream: str, subject: str
) -> None:
    """A result of submission 1 would else be taken for that of a later submission 1."""
    before = [(await JetStream(streams).store(subject, b"{}")).sequence for _ in range(50)]
    await JetStream(streams).call(f"STREAM.DELETE.{stream}")
    await provision(streams, StreamSettings(), model="m")
    assert (await JetStream(streams).store(subject, b"{}")).sequence > max(before)


async def test_jobs_are_taken_of_served_models_and_of_known_classes_and_kinds_only(streams: Bus) -> None:
    for kind in KINDS:
        for job_class in CLASSES:
            await JetStream(streams).store(streams.subjects.job("m", job_class, "o", kind), b"{}")
    for subject in (
        "infer.jobs.m.batch.o.images",
        "infer.jobs.m.urgent.o.chat",
        "infer.jobs.m.batch.chat",
        "infer.jobs.m.batch.o.p.chat",
        "infer.jobs.other.batch.o.chat",
        "infer.jobs.m",
    ):
        with pytest.raises(NoResponders):
            await JetStream(streams).store(subject, b"{}")


async def test_an_owner_keeps_its_newest_results_and_nobody_elses_are_removed(streams: Bus) -> None:
    shares = ResultShares(streams, most=40)
    for number in range(42):
        await JetStream(streams).store(f"infer.results.o.{number}", b"{}")
        await JetStream(streams).store(f"infer.attempts.o.{number}", b"")
    await JetStream(streams).store("infer.results.p.first", b"{}")
    assert [shares.due("o"), shares.due("p"), shares.due("o")] == [False, False, True]
    await shares.enforce("o")
    await shares.enforce("p")
    kept = await JetStream(streams).read(layout.RESULTS, "infer.results.o.*")
    assert [each.subject for each in kept] == [f"infer.results.o.{number}" for number in range(2, 42)]
    assert len(await JetStream(streams).read(layout.RESULTS, "infer.results.p.*")) == 1
    assert len(await JetStream(streams).read(layout.RESULTS, "infer.attempts.o.*")) == 42


async def test_an_owners_open_jobs_are_bounded_by_default(streams: Bus) -> None:
    jobs = await config(streams, layout.JOBS)
    assert (jobs["max_msgs_per_subject"], jobs["discard_new_per_subject"]) == (10_000, True)


def accepted(bus: Bus, model: str) -> Callable[[], Awaitable[bool]]:
    """Whether a job of a model is stored."""

    async def stored() -> bool:
        try:
            await JetStream(bus).store(bus.subjects.job(model, "batch", "o", "chat"), b"{}")
        except NoResponders:
            return False
        return True

    return stored


async def test_a_model_whose_jobs_the_stream_no_longer_takes_is_served_again(
    streams: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue_module, "FOLLOW_INTERVAL", 0.2)
    queue = await job_queue(streams, "m", WorkerSettings())
    taking = asyncio.ensure_future(queue.take())
    before = await config(streams, layout.JOBS)
    await JetStream(streams).call(
        f"STREAM.UPDATE.{layout.JOBS}", before | {"subjects": [layout.no_jobs(streams.subjects)]}
    )
    await eventually(accepted(streams, "m"), within=30)
    assert (await taking).message.data == b"{}"
    await queue.stop()


async def test_workers_of_many_models_that_start_at_once_are_all_served(connect: Connect) -> None:
    buses = [await connect() for _ in range(6)]

    async def start(bus: Bus, model: str) -> None:
        await provision(bus, StreamSettings())
        queue = await job_queue(bus, model, WorkerSettings())
        with pytest.raises(TimeoutError):
            # Its subjects may be lost to a slower worker for a while, until the queue looks after them.
            async with asyncio.timeout(0.5):
                await queue.take()
        queues.append(queue)

    queues: list[JobQueue] = []
    async with asyncio.TaskGroup() as group:
        for number, bus in enumerate(buses):
            group.create_task(start(bus, f"m{number}"))
    for number in range(len(buses)):
        await eventually(accepted(buses[0], f"m{number}"), within=30)
    for queue in queues:
        await queue.stop()
    assert "infer.jobs" not in (await config(buses[0], layout.JOBS))["subjects"]


async def test_a_stream_that_takes_the_jobs_of_every_model_stays_as_it_is(bus: Bus) -> None:
    ours = next(each for each in layout.stream_configs(bus.subjects, StreamSettings()))
    await JetStream(bus).call("STREAM.CREATE.INFER_JOBS", ours | {"subjects": ["infer.jobs.>"]})
    await provision(bus, StreamSettings(), model="m")
    await job_consumers(bus, "n", ["batch"], ack_wait=30)
    assert (await config(bus, layout.JOBS))["subjects"] == ["infer.jobs.>"]


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.>", "a.b", True), ("a.>", "a", False), ("a.>", "a.>", True), ("a.*", "a.>", False),
        ("a.*.c", "a.*.c", True), ("a.b.c", "a.*.c", False), ("a.*", "a.b.c", False), ("a.b.c", "a.b", False),
        (">", "a.*", True), ("b.>", "a.b", False),
    ],
)  # fmt: skip
def test_a_subject_covers_what_it_matches(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


async def test_a_missing_permission_is_told_with_its_subject(tmp_path: Path) -> None:
    users = """accounts { A { jetstream: enabled, users: [ { user: "u", password: "p", permissions: {
        publish: { deny: ["$JS.API.STREAM.CREATE.>"] } } } ] } }"""
    async with NatsServer(tmp_path, extra=users) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        with pytest.raises(NotPermitted, match=r"STREAM\.CREATE\.INFER_JOBS"):
            await provision(bus, StreamSettings())
        await bus.close()


async def test_jetstream_is_off(tmp_path: Path) -> None:
    users = 'accounts { A { users: [ { user: "u", password: "p" } ] } }'
    async with NatsServer(tmp_path, extra=users) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        with pytest.raises(BusUnavailable, match="is it enabled"):
            await provision(bus, StreamSettings())
        await bus.close()


async def test_a_disk_that_is_too_small_is_told(tmp_path: Path) -> None:
    """The streams' room is reserved when they are made."""
    limits = "accounts { A { jetstream: { max_file: 100MB }, users: [ { user: u, password: p } ] } }"
    async with NatsServer(tmp_path, extra=limits) as server:
        bus = await Bus.connect(BusSettings(urls=(server.url,), user="u", password="p"), name="test")
        with pytest.raises(BusUnavailable, match=r"STREAM\.CREATE\.INFER_JOBS: there is no room: .*storage"):
            await provision(bus, StreamSettings())
        await bus.close()


async def test_deployments_with_prefixes_of_their_own_share_nothing(streams: Bus, connect: Connect) -> None:
    other = await connect(prefix="acme.llm")
    await provision(other, StreamSettings(), model="m")
    names = (await JetStream(streams).call("STREAM.NAMES"))["streams"]
    assert len(names) == 2 * len(layout.CONTRACT)
    assert {"INFER_JOBS", "ACME_LLM_JOBS", "KV_INFER_WORKERS", "KV_ACME_LLM_WORKERS"} <= set(names)
    for bus in (streams, other):
        ack = await JetStream(bus).store(
            bus.subjects.job("m", "batch", "o", "chat"), bus.subjects.prefix.encode(), {"Nats-Msg-Id": "same"}
        )
        assert not ack.duplicate
        await JetStream(bus).store(bus.subjects.result("o", "j"), bus.subjects.prefix.encode(), expect=0)
    for bus in (streams, other):
        queue = await job_queue(bus, "m", WorkerSettings())
        taken = await queue.take()
        assert taken.message.data == bus.subjects.prefix.encode()
        await taken.ack()
        await queue.stop()
        assert len(await JetStream(bus).read(layout.RESULTS, bus.subjects.all("results"))) == 1
        assert not await JetStream(bus).read(layout.JOBS, bus.subjects.all("jobs"))


@pytest.mark.parametrize("adopt", [False, True])
async def test_a_prefix_whose_names_are_taken_by_another_is_refused(
    streams: Bus, connect: Connect, adopt: bool
) -> None:
    other = await connect(prefix="Infer")
    before = await config(streams, layout.STREAM)
    with pytest.raises(ProvisionError, match="a deployment with another prefix than 'Infer'"):
        await provision(other, StreamSettings(), adopt=adopt)
    assert await config(streams, layout.STREAM) == before


@pytest.mark.faults
async def test_chunks_and_workers_are_still_there_after_a_crash_of_the_server(
    streams: Bus, server: NatsServer
) -> None:
    """A stream in memory would be gone as a whole, and its job could not be continued."""
    for number in range(500):
        await JetStream(streams).store("infer.stream.o.j", b"%d" % number)
    await server.kill()
    await server.restart()
    await streams.until_connected()

    async def found() -> list[int]:
        try:
            chunks = await JetStream(streams).read(layout.STREAM, "infer.stream.o.j")
        except BusUnavailable:
            return []
        return [int(chunk.data) for chunk in chunks]

    kept = await eventually(found)
    # The last few may be lost, none before them.
    assert kept == list(range(len(kept)))
    assert len(kept) > 400
    assert (await JetStream(streams).store("infer.stream.o.j", b"more")).sequence == len(kept) + 1
    assert (await config(streams, layout.WORKERS))["max_msgs_per_subject"] == 1


def test_replicated_streams_keep_chunks_in_memory() -> None:
    """They cannot be written behind the acknowledgement, and outlive the loss of one server anyway."""
    configs = {each["name"]: each for each in layout.stream_configs(Subjects(), StreamSettings(replicas=3))}
    assert configs[layout.STREAM]["storage"] == "memory"
    assert "persist_mode" not in configs[layout.STREAM]
    assert configs[layout.JOBS]["storage"] == "file"


async def test_an_owner_has_no_more_open_jobs_than_it_may(streams: Bus, connect: Connect) -> None:
    settings = StreamSettings(owner_jobs=2)
    with pytest.raises(ProvisionError, match="max_msgs_per_subject is 10000, wanted 2"):
        await provision(streams, settings)
    await provision(streams, settings, adopt=True)
    await provision(streams, StreamSettings())  # without an opinion of one's own, that of the stream holds
    subject, other = (streams.subjects.job("m", "batch", owner, "chat") for owner in ("o", "p"))
    queue = await job_queue(streams, "m", WorkerSettings())
    for _ in range(2):
        await JetStream(streams).store(subject, b"{}")
    with pytest.raises(ApiError, match="too many messages on this subject"):
        await JetStream(streams).store(subject, b"{}")
    await JetStream(streams).store(other, b"{}")
    first = await queue.take()
    with pytest.raises(ApiError, match="too many messages on this subject"):
        await JetStream(streams).store(subject, b"{}")
    await first.ack()
    await JetStream(streams).store(subject, b"{}")
    await queue.stop()


async def test_batches_of_two_prefixes_are_apart(streams: Bus, connect: Connect) -> None:
    other = await connect(prefix="acme.llm")
    await provision(other, StreamSettings())
    await Batches(streams, "o").ask_cancel("batch_1")
    assert await Batches(streams, "o").cancel_asked("batch_1")
    assert not await Batches(other, "o").cancel_asked("batch_1")


async def test_without_the_streams_a_batch_says_what_is_missing(bus: Bus) -> None:
    with pytest.raises(BusUnavailable, match="KV_INFER_BATCHES: has a worker been started"):
        await Batches(bus, "o").get("batch_1")
