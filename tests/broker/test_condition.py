"""What `inferbus health` and `workers` say of streams, consumers, and workers that do not match."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from inferbus.schemas.fleet import Capacity, Load, WorkerInfo
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.condition import examine
from inferbus.workers.bus.fleet.registry import announce
from inferbus.workers.bus.fleet.unlike import unlike
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.bus.queue.consumers import job_consumers
from inferbus.workers.cli import main
from inferbus.workers.config import MIB, StreamSettings
from inferbus.workers.stack.server import NatsServer


def worker(name: str = "w1", *, context: int = 32_768, state: str = "ready", model: str = "m") -> WorkerInfo:
    capacity = Capacity(
        context_length=context,
        kv_tokens=1000,
        page_size=1,
        max_running=4,
        max_prefill_tokens=64,
        vocabulary=256,
    )
    described = {
        "worker": name,
        "role": "both",
        "state": state,
        "model": model,
        "kinds": ["tokens"],
        "classes": ["interactive", "batch"],
        "tokenizer": False,
        "engine": "scripted",
        "version": "0",
        "host": "h",
        "started": 1.0,
        "load": Load(slots=4),
        "capacity": capacity,
        "incarnation": name,
    }
    return msgspec.convert(msgspec.to_builtins(described), WorkerInfo)


async def health(server: NatsServer, *options: str) -> int:
    return await asyncio.to_thread(main, ["health", "--nats-url", server.url, *options])


async def consumers(bus: Bus) -> None:
    await job_consumers(bus, "m", ["interactive", "batch"], ack_wait=30.0)


async def test_a_fleet_is_healthy_with_its_streams_and_consumers(
    server: NatsServer, streams: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await consumers(streams)
    announce(streams, worker())
    await streams.flush()
    condition = await examine(streams, [worker()])
    assert condition.troubles == []
    refusing = {layout.JOBS, layout.RESULTS, layout.DEAD, layout.CANCEL, layout.OBJECTS}
    assert condition.room.keys() == refusing
    assert await health(server) == 0
    assert capsys.readouterr().err == ""


async def test_a_consumer_that_is_gone_is_named(
    server: NatsServer, streams: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await consumers(streams)
    announce(streams, worker())
    await JetStream(streams).call(f"CONSUMER.DELETE.{layout.JOBS}.{layout.durable('m', 'batch')}")
    assert await health(server) == 1
    assert "the consumer m-batch is missing: no batch job of m is delivered" in capsys.readouterr().err
    # Its own container's check is about the worker alone.
    assert await health(server, "--worker", "w1") == 0


async def test_a_stream_that_is_gone_is_named(
    server: NatsServer, streams: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await consumers(streams)
    announce(streams, worker())
    await JetStream(streams).call(f"STREAM.DELETE.{layout.RESULTS}")
    assert await health(server) == 1
    assert f"the stream {layout.RESULTS} is missing" in capsys.readouterr().err


async def test_a_stream_that_fills_is_warned_of_and_a_full_one_is_a_failure(
    server: NatsServer, bus: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await provision(bus, StreamSettings(results_max_bytes=MIB))
    await consumers(bus)
    announce(bus, worker())
    broker = JetStream(bus)
    for number, (share, code, said) in enumerate(
        ((0.85, 0, "warning: the stream INFER_RESULTS is nearly full"), (0.12, 1, "INFER_RESULTS is full"))
    ):
        await broker.store(bus.subjects.result("acme", f"j{number}"), b"x" * int(share * MIB))
        assert await health(server) == code
        assert said in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["workers", "--nats-url", server.url]) == 0
    assert "results have no room" in capsys.readouterr().err


def test_workers_of_one_name_that_serve_different_things_are_told_apart() -> None:
    assert unlike([worker("w1"), worker("w2"), worker("w3", context=128, model="other")]) == []
    [line] = unlike([worker("w1"), worker("w2", context=128), worker("w3")])
    assert line == (
        "workers of m serve different things under one name: context length 32768 (w1, w3); 128 (w2)"
    )
    assert unlike([worker("w1"), worker("w2", context=128, state="failed")]) == []


async def test_health_warns_of_workers_that_serve_different_things(
    server: NatsServer, streams: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    await consumers(streams)
    for each in (worker("w1"), worker("w2", context=128)):
        announce(streams, each)
    await streams.flush()
    assert await health(server) == 0
    assert "warning: workers of m serve different things under one name" in capsys.readouterr().err


async def test_a_worker_whose_answers_do_not_fit_makes_the_fleet_unhealthy(
    server: NatsServer, streams: Bus, capsys: pytest.CaptureFixture[str]
) -> None:
    """One large answer may be too much for a stream that is far from its limit."""
    await consumers(streams)
    announce(streams, msgspec.structs.replace(worker(), reason="maximum bytes exceeded"))
    await streams.flush()
    assert await health(server) == 1
    assert capsys.readouterr().err == "inferbus: the worker w1 takes no jobs: maximum bytes exceeded\n"
    assert await health(server, "--worker", "w1") == 0
