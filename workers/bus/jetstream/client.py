"""JetStream's own protocol: storing and looking up.

Spoken directly rather than through nats-py, which does not retry while a leader is elected (ADR-22), does not
report a publish that the server does not permit, and has no batches of direct gets (ADR-31).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import secrets
from collections.abc import Mapping
from typing import Any, Final, overload

import msgspec

from inferbus.schemas import headers as names
from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import TIMEOUT, Bus
from inferbus.workers.bus.connection.message import STREAM, Message
from inferbus.workers.bus.connection.protocol import Headers
from inferbus.workers.bus.errors import (
    FULL,
    JETSTREAM_OFF,
    MESSAGE_NOT_FOUND,
    STORE_FAILED,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    ApiError,
    NoResponders,
    NotPermitted,
    StreamFull,
    SubjectFull,
)
from inferbus.workers.bus.interface import PubAck, Stored
from inferbus.workers.bus.jetstream.entrance import Entrance, entrance
from inferbus.workers.bus.jetstream.layout import guarded_stream, in_account

API: Final = "$JS.API"
TRIES: Final = 3
RETRY_PAUSE: Final = 0.25
"""ADR-22: a publish that finds no stream is tried twice more, 250 ms apart."""

PAGE: Final = 1000
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Messages and bytes of one page; a message that is larger than that is a page of its own."""

END_OF_BATCH: Final = "204"
NO_MESSAGE: Final = "404"

_OFF: Final = "JetStream does not answer: is it enabled on this server and for this account?"
_OWN_HEADERS: Final = frozenset(
    {
        "Nats-Stream",
        "Nats-Subject",
        "Nats-Sequence",
        "Nats-Time-Stamp",
        "Nats-Num-Pending",
        "Nats-Last-Sequence",
        "Nats-UpTo-Sequence",
    }
)
"""What a direct get adds to a message's own headers."""


class _Error(msgspec.Struct):
    code: int = 500
    err_code: int = 0
    description: str = "unknown error"


class _Ack(msgspec.Struct):
    error: _Error | None = None
    stream: str = ""
    seq: int = 0
    duplicate: bool = False


_ack: Final = msgspec.json.Decoder(_Ack)


