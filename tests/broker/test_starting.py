"""What others see of a worker while its engine loads, and of a second one with its id."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.subjects import escape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.fleet.registry import Registry, Roster, WorkerExists, announce, holding
from inferbus.workers.client import Client
from inferbus.workers.config import BusSettings, Settings, WorkerSettings
from inferbus.workers.engine.launch import UNKNOWN, model_name
from inferbus.workers.engine.progress import Progress
from inferbus.workers.roles.description import Description
from inferbus.workers.roles.starting import Starting
from inferbus.workers.stack.server import NatsServer
from tests.broker.conftest import Connect
from tests.support.eventually import eventually
from tests.support.fleet import fleet, stop


def settings(server: NatsServer, worker: str = "w1") -> Settings:
    return Settings(
        bus=BusSettings(urls=(server.url,)), worker=WorkerSettings(worker=worker, announce_interval=0.1)
    )


def loading(worker: str = "w1", model: str = "m") -> WorkerInfo:
    """A new process's announcement."""
    return Description("both", WorkerSettings(worker=worker), model).loading()


def only(roster: Roster, **fields: str | None) -> Callable[[], bool]:
    """Whether one worker is announced, with these fields."""

    def holds() -> bool:
        found = roster.workers()
        return len(found) == 1 and all(getattr(found[0], name) == value for name, value in fields.items())

    return holds


async def test_a_worker_that_loads_is_listed_with_what_it_does(
    server: NatsServer, streams: Bus, tmp_path: Path
) -> None:
    progress, phase = Progress(), tmp_path / "phase"
    async with Roster(streams) as roster:
        async with Starting(settings(server), loading(), progress) as starting:
            await eventually(only(roster, state="starting", reason="starting", worker="w1", model="m"))
            progress.say("loading SGLang")
            await eventually(only(roster, state="starting", reason="loading SGLang"))
            progress.follow(phase)
            phase.write_text("loading weights")
            await eventually(only(roster, reason="loading weights"))
            starting.loaded("m")
        assert only(roster, state="starting")()


async def test_a_failed_start_is_listed_with_its_reason(server: NatsServer, streams: Bus) -> None:
    async with Roster(streams) as roster:
        async with Starting(settings(server), loading(), Progress()) as starting:
            starting.failed("no such folder: /nope")
        await eventually(only(roster, state="failed", reason="no such folder: /nope"))


async def test_a_model_whose_name_was_not_known_is_listed_once(server: NatsServer, streams: Bus) -> None:
    async with Roster(streams) as roster:
        async with Starting(settings(server), loading(model=UNKNOWN), Progress()) as starting:
            await eventually(only(roster, model=UNKNOWN))
            starting.loaded("llama")
        await eventually(lambda: not roster.workers())


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["--model-path", "/models/llama"], "/models/llama"),
        (["--tp", "2", "--model=llama"], "llama"),
        (["--model-path", "/models/llama", "--served-model-name", "mine"], "mine"),
        (["--config", "engine.yaml"], UNKNOWN),
        (["--model-path"], UNKNOWN),
    ],
)
def test_the_name_of_a_model_is_taken_from_the_engine_s_flags(argv: list[str], name: str) -> None:
    assert model_name(WorkerSettings(), argv, None) == name
    assert model_name(WorkerSettings(model="given"), argv, None) == "given"


@pytest.mark.parametrize("model", ["m", "another"])
async def test_an_id_is_one_worker_s_whatever_its_model(streams: Bus, connect: Connect, model: str) -> None:
    other = await connect()
    async with holding(streams, loading()):
        with pytest.raises(WorkerExists, match=r"'w1' is taken: a both worker of 'm' on host .* has it"):
            async with holding(other, loading(model=model)):
                pytest.fail("it must not get here")
        async with Roster(streams) as roster:
            assert [info.model for info in roster.workers()] == ["m"]
    async with holding(other, loading(model=model)):
        pass


async def test_of_two_workers_that_start_at_the_same_moment_one_goes_on(
    streams: Bus, connect: Connect
) -> None:
    others = [streams, *[await connect() for _ in range(4)]]
    begun, decided = [], asyncio.Event()

    async def begin(bus: Bus) -> None:
        async with holding(bus, loading()):
            begun.append(bus)
            await decided.wait()

    tasks = [asyncio.create_task(begin(bus)) for bus in others]
    await eventually(lambda: sum(task.done() for task in tasks) == len(tasks) - 1)
    decided.set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(begun) == 1
    assert sum(isinstance(error, WorkerExists) for error in ended) == len(tasks) - 1


async def test_a_worker_that_was_out_of_touch_gives_way_to_the_one_that_took_its_id(streams: Bus) -> None:
    async def load() -> None:
        raise RuntimeError("no engine")

    earlier, later = loading(), loading()
    assert later.started > earlier.started
    async with (
        Registry(streams, earlier, settings=WorkerSettings(), load=load) as registry,  # type: ignore[arg-type]
        Roster(streams) as roster,
    ):
        announce(streams, later)
        await eventually(registry.replaced.is_set)
        await registry.announce("draining")
        await streams.flush()
        assert only(roster, incarnation=later.incarnation, state="starting")()
    await streams.flush()
    async with Roster(streams) as roster:
        assert only(roster, incarnation=later.incarnation)()


async def test_a_second_process_with_an_id_ends_with_one_line_and_the_first_goes_on(
    server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(server, tmp_path) as found:
        first = await found.start("both", worker="w1")
        second = await found.start("both", worker="w1", ready=False)
        assert await second.wait() == 1
        [event] = found.events(second, "worker.failed")
        assert event["reason"].startswith("the worker id 'w1' is taken: ")
        assert "Traceback" not in second.log.read_text()
        info = found.info("w1")
        assert info is not None
        assert info.state == "ready"
        # A worker that was killed is replaced at once, although its announcement is still there.
        await stop(first, number=signal.SIGKILL)
        assert found.info("w1") is not None
        third = await found.start("both", worker="w1", ready=False)
        await eventually(lambda: found.events(third, "worker.ready"), within=30)
        assert await stop(third) == 0


@pytest.mark.parametrize("name", ["node-1.example.com", "m\N{LATIN SMALL LETTER O WITH DIAERESIS}we 1/2"])
async def test_a_worker_may_have_any_printable_name(server: NatsServer, tmp_path: Path, name: str) -> None:
    script = "tokenizer = true"
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        await found.start("prefill", worker=f"{name} p", ready=False)
        decode = await found.start("decode", script, worker=name, ready=False)
        await eventually(lambda: found.info(name) and found.info(f"{name} p"), within=30)
        answer = client.tokens("scripted", [1, 2], max_tokens=2)
        await answer.answer()
        assert answer.worker == name
        ping = await client.bus.request(f"$SRV.PING.inferbus-decode.{escape(name)}")
        assert msgspec.json.decode(ping.data)["id"] == escape(name)
        assert await stop(decode) == 0
