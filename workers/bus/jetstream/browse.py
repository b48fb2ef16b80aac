"""Looking through a stream and taking single messages out of it, for operators.

A stream may hold a gigabyte, so it is read in pages. Nothing here makes a
consumer: a work queue refuses a second one with an overlapping filter, and
making one needs a permission of its own.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from typing import Any, Final

from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import STREAM_NOT_FOUND, ApiError
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream, parse_time

_MISSING: Final = "stream {} is not there: no worker has made it yet; `inferbus streams --adopt` does"


async def stream_info(bus: Bus, stream: str) -> dict[str, Any]:
    """State and configuration of a stream.

    Raises:
        ApiError: It is not there.
        BusUnavailable: JetStream is off, or may not be asked; says which.
    """
    return await _ask(bus, stream, "STREAM.INFO")


async def consumers(bus: Bus, stream: str) -> list[dict[str, Any]]:
    """State and configuration of a stream's consumers, ordered by name.

    Raises:
        ApiError: There is no such stream.
        BusUnavailable: JetStream is off, or may not be asked; says which.
    """
    infos: list[dict[str, Any]] = []
    while True:
        page = await _ask(bus, stream, "CONSUMER.LIST", {"offset": len(infos)})
        infos.extend(page["consumers"] or ())
        if not page["consumers"] or len(infos) >= page["total"]:
            return sorted(infos, key=lambda each: str(each["name"]))


async def _ask(bus: Bus, stream: str, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        return await JetStream(bus).call(f"{what}.{stream}", body)
    except ApiError as error:
        if error.err_code != STREAM_NOT_FOUND:
            raise
        raise ApiError(
            _MISSING.format(layout.in_account(stream, bus.subjects)),
            status=error.status,
            err_code=error.err_code,
        ) from None


async def pages(
    bus: Bus, stream: str, subject: str, *, first: int = 1, most: int | None = None
) -> AsyncIterator[tuple[list[Stored], int]]:
    """The messages of a subject, oldest first, page by page, each with the number of messages beyond it.

    Args:
        bus: The connection.
        stream: Of this stream.
        subject: May hold wildcards.
        first: The stream sequence to begin at.
        most: No more messages than this.

    Raises:
        NotPermitted: Naming the subject.
        BusUnavailable: The server did not answer.
    """
    taken = 0
    while most is None or taken < most:
        batch = None if most is None else most - taken
        page, beyond = await JetStream(bus).page(stream, subject, first=first, batch=batch)
        yield page, beyond
        if not page or not beyond:
            return
        taken += len(page)
        first = page[-1].sequence + 1


async def get(bus: Bus, stream: str, sequence: int) -> Stored | None:
    """One message, as the stream's leader has it: what was removed a moment ago is not there.

    Raises:
        BusUnavailable: The server did not answer.
    """
    return await JetStream(bus).get(stream, {"seq": sequence})


async def remove(bus: Bus, stream: str, sequence: int) -> bool:
    """Removes one message, its content overwritten; whether it was there.

    Raises:
        BusUnavailable: The server did not answer, or does not allow it.
    """
    try:
        await JetStream(bus).call(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    except ApiError:
        # The server has several answers for a message that is not there, none of them of its own.
        if await get(bus, stream, sequence) is None:
            return False
        raise
    return True


async def pause(bus: Bus, stream: str, consumer: str, until: dt.datetime | None) -> None:
    """Has a consumer deliver nothing until then; None: has it deliver again (nats-server 2.11).

    Raises:
        ApiError: There is no such consumer.
        BusUnavailable: The server did not answer, or does not allow it.
    """
    body = {} if until is None else {"pause_until": until.astimezone(dt.UTC).isoformat()}
    await JetStream(bus).call(f"CONSUMER.PAUSE.{stream}.{consumer}", body)


def server_time(answer: dict[str, Any]) -> dt.datetime:
    """When the server answered, by its own clock: that which also stamps what it stores."""
    return parse_time(answer["ts"]) if "ts" in answer else dt.datetime.now(dt.UTC)
