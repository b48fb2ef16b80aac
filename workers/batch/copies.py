"""The files of a shared batch on the server, so that another machine can go on with it.

A copy is a log of segments: `infer.files.<owner>.<batch>.<file>.<offset>` holds, compressed, the bytes of a
file from this offset on. Nobody changes a segment, and of two that begin at one offset the server takes the
first. So a process that has lost its batch to another one finds out, and adds nothing.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from inferbus.schemas.errors import InvalidRequest
from inferbus.workers.batch.errors import BatchHeld, OutputFailed
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream

SEGMENT: Final = 512 * 1024
"""Bytes of a segment before they are compressed, so that it fits under a server's default limit."""

_GZIP: Final = 16 + zlib.MAX_WBITS


class Copy:
    """The copy of one file.

    Args:
        bus: The connection.
        owner: Of the batch.
        batch: Its id.
        name: Of the file: one token.
        known: Bytes that were stored before; there may be more.

    Attributes:
        end: Bytes that are stored, as far as this process knows.
    """

    def __init__(self, bus: Bus, owner: str, batch: str, name: str, *, known: int = 0) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)
        self._key = (owner, batch, name)
        self.end = known
        self._waiting: deque[bytes] = deque()
        self._segment = b""

    @property
    def waiting(self) -> int:
        """Bytes that were added and are not stored."""
        return len(self._segment) + sum(map(len, self._waiting))

    def add(self, data: bytes) -> None:
        """Takes the next bytes of the file; `store` stores them."""
        self._waiting.append(data)

    async def store(self) -> None:
        """Stores what was added. Where it fails, the next call goes on.

        Raises:
            BatchHeld: Another process adds to this copy.
            StreamFull: No room.
            BusUnavailable: The server did not confirm it.
        """
        while segment := self._next():
            await self._store(segment)
            self.end += len(segment)
            self._segment = b""

    async def find_end(self) -> int:
        """Bytes that are stored.

        Raises:
            InvalidRequest: A segment is not readable.
            BusUnavailable: The server did not answer.
        """
        async for _ in self.read(self.end):
            pass
        return self.end

    async def read(self, first: int = 0) -> AsyncIterator[bytes]:
        """The stored bytes from an offset on, segment by segment; sets `end` to what follows them.

        Args:
            first: Where a segment begins, or the last one ends.

        Raises:
            InvalidRequest: A segment is not readable.
            BusUnavailable: The server did not answer.
        """
        self.end = first
        while (segment := await self._at(self.end)) is not None:
            self.end += len(segment)
            yield segment

    def _next(self) -> bytes:
        """The segment to be stored next: after a failure the same one again, since it may be stored."""
        if not self._segment:
            parts, size = list[bytes](), 0
            while self._waiting and size < SEGMENT:
                part = self._waiting.popleft()
                if size + len(part) > SEGMENT:
                    self._waiting.appendleft(part[SEGMENT - size :])
                    part = part[: SEGMENT - size]
                parts.append(part)
                size += len(part)
            self._segment = b"".join(parts)
        return self._segment

    async def _store(self, segment: bytes) -> None:
        subject = self._bus.subjects.file(*self._key, self.end)
        data = gzip.compress(segment, 1, mtime=0)
        # Its confirmation may have been lost: then the segment that is there is this one.
        if (
            await self._jetstream.store(subject, data, expect=0) is None
            and await self._at(self.end) != segment
        ):
            raise BatchHeld("another process has taken this batch over")

    async def _at(self, offset: int) -> bytes | None:
        stored = await self._jetstream.last(layout.FILES, self._bus.subjects.file(*self._key, offset))
        if stored is None:
            return None
        reader = zlib.decompressobj(_GZIP)
        try:
            segment = reader.decompress(stored.data, SEGMENT + 1)
        except zlib.error:
            segment = b""
        if not 0 < len(segment) <= SEGMENT or not reader.eof:
            raise InvalidRequest(f"{stored.subject} is no segment of a file")
        return segment


async def _nothing() -> None:
    pass


async def restore(copy: Copy, path: Path, segment_read: Callable[[], Awaitable[None]] = _nothing) -> None:
    """Writes a file anew from its copy, and syncs it.

    Args:
        copy: Read from its beginning.
        path: Of the file; it is replaced.
        segment_read: Called after each segment.

    Raises:
        OutputFailed: It cannot be written.
        InvalidRequest: The copy is not readable.
        BusUnavailable: The server did not answer.
    """
    temporary = path.with_name(f"{path.name}.restoring")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            async for segment in copy.read():
                file.write(segment)
                await segment_read()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OutputFailed(f"{error.filename or path}: {error.strerror}") from None
