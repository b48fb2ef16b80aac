"""Answers as a caller sees them who has nothing but nats-py."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from tests.support.eventually import eventually


class Answer:
    """The messages of one reply subject, as they come.

    Attributes:
        nc: The connection.
        subject: Where they go.
        messages: So far.
        subscription: To end early.
    """

    def __init__(self, nc: Client, subject: str) -> None:
        self.nc, self.subject = nc, subject
        self.messages: list[Msg] = []
        self.subscription: Any = None

    @classmethod
    async def on(cls, nc: Client, subject: str) -> Answer:
        """Listens; on return the server knows."""
        answer = cls(nc, subject)

        async def received(message: Msg) -> None:
            answer.messages.append(message)

        answer.subscription = await nc.subscribe(subject, cb=received)
        await nc.flush()
        return answer

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The bodies so far."""
        return [json.loads(message.data) for message in self.messages if message.data]

    @property
    def status(self) -> str | None:
        """What the end mark says, once it is there."""
        ends = [message.headers for message in self.messages if not message.data]
        return ends[0]["Infer-Status"] if ends and ends[0] else None

    async def ended(self, within: float = 15.0) -> str:
        """Waits for the end mark; what it says."""
        status = await eventually(lambda: self.status, within=within, what="end mark")
        return str(status)


async def result(nc: Client, job: str, within: float = 20.0) -> Any:
    """Waits for the stored result of one of acme's jobs."""

    async def stored() -> Any:
        try:
            return await nc.jetstream().get_last_msg("INFER_RESULTS", f"infer.results.acme.{job}")
        except NotFoundError:
            return None

    return await eventually(stored, within=within, what=f"result of {job}")
