"""Workers that announce themselves and see each other, over a real key-value bucket."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from inferbus.schemas import fleet
from inferbus.schemas.fleet import Load, WorkerInfo
from inferbus.schemas.subjects import escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import ApiError
from inferbus.workers.bus.fleet.registry import Registry, Roster, announce, entry_subject
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.config import WorkerSettings
from inferbus.workers.observe import logs
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually


def info(worker: str = "w1", **fields: Any) -> WorkerInfo:
    described: dict[str, Any] = {
        "worker": worker,
        "role": "prefill",
        "state": "ready",
        "model": "meta/llama",
        "kinds": [],
        "tokenizer": True,
        "engine": "scripted",
        "version": "0",
        "host": "h",
        "started": 1.0,
        "load": Load(slots=2),
        "incarnation": secrets.token_hex(4),
    }
    return WorkerInfo(**(described | fields))


Join = Callable[..., Awaitable[Registry]]


@pytest.fixture
async def join(streams: Bus) -> AsyncIterator[Join]:
    """Announces workers, and takes them away afterwards."""
    async with AsyncExitStack() as stack:

        async def join(
            worker: str = "w1",
            *,
            bus: Bus = streams,
            load: Load | None = None,
            interval: float = 0.1,
            **fields: Any,
        ) -> Registry:
            async def now() -> Load:
                return load or Load(slots=2)

            registry = Registry(
                bus, info(worker, **fields), settings=WorkerSettings(announce_interval=interval), load=now
            )
            return await stack.enter_async_context(registry)

        yield join


def names(registry: Registry | Roster) -> list[str]:
    return [each.worker for each in registry.workers()]


async def test_workers_see_each_other_whoever_came_first(join: Join, connect: Connect) -> None:
    first = await join("w1")
    second = await join("w2", bus=await connect(), role="decode")
    assert names(second) == ["w1", "w2"]
    await first.wait_for(lambda workers: len(workers) == 2, timeout=5)
    assert names(first) == ["w1", "w2"]
    assert [each.worker for each in second.workers(role="prefill")] == ["w1"]


async def test_workers_of_other_models_are_not_seen_except_by_those_who_ask_for_all(
    join: Join, streams: Bus
) -> None:
    registry = await join("w1")
    await join("w2", model="other")
    assert names(registry) == ["w1"]
    async with Roster(streams) as everybody:
        assert sorted(names(everybody)) == ["w1", "w2"]


async def test_load_and_state_are_told(join: Join) -> None:
    load = Load(slots=2)
    registry, other = await join("w1", load=load), await join("w2")
    changes: list[None] = []
    other.on_change(lambda: changes.append(None))
    load.busy = 1
    await other.wait_for(lambda workers: workers[0].load.busy == 1, timeout=5)
    await registry.announce("draining")
    await other.wait_for(lambda workers: workers[0].state == "draining", timeout=5)
    assert changes


async def test_a_worker_that_leaves_is_gone_at_once(streams: Bus, join: Join) -> None:
    watching = await join("w1")

    async def load() -> Load:
        return Load(slots=1)

    async with Registry(streams, info("w2"), settings=WorkerSettings(), load=load):
        await watching.wait_for(lambda workers: len(workers) == 2, timeout=5)
    await watching.wait_for(lambda workers: len(workers) == 1, timeout=1)
    async with Roster(streams) as later:
        assert names(later) == ["w1"]


async def test_a_worker_that_falls_silent_is_dropped(streams: Bus) -> None:
    """Here at once when its time is over, whether or not the bucket tells."""
    announce(streams, info("silent"))
    await streams.flush()
    seconds = time.monotonic()
    async with Roster(streams, "meta/llama", ttl=0.5, clock=lambda: seconds) as roster:
        assert names(roster) == ["silent"]
        changes: list[None] = []
        roster.on_change(lambda: changes.append(None))
        seconds += 0.6
        assert names(roster) == []
        await eventually(lambda: changes)


async def test_a_worker_that_was_dropped_is_back_with_its_next_announcement(streams: Bus, join: Join) -> None:
    async with Roster(streams) as roster:
        await join(interval=0.5)
        [here] = await roster.wait_for(bool, 5)
        roster.drop(here)
        assert roster.workers() == []
        assert await roster.wait_for(bool, 5)


async def test_the_bucket_forgets_a_worker_that_falls_silent(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inferbus.workers.bus.jetstream.provision import provision
    from inferbus.workers.config import StreamSettings

    monkeypatch.setattr(layout, "ANNOUNCE_TTL", 1.0)
    await provision(bus, StreamSettings())
    announce(bus, info("silent"))
    await bus.flush()

    async def gone() -> bool:
        return not await JetStream(bus).read(layout.WORKERS, f"$KV.{fleet.BUCKET}.*.*")

    assert not await gone()
    await eventually(gone)


async def test_a_worker_that_could_not_start_leaves_word_of_why(streams: Bus) -> None:
    announce(streams, info("w1", state="failed", reason="no such model"))
    await streams.flush()
    async with Roster(streams) as roster:
        assert [each.reason for each in roster.workers()] == ["no such model"]


async def test_a_worker_that_failed_stays_listed_until_it_expires(streams: Bus, join: Join) -> None:
    watching = await join("w1")

    async def load() -> Load:
        return Load(slots=1)

    async with Registry(streams, info("w2"), settings=WorkerSettings(), load=load) as failing:
        await failing.announce("failed", reason="engine lost")
    await streams.flush()
    await watching.wait_for(
        lambda workers: [each.state for each in workers] == ["ready", "failed"], timeout=5
    )


@pytest.mark.faults
async def test_after_a_crash_of_the_server_everybody_is_seen_again(
    join: Join, connect: Connect, server: NatsServer, streams: Bus
) -> None:
    registry = await join("w1")
    await join("w2", bus=await connect())
    await registry.wait_for(lambda workers: len(workers) == 2, timeout=5)
    await server.kill()
    await eventually(lambda: not streams.connected)
    for each in registry.workers():
        registry.drop(each)
    await server.restart()
    await registry.wait_for(lambda workers: len(workers) == 2, timeout=10)


async def test_what_is_not_an_announcement_is_left_out(streams: Bus, join: Join) -> None:
    registry = await join("w1")
    streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.stranger", b"not json")
    streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.newer", msgspec.json.encode({"worker": 1}))
    streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.bytes", b'{"worker": "\xff"}')
    await streams.flush()
    await streams.flush()
    assert names(registry) == ["w1"]
    assert streams.callback_errors == 0
    async with Roster(streams) as late:
        assert names(late) == ["w1"]


def hostile() -> dict[str, bytes]:
    """Announcements that no worker makes, by their keys."""
    names = {"empty": {"worker": ""}, "long": {"worker": "x" * 200}, "other": {"worker": "w9"}}
    numbers = info("negative", capacity=None, load=Load(slots=-1))
    many = msgspec.structs.replace(info("many"), kinds=["chat"] * 20_000)
    control = info("\x1b[31m\r\n\x9b")
    return {
        "deep": b'{"x":' + b"[" * 3000,
        "deeper": b'{"x":' + b"[" * 100_000,
        "inside": msgspec.json.encode(info("inside"))[:-1] + b',"x":' + b"[" * 3000 + b"]" * 3000 + b"}",
        **{name: msgspec.json.encode(info(**fields)) for name, fields in names.items()},
        "negative": msgspec.json.encode(numbers),
        "many": msgspec.json.encode(many),
        escape(control.worker): msgspec.json.encode(control),
    }


async def test_hostile_announcements_are_left_out_with_one_warning_each(
    streams: Bus, join: Join, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(format="json")
    registry = await join("w1")
    for _ in range(3):
        for name, data in hostile().items():
            streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.{name}", data)
    forwarded = msgspec.json.encode(info("w2"))
    streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.w2", forwarded, {"Nats-Stream": "INFER_RESULTS"})
    await streams.flush()
    await join("w3")
    await registry.wait_for(lambda workers: len(workers) == 2, timeout=5)
    assert names(registry) == ["w1", "w3"]
    assert streams.callback_errors == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "registry.unreadable" in line]
    # `w3` has a registry of its own, which reads the entries of before.
    assert len(warned) <= 2 * (len(hostile()) + 1)
    assert all(len(line) < 1000 for line in warned)
    async with Client.connect(streams.nc.connected_url.geturl()) as client:
        assert {each.worker for each in await client.workers()} <= {"w1", "w2", "w3"}


async def test_announcements_of_other_versions_are_read(streams: Bus) -> None:
    older = msgspec.to_builtins(info("older")) | {"incarnation": ""}
    del older["incarnation"]
    newer = msgspec.to_builtins(info("newer")) | {"zone": {"name": "a"}, "ranks": [1, 2]}
    async with Roster(streams) as roster:
        for each in (older, newer):
            streams.send(f"$KV.{fleet.BUCKET}.meta=2Fllama.{each['worker']}", msgspec.json.encode(each))
        await roster.wait_for(lambda workers: len(workers) == 2, timeout=5)


async def test_a_load_that_cannot_be_told_does_not_silence_a_worker(streams: Bus) -> None:
    async def load() -> Load:
        raise RuntimeError("the engine is busy")

    settings = WorkerSettings(announce_interval=0.1)
    async with Registry(streams, info("w1"), settings=settings, load=load), Roster(streams) as roster:
        heard: list[Message] = []
        await streams.subscribe(entry_subject(streams.subjects), heard.append)
        await eventually(lambda: len(heard) >= 3)
        assert names(roster) == ["w1"]


async def test_waiting_for_workers_that_do_not_come_ends(join: Join) -> None:
    registry = await join("w1")
    with pytest.raises(TimeoutError):
        await registry.wait_for(lambda workers: len(workers) == 2, timeout=0.1)


async def test_without_the_bucket_the_start_fails(bus: Bus) -> None:
    async def load() -> Load:
        return Load(slots=1)

    with pytest.raises(ApiError, match="stream not found"):
        async with Registry(bus, info(), settings=WorkerSettings(), load=load):
            pytest.fail("it must not get here")


async def test_plain_nats_tools_can_read_the_bucket(join: Join, streams: Bus) -> None:
    await join("w1")
    bucket = await streams.js.key_value(fleet.BUCKET)
    assert await bucket.keys() == ["meta=2Fllama.w1"]
    entry = await bucket.get("meta=2Fllama.w1")
    assert msgspec.json.decode(entry.value or b"", type=WorkerInfo).worker == "w1"
