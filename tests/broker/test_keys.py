"""API keys in NATS: the commands and gateways with the users of deploy/nats/users.conf, on a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import nats
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from inferbus.schemas.errors import BusUnavailable, CallerError, InvalidRequest
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.provision import provision
from inferbus.workers.cli import main
from inferbus.workers.client.keys import KeyBucket, KeyExists
from inferbus.workers.config import BusSettings, GatewaySettings, StreamSettings, resolve
from inferbus.workers.gateway.keys import Keys
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.gateway import caller, gateway
from tests.support.line import Line
from tests.support.users import configuration, login

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    """With the shipped users, and the streams."""
    directory = tmp_path_factory.mktemp("keys")
    async with NatsServer(directory / "nats", sync_interval=None, extra=configuration()) as found:
        bus = await Bus.connect(login(found, "root"), name="test")
        await provision(bus, StreamSettings())
        await bus.close()
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def operator(server: NatsServer) -> AsyncIterator[Bus]:
    bus = await Bus.connect(login(server, "operator"), name="test operator")
    yield bus
    await bus.close()


def command(server: NatsServer, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """`inferbus keys …` of the operator: its exit code, what it printed, and what it said."""
    capsys.readouterr()
    user = ("--nats-url", server.url, "--nats-user", "operator", "--nats-inbox-prefix", "_INBOX_operator")
    code = main(["keys", *arguments, *user, "--nats-password", "operator"])
    told = capsys.readouterr()
    return code, told.out, told.err


async def status(http: httpx.AsyncClient, key: str, path: str = "/v1/models") -> int:
    return (await http.get(path, headers={"authorization": f"Bearer {key}"})).status_code


async def test_a_key_works_once_it_is_added_on_every_gateway_and_no_more_once_removed(
    server: NatsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = login(server, "gateway")
    async with (
        gateway(gate, stored_keys=True) as one,
        gateway(gate, stored_keys=True) as two,
        caller(one) as first,
        caller(two) as second,
    ):
        await eventually(lambda: ready(first))
        await eventually(lambda: ready(second))
        assert await status(first, "sk-" + "0" * 40) == 401
        added = await asyncio.to_thread(command, server, capsys, "add", "acme web", "--owner", "acme")
        code, key = added[0], added[1].strip()
        assert (code, key[:3], len(key) > 40) == (0, "sk-", True)
        assert key not in added[2]
        for http in (first, second):
            await eventually(lambda http=http: answered(http, key, 200))
        again = await asyncio.to_thread(command, server, capsys, "add", "acme web", "--owner", "beta")
        assert (again[0], "key_exists" in again[2]) == (1, True)
        code, listed, _ = await asyncio.to_thread(command, server, capsys, "ls", "--json")
        (shown,) = json.loads(listed)
        assert (shown["name"], shown["owner"], shown["concurrency"]) == ("acme web", "acme", None)
        assert key not in listed
        assert (await asyncio.to_thread(command, server, capsys, "rm", "acme web"))[0] == 0
        for http in (first, second):
            await eventually(lambda http=http: answered(http, key, 401))
        code, _, told = await asyncio.to_thread(command, server, capsys, "rm", "acme web")
        assert (code, "key_not_found" in told) == (1, True)
        assert "no API keys" in (await asyncio.to_thread(command, server, capsys, "ls"))[2]


async def ready(http: httpx.AsyncClient) -> bool:
    return (await http.get("/readyz")).status_code == 200


async def answered(http: httpx.AsyncClient, key: str, expected: int) -> bool:
    return await status(http, key) == expected


async def test_nothing_that_is_stored_or_logged_has_a_key_in_it(server: NatsServer, operator: Bus) -> None:
    root = await Bus.connect(login(server, "root"), name="test")
    bucket = KeyBucket(operator)
    with capture_logs() as logs:
        async with gateway(login(server, "gateway"), stored_keys=True) as url, caller(url) as http:
            key = await bucket.add("secret", "acme")
            await eventually(lambda: answered(http, key, 200))
            await status(http, key + "x")
    (stored,) = await JetStream(root).read(layout.KEYS, layout.key(root.subjects, layout.KEYS, "secret"))
    await root.close()
    assert key.encode() not in stored.data
    assert key not in str(logs)
    await bucket.remove("secret")


async def test_a_key_has_its_own_limits(server: NatsServer, operator: Bus) -> None:
    bucket = KeyBucket(operator)
    async with gateway(login(server, "gateway"), stored_keys=True) as url, caller(url) as http:
        key = await bucket.add("limited", "acme", requests_per_minute=2)
        await eventually(lambda: answered(http, key, 200))
        assert [await status(http, key) for _ in range(2)] == [200, 429]
    await bucket.remove("limited")
    with pytest.raises(InvalidRequest):
        await bucket.add("none", "acme", concurrency=0)
    for owner in ("live", ""):
        with pytest.raises(CallerError):
            await bucket.add("none", owner)
    for name in ("", "a\nb", "a" * 101):
        with pytest.raises(CallerError):
            await bucket.add(name, "acme")
    assert await bucket.all() == []


async def test_of_two_that_add_a_name_at_once_one_is_told(operator: Bus) -> None:
    bucket = KeyBucket(operator)
    done = await asyncio.gather(*(bucket.add("twice", "acme") for _ in range(4)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in done) == 1
    assert sum(isinstance(each, KeyExists) for each in done) == 3
    await bucket.remove("twice")


async def test_known_keys_work_while_nats_is_away_and_changes_are_read_when_it_is_back(
    server: NatsServer, operator: Bus
) -> None:
    line, bucket = Line(server), KeyBucket(operator)
    await line.mend()
    kept, removed = await bucket.add("kept", "acme"), await bucket.add("removed", "acme")
    through = msgspec.structs.replace(login(server, "gateway"), urls=(line.url,))
    async with gateway(through, stored_keys=True) as url, caller(url) as http:
        await eventually(lambda: answered(http, removed, 200))
        await line.cut()
        await bucket.remove("removed")
        new = await bucket.add("new", "acme")
        for key in (kept, removed):
            assert await status(http, key, "/metrics") == 200
        assert await status(http, new, "/metrics") == 401
        await line.mend()
        await eventually(lambda: answered(http, new, 200))
        assert [await status(http, each) for each in (kept, removed)] == [200, 401]
    await line.cut()
    for name in ("kept", "new"):
        await bucket.remove(name)


async def test_a_gateway_that_could_not_read_the_keys_yet_says_so_and_admits_nobody(
    server: NatsServer, tmp_path: Path
) -> None:
    """On a server without the bucket: no worker of this version was there yet."""
    async with (
        NatsServer(tmp_path / "empty", sync_interval=None) as empty,
        gateway(empty.url, stored_keys=True) as url,
        caller(url) as http,
    ):
        answer = await http.get("/v1/models", headers={"authorization": "Bearer sk-anything-at-all"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert not await ready(http)
        bus = await Bus.connect(BusSettings(urls=(empty.url,)), name="test")
        with pytest.raises(BusUnavailable, match="INFER_KEYS"):
            await KeyBucket(bus).all()
        with pytest.raises(BusUnavailable, match="INFER_KEYS"):
            await KeyBucket(bus).add("early", "acme")
        await provision(bus, StreamSettings())
        await eventually(lambda: ready(http))
        assert await status(http, "sk-anything-at-all") == 401
        await bus.close()


async def test_only_an_operator_writes_keys_and_no_client_reads_them(
    server: NatsServer, operator: Bus
) -> None:
    for user in ("acme", "gateway"):
        bus = await Bus.connect(login(server, user), name="test")
        with pytest.raises(NotPermitted):
            await KeyBucket(bus).add("mine", "globex")
        if user == "acme":
            with pytest.raises(NotPermitted):
                await KeyBucket(bus).all()
        await bus.close()


async def test_nothing_that_the_server_forwards_becomes_a_key(server: NatsServer, operator: Bus) -> None:
    """An object of a client's own, which says that it is a key, sent by the server to where keys are read."""
    bucket, subject = KeyBucket(operator), "$KV.INFER_KEYS.forged"
    await bucket.add("forged", "acme")
    before = await bucket.all()
    forged = {"owner": "globex", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}
    mine = await nats.connect(server.url, user="acme", password="acme", inbox_prefix=b"_INBOX_acme")
    await mine.request("infer.objects.acme.forged.0", json.dumps(forged).encode())
    await mine.publish("infer.objects.acme.other.0", b"{}", reply=subject)
    get = "$JS.API.DIRECT.GET.INFER_OBJECTS.infer.objects.acme.forged.0"
    async with gateway(login(server, "gateway"), stored_keys=True) as url, caller(url) as http:
        await eventually(lambda: ready(http))
        await mine.publish(get, b"", reply=subject)
        await mine.flush()
        assert await bucket.all() == before
    await mine.close()
    await bucket.remove("forged")