class JetStream:
    """JetStream over one connection; implements `Broker`. Any number may share a connection.

    Streams that only workers write to are stored to by their secret entrances, which are looked up at first
    use; see `entrance`. Callers name the subjects that readers know.

    Args:
        bus: The connection.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._entrances: dict[str, Entrance | None] = {}

    @property
    def max_payload(self) -> int:
        """See `Broker`."""
        return self._bus.max_payload

    def send(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, *, reply: str = ""
    ) -> None:
        """See `Broker`. To a guarded stream only after a `store` there has found its entrance."""
        stream = guarded_stream(subject, self._bus.subjects)
        found = self._entrances.get(stream) if stream else None
        self._bus.send(found.subject(subject) if found else subject, data, headers, reply=reply)

    @property
    def congested(self) -> bool:
        """See `Broker`."""
        return self._bus.congested

    async def ready(self) -> None:
        """See `Broker`."""
        await self._bus.ready()

    async def flush(self) -> None:
        """See `Broker`."""
        await self._bus.flush()

    async def call(self, path: str, body: Any = None, *, timeout: float = TIMEOUT) -> dict[str, Any]:
        """One call of JetStream's API, `STREAM.INFO.X` for example, with the contract's names of streams.

        Raises:
            ApiError: JetStream refused; carries its error code.
            BusUnavailable: It does not answer, or this user may not call it.
        """
        path = ".".join(in_account(each, self._bus.subjects) for each in path.split("."))
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            message = await self._bus.request(f"{API}.{path}", data, timeout=timeout)
        except NoResponders:
            raise BusUnavailable(_OFF) from None
        answer: dict[str, Any] = msgspec.json.decode(message.data)
        if (raw := answer.get("error")) is not None:
            raise _refused(msgspec.convert(raw, _Error), path)
        return answer

    @overload
    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: None = None,
        timeout: float = TIMEOUT,
        resend: bool = False,
    ) -> PubAck: ...

    @overload
    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
        timeout: float = TIMEOUT,
        resend: bool = False,
    ) -> PubAck | None: ...

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int | None = None,
        timeout: float = TIMEOUT,
        resend: bool = False,
    ) -> PubAck | None:
        """See `Broker`.

        Args:
            subject: See `Broker`, as for `data`, `headers` and `expect`.
            data: The body.
            headers: Its headers.
            expect: The sequence of the subject's newest message.
            timeout: Seconds to wait for one acknowledgement.
            resend: Send it again where none comes, under the same message id.

        Raises:
            PayloadTooLarge: Over the server's limit; nothing was sent.
            NoResponders: No stream takes it.
            NotPermitted: This user may not publish to it.
            StreamFull: There is no room for it.
            ApiError: The stream refused it for another reason.
            BusUnavailable: It was not acknowledged in time; it may be stored.
        """
        sent = dict(headers or ())
        own_id = names.MSG_ID not in sent
        if own_id:
            # The same for every try, so that one that did arrive is not stored twice.
            sent[names.MSG_ID] = secrets.token_hex(11)
        if expect is not None:
            sent[names.EXPECTED_LAST] = str(expect)
        for attempt in range(TRIES):
            last_try = attempt == TRIES - 1
            try:
                message = await self._bus.request(await self._captured(subject), data, sent, timeout=timeout)
            except NoResponders:
                # The stream may have been made anew, with another key.
                self._entrances.clear()
                if last_try:
                    raise NoResponders(f"no stream takes {subject}") from None
            except NotPermitted:
                raise
            except BusUnavailable:
                self._entrances.clear()
                if last_try or not resend:
                    raise
            else:
                ack = _decoded(message, subject)
                if ack.error is None:
                    duplicate = ack.duplicate and attempt == 0
                    if duplicate and expect is not None and not own_id:
                        return None
                    return PubAck(stream=ack.stream, sequence=ack.seq, duplicate=duplicate)
                if expect is not None and ack.error.err_code in WRONG_LAST_SEQUENCE:
                    return None
                if last_try or ack.error.code != 503 or ack.error.err_code in FULL:
                    raise _refused(ack.error, subject)
            await asyncio.sleep(RETRY_PAUSE)
        raise AssertionError("unreachable")

    async def _captured(self, subject: str) -> str:
        """What to publish to so that a message is stored on a subject."""
        if (stream := guarded_stream(subject, self._bus.subjects)) is None:
            return subject
        if stream not in self._entrances:
            try:
                config = (await self.call(f"STREAM.INFO.{stream}"))["config"]
            except ApiError as error:
                if error.err_code != STREAM_NOT_FOUND:
                    raise
                raise NoResponders(error.message) from None
            self._entrances[stream] = entrance(config)
        found = self._entrances[stream]
        return found.subject(subject) if found else subject

    async def last(self, stream: str, subject: str) -> Stored | None:
        """See `Broker`."""
        try:
            message = await self._bus.request(f"{self._direct_get(stream)}.{subject}")
        except NoResponders:
            # A stream without direct access, or none at all; this call tells which.
            return await self.get(stream, {"last_by_subj": subject})
        return None if message.status == NO_MESSAGE else _stored(message)

    async def read(self, stream: str, subject: str) -> list[Stored]:
        """See `Broker`; the subject may hold wildcards."""
        messages: list[Stored] = []
        remaining = 1
        while remaining:
            first = messages[-1].sequence + 1 if messages else 1
            page, remaining = await self.page(stream, subject, first=first)
            messages.extend(page)
            if not page:
                break
        return messages

    async def purge(
        self, stream: str, subject: str, *, until: int | None = None, keep: int | None = None
    ) -> int:
        """See `Broker`; returns how many were removed.

        Args:
            stream: Of this stream.
            subject: May hold wildcards.
            until: Only messages up to this sequence, itself included.
            keep: So many of the newest stay.
        """
        body: dict[str, Any] = {"filter": subject}
        if until is not None:
            body["seq"] = until + 1
        if keep is not None:
            body["keep"] = keep
        return int((await self.call(f"STREAM.PURGE.{stream}", body))["purged"])

    async def page(
        self, stream: str, subject: str, *, first: int = 1, batch: int | None = None
    ) -> tuple[list[Stored], int]:
        """Messages of a subject, oldest first, and the number of messages beyond them.

        From a stream without direct access they come one by one, and that number is 1 until the end.

        Args:
            stream: Of this stream.
            subject: May hold wildcards.
            first: The stream sequence to begin at.
            batch: No more messages than this, nor than `PAGE`.

        Raises:
            NotPermitted: Naming the subject.
            BusUnavailable: The server did not answer.
        """
        query: dict[str, Any] = {"seq": first, "next_by_subj": subject}
        limits = {"batch": min(batch or PAGE, PAGE), "max_bytes": PAGE_BYTES}
        try:
            return await self._batch(self._direct_get(stream), query | limits)
        except NoResponders:
            message = await self.get(stream, query)
            return ([], 0) if message is None else ([message], 1)

    async def get(self, stream: str, query: dict[str, Any]) -> Stored | None:
        """One message, as the stream's leader has it: what was removed a moment ago is not there.

        Args:
            stream: Of this stream.
            query: As STREAM.MSG.GET takes it: `seq`, `last_by_subj`, or `seq` and `next_by_subj`.

        Raises:
            ApiError: There is no such stream.
            BusUnavailable: The server did not answer.
        """
        try:
            answer = await self.call(f"STREAM.MSG.GET.{stream}", query)
        except ApiError as error:
            if error.err_code == MESSAGE_NOT_FOUND:
                return None
            raise
        message = answer["message"]
        block = base64.b64decode(message.get("hdrs", ""))
        headers = Headers(block) if block else None
        return Stored(
            subject=message["subject"],
            data=base64.b64decode(message.get("data", "")),
            headers=headers or {},
            sequence=message["seq"],
            time=parse_time(message["time"]),
            forwarded=headers is not None and (bool(headers.status) or STREAM in headers),
            undecodable=block if headers is not None and headers.malformed else None,
        )

    def _direct_get(self, stream: str) -> str:
        return f"{API}.DIRECT.GET.{in_account(stream, self._bus.subjects)}"

    async def _batch(self, subject: str, body: dict[str, Any]) -> tuple[list[Stored], int]:
        """One batch of direct gets (ADR-31), and how many messages there are beyond it."""
        messages: list[Stored] = []
        async with contextlib.aclosing(self._bus.ask(subject, msgspec.json.encode(body))) as answers:
            async for message in answers:
                status = message.status
                if status == NO_MESSAGE:
                    return messages, 0
                if status == END_OF_BATCH:
                    return messages, int(message.headers.get("Nats-Num-Pending", 0))
                if status:
                    reason = message.description or status
                    raise BusUnavailable(f"{subject} failed: {reason}")
                messages.append(_stored(message))
        raise AssertionError("unreachable")


def parse_time(text: str) -> dt.datetime:
    """A time stamp of the server; it has nanoseconds, which `datetime` cuts off."""
    return dt.datetime.fromisoformat(text)


def _stored(message: Message) -> Stored:
    headers = message.headers
    return Stored(
        subject=headers["Nats-Subject"],
        data=message.data,
        headers={key: value for key, value in headers.items() if key not in _OWN_HEADERS},
        sequence=int(headers["Nats-Sequence"]),
        time=parse_time(headers["Nats-Time-Stamp"]),
        # The server adds its own to what the message had.
        forwarded=bool(message.status_line) or STREAM in message.repeated,
        undecodable=message.undecodable,
    )


def _decoded(message: Message, subject: str) -> _Ack:
    try:
        return _ack.decode(message.data)
    except msgspec.DecodeError:
        raise BusUnavailable(f"something else than a stream answers on {subject}") from None


def _refused(error: _Error, what: str) -> ApiError:
    codes: dict[str, Any] = {
        "status": error.code,
        "err_code": error.err_code,
        "description": error.description,
    }
    # One code (JSStreamStoreFailedF) stands for every limit of a stream; the server tells them apart in its
    # description alone.
    if error.err_code == STORE_FAILED and "per subject" in error.description:
        reason = "too many messages on this subject (of jobs: see --streams-owner-jobs)"
        return SubjectFull(f"{what}: {reason}: {error.description}", **codes)
    if error.err_code in FULL:
        reason = "the stream is full" if error.err_code == STORE_FAILED else "there is no room"
        return StreamFull(f"{what}: {reason}: {error.description}", **codes)
    if error.err_code in JETSTREAM_OFF:
        return ApiError(_OFF, **codes)
    return ApiError(f"{what}: {error.description}", **codes)
