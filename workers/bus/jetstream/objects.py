"""Bodies over the server's `max_payload`, stored in parts: see `inferbus.schemas.objects`."""

from __future__ import annotations

import asyncio
from typing import Final

from inferbus.schemas.errors import BusUnavailable, InvalidRequest, PayloadTooLarge
from inferbus.schemas.limits import OBJECT_BYTES
from inferbus.schemas.objects import ObjectRef
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NoResponders
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream

PART: Final = 512 * 1024
"""Bytes of a part, unless the server takes less: large enough that a sync for each costs little."""

HEADROOM: Final = 1024
"""Bytes left to a part's headers."""

AT_ONCE: Final = 4
"""Parts of one object under way at a time."""


class Objects:
    """Stores, fetches and removes large bodies; implements `ObjectStore`.

    Args:
        bus: The connection.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)

    async def store(self, owner: str, data: bytes) -> ObjectRef:
        """See `ObjectStore`. Where it fails, parts may be left, which expire.

        Raises:
            PayloadTooLarge: Over `limits.OBJECT_BYTES`; nothing was stored.
            StreamFull: No room.
            BusUnavailable: NATS did not take it, or this server has no stream for objects.
        """
        if len(data) > OBJECT_BYTES:
            raise PayloadTooLarge(f"a body has at most {OBJECT_BYTES} bytes; this one has {len(data)}")
        size = min(PART, self._jetstream.max_payload - HEADROOM)
        reference = ObjectRef.of(data, part=size)
        permits = asyncio.Semaphore(AT_ONCE)

        async def store_part(number: int) -> None:
            async with permits:
                subject = self._bus.subjects.object(owner, reference.id, number)
                part = data[number * size : (number + 1) * size]
                await self._jetstream.store(subject, part, resend=True)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(reference.parts):
                    tasks.create_task(store_part(number))
        except* NoResponders:
            raise BusUnavailable(f"no stream {layout.OBJECTS}: no worker has made it yet") from None
        except* BusUnavailable as problems:
            raise problems.exceptions[0] from None
        return reference

    async def fetch(self, owner: str, reference: ObjectRef) -> bytes:
        """See `ObjectStore`."""
        parts: list[bytes] = []
        for first in range(0, reference.parts, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, reference.parts))
            subjects = [self._bus.subjects.object(owner, reference.id, number) for number in numbers]
            found = await asyncio.gather(*(self._jetstream.last(layout.OBJECTS, each) for each in subjects))
            for part in found:
                if part is None:
                    raise InvalidRequest("a part of the body is not stored any more")
                parts.append(part.data)
            if sum(map(len, parts)) > reference.size:
                break
        data = b"".join(parts)
        if not reference.describes(data):
            raise InvalidRequest("the stored body is not the one that was announced")
        return data

    async def remove(self, owner: str, reference: ObjectRef) -> None:
        """See `ObjectStore`; for workers and operators."""
        subject = self._bus.subjects.object(owner, reference.id, "*")
        await self._jetstream.purge(layout.OBJECTS, subject)
