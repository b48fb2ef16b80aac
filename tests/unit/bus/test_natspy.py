"""What inferbus needs of nats-py's inside."""

from __future__ import annotations

from typing import Any

import nats.errors
import pytest

from workers.bus import natspy


class Closed:
    """A client on uvloop whose transport is closed, and which has not noticed yet."""

    async def _send_command(self, frames: bytes) -> None:
        return

    async def _flush_pending(self, **_: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


async def test_a_transport_that_is_closed_already_is_a_lost_connection_and_no_defect() -> None:
    with pytest.raises(nats.errors.Error):
        await natspy.write_batch(Closed(), b"PING\r\n")
    with pytest.raises(nats.errors.Error):
        await natspy.write_out(Closed())
