"""The embedded NATS server, which most other tests stand on."""

from __future__ import annotations

from pathlib import Path

import nats
import pytest
from nats.js.api import StreamConfig

from inferbus.workers.stack.errors import PortInUse, ProcessExited, ServerTooOld
from inferbus.workers.stack.processes import session_members
from inferbus.workers.stack.server import NatsServer


async def test_it_serves_jetstream_on_a_free_port(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(StreamConfig(name="S", subjects=["s"]))
        assert (await client.jetstream().publish("s", b"1")).seq == 1
        await client.close()


async def test_two_servers_run_side_by_side() -> None:
    async with NatsServer() as one, NatsServer() as two:
        assert one.port != two.port


async def test_it_syncs_before_it_acknowledges_unless_told_otherwise(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "a"):
        assert "sync_interval: always" in (tmp_path / "a/nats-server.conf").read_text()
    async with NatsServer(tmp_path / "b", sync_interval=None):
        assert "sync_interval" not in (tmp_path / "b/nats-server.conf").read_text()


async def test_the_largest_payload_can_be_set() -> None:
    async with NatsServer(max_payload=4096) as server:
        client = await nats.connect(server.url)
        assert client.max_payload == 4096
        await client.close()


async def test_it_starts_with_users_that_the_readiness_check_does_not_know() -> None:
    async with NatsServer(extra='authorization { user: "u", password: "p" }') as server:
        client = await nats.connect(server.url, user="u", password="p")
        await client.close()


async def test_the_monitoring_port_answers_when_asked_for() -> None:
    async with NatsServer(monitoring=True) as server:
        assert server.monitoring_port not in (0, server.port)


@pytest.mark.faults
async def test_a_killed_server_comes_back_on_the_same_port_with_its_messages() -> None:
    async with NatsServer() as server:
        port = server.port
        client = await nats.connect(server.url)
        await client.jetstream().add_stream(StreamConfig(name="S", subjects=["s"]))
        await client.jetstream().publish("s", b"kept")
        await client.close()
        await server.kill()
        assert not server.running
        await server.restart()
        assert server.port == port
        client = await nats.connect(server.url)
        assert (await client.jetstream().stream_info("S")).state.messages == 1
        await client.close()


async def test_a_port_in_use_is_said_so() -> None:
    async with NatsServer() as server:
        with pytest.raises(PortInUse, match=f"port {server.port} on 127.0.0.1 is in use"):
            await NatsServer(server.directory / "second", port=server.port).start()


async def test_a_broken_configuration_shows_what_the_server_said(tmp_path: Path) -> None:
    with pytest.raises(ProcessExited, match="config is invalid"):
        await NatsServer(tmp_path, extra="nonsense").start()


async def test_a_server_that_is_too_old_is_refused(tmp_path: Path) -> None:
    async with NatsServer(tmp_path / "real") as real:
        old = tmp_path / "old-server"
        # Greets as an old server, from the ports file that the configuration names.
        old.write_text(_OLD_SERVER)
        old.chmod(0o755)
        with pytest.raises(ServerTooOld, match=r"nats-server 2\.9\.10, but at least 2\.12"):
            await NatsServer(tmp_path / "fake", binary=old).start()
        assert real.running


async def test_nothing_is_left_when_it_stops() -> None:
    async with NatsServer() as server:
        session = server.child.pid
        directory = server.directory
        assert session_members(session) == [session]
    assert session_members(session) == []
    assert not directory.exists()


_OLD_SERVER = """#!/usr/bin/env python3
import json, pathlib, re, socket, sys
config = pathlib.Path(sys.argv[2]).read_text()
listener = socket.create_server(("127.0.0.1", 0))
ports = pathlib.Path(re.search(r'ports_file_dir: "(.*)"', config)[1])
(ports / "old.ports").write_text(json.dumps({"nats": [f"nats://127.0.0.1:{listener.getsockname()[1]}"]}))
while True:
    connection, _ = listener.accept()
    connection.sendall(b'INFO {"version": "2.9.10"}\\r\\n')
    connection.close()
"""
