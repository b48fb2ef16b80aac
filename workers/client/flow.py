"""Chunks that follow one another with nothing between them, which is what nearly all of an answer is.

They take a short way: one pass over their bytes, and no thought about attempts, gaps and repetitions.
Whatever is not the very next chunk, or not a plain one, takes the way of every other message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from inferbus.schemas import codec, limits
from inferbus.schemas.answers import TokenChunk
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.interface import Stored
from inferbus.workers.client.assembler import Assembler, Event
from inferbus.workers.client.messages import Chunk, TextHead, text_fields


class _Text(TextHead):
    """A plain text chunk: no warnings, and no usage."""

    job: str
    attempt: int
    seq: int
    usage: None = None
    warnings: None = None


_Decode = Callable[[bytes], TokenChunk | _Text]

_TOKENS: Final[dict[str, _Decode]] = {
    codec.JSON: msgspec.json.Decoder(TokenChunk).decode,
    codec.MSGPACK: msgspec.msgpack.Decoder(TokenChunk).decode,
}
_TEXTS: Final[dict[str, _Decode]] = {
    codec.JSON: msgspec.json.Decoder(_Text).decode,
    codec.MSGPACK: msgspec.msgpack.Decoder(_Text).decode,
}


class Flow:
    """The short way of one answer's chunks.

    Args:
        assembler: Of the answer.
    """

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler
        self._decode: _Decode | None = None
        self._headers: Any = None
        self._job: Any = None

    @property
    def going(self) -> bool:
        """Whether the next chunk is expected to go the short way."""
        return self._decode is not None and self._assembler.flows

    def learn(self, message: Message | Stored, chunk: Chunk) -> None:
        """Notes what the next chunks will be like: of the same shape, and with the same headers.

        Args:
            message: That went the long way, which has found nothing wrong with it.
            chunk: It.
        """
        kind = codec.JSON if message.data[:1] == b"{" else codec.MSGPACK
        tokens = isinstance(chunk, TokenChunk)
        self._decode = (_TOKENS if tokens else _TEXTS)[kind]
        self._headers = message.headers
        self._job = chunk.job if isinstance(chunk, TokenChunk) else chunk.get("job")

    def take(self, waiting: deque[Message | None], ready: deque[Event]) -> bool:
        """Moves chunks from `waiting` to `ready`, up to the first that has to go the long way.

        Returns:
            Whether there were any.
        """
        taken = len(ready)
        if self._decode is not None:
            self._take(self._decode, waiting, ready)
        return len(ready) > taken

    def _take(self, decode: _Decode, waiting: deque[Message | None], ready: deque[Event]) -> None:
        known, job = self._headers, self._job
        follow = self._assembler.follow
        while waiting:
            message = waiting[0]
            # The headers of equal blocks are one object.
            if message is None or message.headers is not known:
                return
            data = message.data
            if len(data) > limits.PARTS:
                return
            try:
                chunk = decode(data)
            except codec.FAULTS:
                return
            if chunk.job != job or chunk.usage is not None or chunk.warnings:
                return
            if type(chunk) is TokenChunk:
                if not follow(chunk.attempt, chunk.seq, data):
                    return
                ready.append(chunk)
            else:
                fields = text_fields(data)
                if not follow(chunk.attempt, chunk.seq, data):
                    return
                ready.append(fields)
            waiting.popleft()
