"""Removing what is stored of one owner: a job's result, or the files of a batch."""

from __future__ import annotations

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import BusUnavailable, ErrorAnswer
from inferbus.schemas.headers import Removable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream


async def purge(bus: Bus, owner: str, name: str, what: Removable) -> None:
    """Removes it, with the permission to purge the stream.

    Args:
        bus: The connection.
        owner: Whose.
        name: The job's id, or the batch's.
        what: Of it.

    Raises:
        NotPermitted: This user may not purge the stream.
        BusUnavailable: The server did not answer.
    """
    subjects = bus.subjects
    stream, subject = {
        "result": (layout.RESULTS, subjects.result(owner, name)),
        "files": (layout.FILES, subjects.files_of(owner, name)),
    }[what]
    await JetStream(bus).purge(stream, subject)


class Removal:
    """Removes directly where that is permitted, and else through a worker.

    Args:
        bus: The connection.
        owner: Whose things.
    """

    def __init__(self, bus: Bus, owner: str) -> None:
        self._bus = bus
        self._owner = owner
        self._permitted = True

    async def remove(self, name: str, what: Removable) -> None:
        """See `purge`.

        Raises:
            NotPermitted: Neither is permitted.
            BusUnavailable: The server did not answer, or no worker did.
        """
        if self._permitted:
            try:
                return await purge(self._bus, self._owner, name, what)
            except NotPermitted:
                self._permitted = False
        subject = self._bus.subjects.remove(self._owner, name)
        answer = await self._bus.request(subject, b"", {headers.REMOVE: what})
        if answer.data:
            raise BusUnavailable(codec.decode_any(answer.data, ErrorAnswer).error.message)
        return None
