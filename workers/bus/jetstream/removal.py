"""Removing what is stored of one owner: a job's result, the files of a batch, what its jobs have left."""

from __future__ import annotations

from collections.abc import AsyncIterator

from inferbus.schemas import codec, headers
from inferbus.schemas.errors import BusUnavailable, ErrorAnswer
from inferbus.schemas.headers import Removable
from inferbus.schemas.subjects import unescape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.jetstream import browse, layout
from inferbus.workers.bus.jetstream.client import JetStream


async def purge(bus: Bus, owner: str, name: str, what: Removable, first: int = 1) -> None:
    """Removes it, with the permission to purge the stream.

    Args:
        bus: The connection.
        owner: Whose.
        name: The job's id, or the batch's.
        what: Of it.
        first: The stream sequence at which jobs of a batch begin.

    Raises:
        NotPermitted: This user may not purge the stream.
        BusUnavailable: The server did not answer.
    """
    subjects = bus.subjects
    if what == "jobs":
        return await _sweep(bus, owner, name, first)
    stream, subject = {
        "result": (layout.RESULTS, subjects.result(owner, name)),
        "files": (layout.FILES, subjects.files_of(owner, name)),
    }[what]
    await JetStream(bus).purge(stream, subject)
    return None


async def _sweep(bus: Bus, owner: str, batch: str, first: int) -> None:
    """Removes the jobs `<batch>-…` that are queued, their results, and the counts of their attempts."""
    subjects, jetstream = bus.subjects, JetStream(bus)
    async for page, _ in browse.pages(bus, layout.JOBS, subjects.jobs_of_owner(owner), first=first):
        for stored in page:
            if stored.headers.get(headers.JOB_ID, "").startswith(f"{batch}-"):
                await browse.remove(bus, layout.JOBS, stored.sequence)
    # After the queue: what a job leaves that was still taken is among these.
    for every in (subjects.results_of(owner), subjects.attempts_of(owner)):
        job = every.split(".").index("*")
        # NATS has no wildcard for a part of a name. Read as a whole, since a purge would change the pages.
        for subject in [each async for each in _held(jetstream, layout.RESULTS, every)]:
            if unescape(subject.split(".")[job]).startswith(f"{batch}-"):
                await jetstream.purge(layout.RESULTS, subject)


async def _held(jetstream: JetStream, stream: str, every: str) -> AsyncIterator[str]:
    """The subjects of a stream that a filter covers."""
    offset = 0
    while True:
        info = await jetstream.call(f"STREAM.INFO.{stream}", {"subjects_filter": every, "offset": offset})
        found = info["state"].get("subjects") or {}
        for subject in found:
            yield subject
        offset += len(found)
        if not found or offset >= info.get("total", 0):
            return


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

    async def remove(self, name: str, what: Removable, first: int = 1) -> None:
        """See `purge`.

        Raises:
            NotPermitted: Neither is permitted.
            BusUnavailable: The server did not answer, or no worker did.
        """
        if self._permitted:
            try:
                return await purge(self._bus, self._owner, name, what, first)
            except NotPermitted:
                self._permitted = False
        subject = self._bus.subjects.remove(self._owner, name)
        answer = await self._bus.request(subject, b"", {headers.REMOVE: what, headers.FROM: str(first)})
        if answer.data:
            raise BusUnavailable(codec.decode_any(answer.data, ErrorAnswer).error.message)
        return None
