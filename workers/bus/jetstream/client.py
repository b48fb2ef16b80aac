"""Storing and looking up, in JetStream's own protocol.

Spoken directly rather than through nats-py, because that knows neither retries
while a leader is elected (ADR-22, facts 4.19), nor why a publish without
permission never comes back, nor batches of direct gets (ADR-31).
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from inferbus.schemas import headers as names
from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import (
    FULL,
    JETSTREAM_OFF,
    NOT_FOUND,
    STORE_FAILED,
    WRONG_LAST_SEQUENCE,
    ApiError,
    NoResponders,
)
from inferbus.workers.bus.interface import Stored

if TYPE_CHECKING:
    from inferbus.workers.bus.connection.bus import Bus

API: Final = "$JS.API"
RETRIES: Final = 2
RETRY_PAUSE: Final = 0.25
"""ADR-22: a publish that finds no stream is tried twice more, 250 ms apart."""

BATCH: Final = 1000
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
    seq: int = 0
    duplicate: bool = False


_ack: Final = msgspec.json.Decoder(_Ack)


async def api(bus: Bus, path: str, body: Any = None, *, timeout: float = 5.0) -> dict[str, Any]:
    """One call of JetStream's API, `STREAM.INFO.X` for example.

    Raises:
        ApiError: JetStream refused; carries its error code.
        BusUnavailable: It does not answer, or may not be asked.
    """
    data = b"" if body is None else msgspec.json.encode(body)
    try:
        message = await bus.request(f"{API}.{path}", data, timeout=timeout)
    except NoResponders:
        raise BusUnavailable(_OFF) from None
    answer: dict[str, Any] = msgspec.json.decode(message.data)
    if (raw := answer.get("error")) is not None:
        raise _refused(msgspec.convert(raw, _Error), path)
    return answer


async def store(
    bus: Bus,
    subject: str,
    data: bytes,
    headers: Mapping[str, str] | None,
    *,
    expect: int | None,
    timeout: float,
) -> int | None:
    """See `Broker.store`."""
    sent = dict(headers or ())
    own_id = names.MSG_ID not in sent
    if own_id:
        # The same for every retry, so that one that did arrive is not stored twice.
        sent[names.MSG_ID] = secrets.token_hex(11)
    if expect is not None:
        sent[names.EXPECTED_LAST] = str(expect)
    for attempt in range(RETRIES + 1):
        last_try = attempt == RETRIES
        try:
            message = await bus.request(subject, data, sent, timeout=timeout)
        except NoResponders:
            if last_try:
                raise BusUnavailable(f"no stream takes {subject}") from None
        else:
            ack = _decoded(message, subject)
            if ack.error is None:
                foreign = ack.duplicate and expect is not None and not own_id and attempt == 0
                return None if foreign else ack.seq
            if expect is not None and ack.error.err_code in WRONG_LAST_SEQUENCE:
                return None
            if last_try or ack.error.code != 503 or ack.error.err_code in FULL:
                raise _refused(ack.error, subject)
        await asyncio.sleep(RETRY_PAUSE)
    raise AssertionError("unreachable")


async def last(bus: Bus, stream: str, subject: str) -> Stored | None:
    """See `Broker.last`."""
    try:
        message = await bus.request(f"{API}.DIRECT.GET.{stream}.{subject}")
    except NoResponders:
        # A stream without direct access, or none at all; this call tells which.
        return await _get(bus, stream, {"last_by_subj": subject})
    return None if message.status == "404" else _stored(message)


async def read(bus: Bus, stream: str, subject: str) -> list[Stored]:
    """See `Broker.read`; the subject may hold wildcards."""
    found: list[Stored] = []
    try:
        pending = 1
        while pending:
            start = found[-1].sequence + 1 if found else 1
            page, pending = await _page(bus, stream, {"seq": start, "next_by_subj": subject, "batch": BATCH})
            found.extend(page)
            if not page:
                break
    except NoResponders:
        while message := await _get(
            bus, stream, {"seq": found[-1].sequence + 1 if found else 1, "next_by_subj": subject}
        ):
            found.append(message)
    return found


async def _page(bus: Bus, stream: str, body: dict[str, Any]) -> tuple[list[Stored], int]:
    """One batch, and how many messages there are beyond it."""
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    inbox = bus.inbox(arrived.put_nowait)
    found: list[Stored] = []
    try:
        async with asyncio.timeout(5.0):
            await bus.until_connected()
        bus.send(f"{API}.DIRECT.GET.{stream}", msgspec.json.encode(body), reply=inbox.subject)
        while True:
            async with asyncio.timeout(5.0):
                message = await arrived.get()
            status = message.status
            if status == "503":
                raise NoResponders(f"stream {stream} has no direct access")
            if status == "404":
                return found, 0
            if status == "204":
                return found, int(message.headers.get("Nats-Num-Pending", 0))
            if status:
                raise BusUnavailable(f"reading {stream} failed: {message.headers.get('Description', status)}")
            found.append(_stored(message))
    except TimeoutError:
        raise BusUnavailable(f"reading {stream} was not answered in time") from None
    finally:
        inbox.close()


async def _get(bus: Bus, stream: str, body: dict[str, Any]) -> Stored | None:
    """One message by way of the stream's leader."""
    try:
        answer = await api(bus, f"STREAM.MSG.GET.{stream}", body)
    except ApiError as error:
        if error.status == NOT_FOUND and error.err_code == 10037:
            return None
        raise
    message = answer["message"]
    return Stored(
        subject=message["subject"],
        data=base64.b64decode(message.get("data", "")),
        headers=_headers(base64.b64decode(message.get("hdrs", ""))),
        sequence=message["seq"],
        time=moment(message["time"]),
    )


def _headers(block: bytes) -> dict[str, str]:
    lines = block.decode(errors="replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _stored(message: Message) -> Stored:
    headers = message.headers
    return Stored(
        subject=headers["Nats-Subject"],
        data=message.data,
        headers={key: value for key, value in headers.items() if key not in _OWN_HEADERS},
        sequence=int(headers["Nats-Sequence"]),
        time=moment(headers["Nats-Time-Stamp"]),
    )


def moment(text: str) -> dt.datetime:
    """A server's time stamp; it has nanoseconds, which `datetime` cuts off."""
    return dt.datetime.fromisoformat(text)


def _decoded(message: Message, subject: str) -> _Ack:
    try:
        return _ack.decode(message.data)
    except msgspec.DecodeError:
        raise BusUnavailable(f"something else than a stream answers on {subject}") from None


def _refused(error: _Error, what: str) -> BusUnavailable:
    if error.err_code in FULL:
        full = "the stream is full" if error.err_code == STORE_FAILED else "there is no room"
        if "per subject" in error.description:
            full = "too many open jobs of this owner (--streams-owner-jobs)"
        return ApiError(f"{what}: {full}: {error.description}", status=error.code, err_code=error.err_code)
    if error.err_code in JETSTREAM_OFF:
        return ApiError(_OFF, status=error.code, err_code=error.err_code)
    return ApiError(f"{what}: {error.description}", status=error.code, err_code=error.err_code)
