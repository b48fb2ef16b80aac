"""What inferbus needs of nats-py's inside."""

from __future__ import annotations

from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client

from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.login import Login
from inferbus.workers.config import BusSettings


async def test_a_transport_that_is_closed_already_is_a_lost_connection_and_no_defect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def closed(*_: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    monkeypatch.setattr(Client, "_flush_pending", closed)
    client = natspy.GuardedClient(Login(BusSettings()))
    with pytest.raises(nats.errors.Error):
        await natspy.write_batch(client, b"PING\r\n")
    with pytest.raises(nats.errors.Error):
        await natspy.write_out(client)