async def test_an_entry_that_is_no_key_is_left_out_and_logged_once(server: NatsServer) -> None:
    root = await Bus.connect(login(server, "root"), name="test")
    bucket, jetstream = KeyBucket(root), JetStream(root)
    key = await bucket.add("good", "acme")
    entries: dict[str, Any] = {
        "nonsense": b"\xff",
        "later": json.dumps(
            {"owner": "a", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z", "expires": "2027-01-01"}
        ).encode(),
        "short": b'{"owner": "a", "sha256": "00", "created": "2026-01-01T00:00:00Z"}',
    }
    for name, data in entries.items():
        await jetstream.store(f"$KV.INFER_KEYS.{name}", data)
    with capture_logs() as logs:
        assert [each.name for each in await bucket.all()] == ["good"]
        assert [each.name for each in await bucket.all()] == ["good"]
    assert len([each for each in logs if each["event"] == "keys.unreadable"]) == len(entries)
    assert key not in str(logs)
    for name in ("good", *entries):
        await bucket.remove(name)
    await root.close()


async def test_a_key_of_the_file_counts_before_the_same_one_in_nats_and_keeps_what_it_uses(
    operator: Bus, tmp_path: Path
) -> None:
    bucket = KeyBucket(operator)
    key = await bucket.add("shared", "nats")
    other = await bucket.add("other", "beta", concurrency=1)
    file = tmp_path / "keys.toml"
    file.write_text(f'[one]\nkey = "{key}"\nowner = "file"\n')
    keys = Keys(GatewaySettings(keys_file=file, stored_keys=True))
    assert keys.find(f"Bearer {key}").owner == "file"
    with pytest.raises(BusUnavailable):
        keys.find(f"Bearer {other}")
    keys.store(await bucket.all())
    first = keys.find(f"Bearer {other}")
    keys.store(await bucket.all())
    assert keys.find(f"Bearer {other}") is first
    assert keys.find(f"Bearer {key}").owner == "file"
    assert keys.owners == {"file", "nats", "beta"}
    for name in ("shared", "other"):
        await bucket.remove(name)


async def test_a_gateway_whose_keys_are_in_nats_may_listen_anywhere() -> None:
    found = resolve({"gateway_listen": "0.0.0.0:80", "gateway_stored_keys": True}, {})
    assert found.gateway.has_keys
