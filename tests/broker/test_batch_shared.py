"""Batches whose files are on the server too: another machine goes on with them."""

from __future__ import annotations

import gzip
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch import submitter
from inferbus.workers.batch.copies import SEGMENT, Copy
from inferbus.workers.batch.errors import BatchChanged, BatchHeld
from inferbus.workers.batch.runs import Options, begin, proceed, run
from inferbus.workers.batch.state import Batches
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client import Client
from inferbus.workers.stack.server import NatsServer
from tests.broker.test_batch import command, left_behind, until_written
from tests.support.batches import line, read, reconcile, write
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

SLOW = "[[rules]]\ndelay = 0.02\n"


@pytest.fixture
async def workers(server: NatsServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(server, tmp_path) as found:
        yield found


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    async with Client.connect(server.url, owner="me") as found:
        yield found


async def test_another_machine_goes_on_without_any_file_and_without_a_line_twice(
    workers: Fleet, client: Client, server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await workers.start("both", SLOW, slots=32)
    count, output = 600, tmp_path / "first" / "out.jsonl"
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, count + 1)])
    child = await workers.spawn("first", [*command(source, output), "--shared"], OWNER="me")
    await until_written(output.with_name("out.jsonl.partial"), 200)
    batches = Batches(client.bus, "me")

    async def copied() -> bool:
        return any(kept.record.input_copied for kept in await batches.all()) and await files(client.bus) > 1

    await eventually(copied)
    child.kill()
    await child.wait()
    source.unlink()
    (record,) = [kept.record for kept in await batches.all()]
    before = b"".join([part async for part in Copy(client.bus, "me", record.id, "output").read()])

    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setattr(submitter, "LEASE", 0.2)
    there = tmp_path / "second" / "out.jsonl"
    record = await run(client, await proceed(client, record.id, output=there))
    assert (record.status, record.counts.succeeded, record.host) == ("completed", count, "another")
    assert there.read_bytes().startswith(before)
    assert len(before.splitlines()) > 0
    errors = tmp_path / "second" / "out.errors.jsonl"
    reconcile(there, errors, [f"line-{n}" for n in range(1, count + 1)])
    assert await left_behind(client) == []

    # On this machine nothing is: the lines come from the server.
    fetch = [sys.executable, "-m", "inferbus.workers.cli", "batch", "fetch", record.id]
    child = await workers.spawn("fetch", fetch, OWNER="me")
    assert await child.wait() == 0
    assert child.log.read_bytes() == there.read_bytes()
    await Batches(client.bus, "me").remove(record)
    assert await files(client.bus) == 0


async def test_a_machine_whose_files_are_old_gets_the_newer_ones(
    workers: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the errors that were run again elsewhere."""
    worker = await workers.start(
        "both", '[[rules]]\nfirst_token = 7\n[rules.fault]\ndo = "fail"\n[[rules]]\n', max_attempts=1
    )
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 21)])
    output, errors = tmp_path / "in.output.jsonl", tmp_path / "in.errors.jsonl"
    here = await run(client, await begin(client, source, Options(shared=True)))
    assert (here.counts.succeeded, here.counts.errored) == (19, 1)
    worker.kill()
    await workers.start()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "another")
        elsewhere = tmp_path / "elsewhere" / "out.jsonl"
        await run(client, await proceed(client, here.id, output=elsewhere))
        again = await run(client, await proceed(client, here.id, retry=True))
        assert (again.counts.succeeded, again.counts.errored) == (20, 0)
    assert len(read(errors)) == 1
    record = await run(client, await proceed(client, here.id, output=output))
    assert record.counts.succeeded == 20
    assert output.read_bytes() == elsewhere.read_bytes()
    assert read(errors) == []


async def test_a_grown_compressed_input_is_copied_as_a_whole(
    workers: Fleet, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await workers.start()
    plain = write(tmp_path / "plain.jsonl", [line(n, prompt=n) for n in range(1, 4)])
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(gzip.compress(plain.read_bytes()))
    await run(client, await begin(client, source, Options(shared=True)))
    write(plain, [line(n) for n in range(1, 6)])
    source.write_bytes(gzip.compress(plain.read_bytes()))
    record = await run(client, await begin(client, source, Options(shared=True)))
    assert record.counts.succeeded == 5
    source.unlink()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    there = tmp_path / "there" / "out.jsonl"
    record = await run(client, await proceed(client, record.id, output=there))
    assert len(read(there)) == 5
    assert (tmp_path / "there" / "out.jsonl.input.jsonl").read_bytes() == plain.read_bytes()


async def test_without_room_for_its_copies_a_batch_goes_on_here(
    workers: Fleet, client: Client, tmp_path: Path
) -> None:
    await workers.start()
    jetstream = JetStream(client.bus)
    config = (await jetstream.call(f"STREAM.INFO.{layout.FILES}"))["config"]
    await jetstream.call(f"STREAM.UPDATE.{layout.FILES}", config | {"max_bytes": 1})
    source = write(tmp_path / "in.jsonl", [line(n) for n in range(1, 6)])
    record = await run(client, await begin(client, source, Options(shared=True)))
    assert (record.counts.succeeded, record.shared) == (5, False)
    assert await left_behind(client) == []


async def test_a_batch_whose_input_is_nowhere_says_so(workers: Fleet, client: Client, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line(1)])
    begun = await begin(client, source, Options(shared=True))
    source.unlink()
    with pytest.raises(BatchChanged, match="nor on the server as a whole"):
        await proceed(client, begun.kept.record.id)


async def test_of_two_that_add_to_one_copy_the_second_finds_out(streams: Bus) -> None:
    one, two = (Copy(streams, "o", "b", "output") for _ in range(2))
    one.add(b"a" * (SEGMENT + 1))
    await one.store()
    two.add(b"b")
    with pytest.raises(BatchHeld):
        await two.store()
    assert [part async for part in two.read()] == [b"a" * SEGMENT, b"a"]


async def test_a_segment_whose_confirmation_was_lost_is_stored_once(streams: Bus) -> None:
    one, two = (Copy(streams, "o", "b", "output") for _ in range(2))
    for copy in (one, two):
        copy.add(b"same")
        await copy.store()
    assert await two.find_end() == 4


async def test_what_is_no_segment_is_refused(streams: Bus) -> None:
    subject = streams.subjects.file("o", "b", "output", 0)
    bomb = gzip.compress(bytes(2 * SEGMENT))
    for data in (b"text", gzip.compress(b"cut")[:-9], bomb):
        await JetStream(streams).purge(layout.FILES, subject)
        await JetStream(streams).store(subject, data)
        with pytest.raises(InvalidRequest, match="no segment"):
            await Copy(streams, "o", "b", "output").find_end()


async def files(bus: Bus) -> int:
    """Segments on the server."""
    info = await JetStream(bus).call(f"STREAM.INFO.{layout.FILES}")
    return int(info["state"]["messages"])
