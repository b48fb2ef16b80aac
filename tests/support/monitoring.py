"""What a NATS server says about its clients."""

from __future__ import annotations

import asyncio
import json
import urllib.request

from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually


async def subscriptions(server: NatsServer, subject: str) -> int:
    """Number of subscriptions to exactly this subject; the server needs `monitoring`."""

    def read() -> int:
        with urllib.request.urlopen(f"{server.monitoring_url}/connz?subs=1", timeout=5) as answer:
            connections = json.load(answer)["connections"]
        return sum(each.get("subscriptions_list", []).count(subject) for each in connections)

    return await asyncio.to_thread(read)


async def subscribed(server: NatsServer, subject: str, count: int = 1) -> None:
    """Waits until there are so many subscriptions to a subject."""

    async def reached() -> bool:
        return await subscriptions(server, subject) == count

    await eventually(reached, what=f"{count} subscriptions to {subject}")
