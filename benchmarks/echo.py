"""Answers every request on a subject with one message, by nats-py alone: what the way itself costs."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

import nats
import uvloop
from nats.aio.msg import Msg

SUBJECT: Final = "echo"
_END: Final = {"Infer-Status": "ok", "Infer-Chunks": "1"}


async def main(url: str) -> None:
    """Until it is killed."""
    client = await nats.connect(url)

    async def answer(message: Msg) -> None:
        await client.publish(message.reply, b"{}")
        await client.publish(message.reply, b"", headers=_END)

    await client.subscribe(SUBJECT, cb=answer)
    await client.flush()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
