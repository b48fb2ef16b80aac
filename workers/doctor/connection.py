"""The connection: server, login, and the largest message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.bus.connection import natspy
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.config import BusSettings, hide_userinfo
from inferbus.workers.doctor.findings import Finding, fail, ok, warn

TOKEN_BYTES: Final = 5
"""Of one token id, at most, in the bodies of requests and hand-offs."""

OTHER_BYTES: Final = 4096
"""Of a request beside its token ids, with headers."""

LEAST_PAYLOAD: Final = 1024 * 1024
"""The server's own default."""


def refused(settings: BusSettings, error: BusUnavailable) -> Finding:
    """No connection."""
    if natspy.refuses_login(error.message):
        return fail(
            "nats",
            error.message,
            "log in as one of the server's users: --nats-user and INFERBUS_NATS_PASSWORD, --nats-creds, "
            "--nats-nkey or INFERBUS_NATS_TOKEN",
        )
    if isinstance(error, NotPermitted):
        mend = "allow the user to subscribe to it, or set --nats-inbox-prefix to inboxes that it may have"
        return fail("nats", error.message, mend)
    if "version" in error.message:
        return fail("nats", error.message, "install a newer nats-server")
    urls = ", ".join(map(hide_userinfo, settings.urls))
    return fail(
        "nats", error.message, f"start nats-server (deploy/nats/nats.conf), or set --nats-url (now {urls})"
    )


async def reached(bus: Bus) -> Finding:
    """A connection.

    Raises:
        BusUnavailable: It was lost.
    """
    asked = time.perf_counter()
    await bus.flush()
    trip = 1000 * (time.perf_counter() - asked)
    url = bus.nc.connected_url
    where = f"{url.hostname}:{url.port}" if url is not None else "a server"
    server = bus.nc.connected_server_version
    version = f"{server.major}.{server.minor}.{server.patch}"
    return ok("nats", f"nats-server {version} at {where}, round trip {trip:.1f} ms")


def payload(bus: Bus, workers: Sequence[WorkerInfo]) -> Finding:
    """Whether the largest prompt of every model fits into one message."""
    largest = int(bus.nc.max_payload)
    mend = "raise max_payload in the server's configuration; up to 8 MB is sensible"
    if largest < LEAST_PAYLOAD:
        return warn(
            "payload", f"max_payload is {largest} bytes, below the server's own default of 1 MiB", mend
        )
    tokens = (largest - OTHER_BYTES) // TOKEN_BYTES
    longer = {
        f"{info.model} takes {info.capacity.context_length}"
        for info in workers
        if info.capacity is not None and info.capacity.context_length > tokens
    }
    if longer:
        return warn("payload", f"prompts of {tokens} tokens fit; {', '.join(sorted(longer))}", mend)
    return ok("payload", f"{largest} bytes; prompts of {tokens} tokens fit")
