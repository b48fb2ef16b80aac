"""API keys of the gateway, in the key-value bucket INFER_KEYS.

An entry has the key's digest, its owner and its limits, under a name that may be logged. The digest is
SHA-256 without salt or rounds: a key is made here, of 256 random bits, so nobody finds it by trying, and no
two are the same. The key itself is nowhere but with its user.

The stream behind the bucket has a secret entrance, as results have: nothing that the server sends on a
client's behalf is ever taken for a key. See `inferbus.workers.bus.jetstream.entrance`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hashlib
import secrets
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final

import msgspec
import structlog
from msgspec import Meta

from inferbus.schemas import codec
from inferbus.schemas.errors import BusUnavailable, CallerError, InvalidRequest
from inferbus.schemas.subjects import LIVE_OWNER, escape, unescape
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.connection.message import Message
from inferbus.workers.bus.errors import NOT_FOUND, ApiError, NoResponders
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream

log = structlog.get_logger()

KEY_BYTES: Final = 32
"""Random bytes of a key."""

NAME_LENGTH: Final = 100
"""Characters of a key's name at most."""

SETTLE: Final = 0.1
"""Seconds from the news of a change to the reading of all keys: several may change, and a replica may lag."""

REREAD: Final = 10.0
"""Seconds after which all keys are read again, whatever was heard."""

_OPERATION: Final = "KV-Operation"
_Limit = Annotated[int, Meta(ge=1)]


class KeyExists(CallerError):
    """There is an API key of this name."""

    code = "key_exists"


class KeyNotFound(CallerError):
    """There is no API key of this name."""

    code = "key_not_found"


class _Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """As stored. One with fields that are not known here is refused: they may limit it."""

    owner: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    created: dt.datetime
    requests_per_minute: _Limit | None = None
    concurrency: _Limit | None = None


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an API key.

    Attributes:
        name: For people and logs.
        owner: Whose requests it sends.
        created: When it was made.
        requests_per_minute: None: the gateway's setting.
        concurrency: Open requests; None: the gateway's setting.
        sha256: The key's digest, in hexadecimal.
    """

    name: str
    owner: str
    created: dt.datetime
    requests_per_minute: int | None
    concurrency: int | None
    sha256: str


class KeyBucket:
    """The bucket, read and written.

    Args:
        bus: The connection. Reading takes a direct get of the stream; writing takes the look at the stream's
            configuration as well, and publishing to its entrance, which operators may do.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)
        self._told: set[int] = set()

    async def all(self) -> list[ApiKey]:
        """Every key, by name; entries that are none are logged and left out.

        Raises:
            BusUnavailable: No worker has made the bucket yet, this user may not read it, or the server does
                not answer.
        """
        with _no_bucket():
            stored = await self._jetstream.read(layout.KEYS, self._subject(">"))
        found = (self._parsed(each) for each in stored)
        return sorted((each for each in found if each is not None), key=lambda each: each.name)

    async def add(
        self, name: str, owner: str, *, requests_per_minute: int | None = None, concurrency: int | None = None
    ) -> str:
        """Makes a key; returns it, and it is to be had only here.

        Raises:
            InvalidRequest: No name, owner or limit.
            KeyExists: There is one of this name.
            BusUnavailable: See `all`.
        """
        key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        entry = {
            "owner": _owner(owner),
            "sha256": hashlib.sha256(key.encode()).hexdigest(),
            "created": dt.datetime.now(dt.UTC).replace(microsecond=0),
            "requests_per_minute": requests_per_minute,
            "concurrency": concurrency,
        }
        subject = self._subject(_token(name))
        last = await self._last(subject)
        if last is not None and _there(last):
            raise KeyExists(f"there is an API key {name!r}; remove it first, or choose another name")
        try:
            data = codec.encode(msgspec.convert(entry, _Entry))
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"an API key: {error}") from None
        with _no_bucket():
            ack = await self._jetstream.store(subject, data, expect=0 if last is None else last.sequence)
        if ack is None:
            raise KeyExists(f"an API key {name!r} was added meanwhile")
        return key

    async def remove(self, name: str) -> None:
        """Removes a key: gateways refuse it within a second.

        Raises:
            KeyNotFound: There is none of this name.
            BusUnavailable: See `all`.
        """
        subject = self._subject(_token(name))
        last = await self._last(subject)
        if last is None or not _there(last):
            raise KeyNotFound(f"there is no API key {name!r}; `inferbus keys ls` shows them")
        with _no_bucket():
            await self._jetstream.store(subject, b"", {_OPERATION: "DEL"})

    async def watch(self, changed: Callable[[list[ApiKey]], Any]) -> None:
        """Reads all keys, and again after every change, until this is cancelled.

        A message on the bucket's subjects is only the news of a change: what is true, the stream has. While
        it cannot be read, what was read before stands.

        Args:
            changed: Called with all keys, after every reading.
        """
        news = asyncio.Event()

        def heard(message: Message) -> None:
            news.set()

        subscription = await self._bus.subscribe(self._subject(">"), heard)
        forget = self._bus.on_change(lambda connected: news.set() if connected else None)
        failed = False
        try:
            while True:
                news.clear()
                try:
                    changed(await self.all())
                    failed = False
                except BusUnavailable as error:
                    if not failed:
                        log.warning("keys.not_read", reason=error.message)
                    failed = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0 if failed else REREAD):
                        await news.wait()
                await asyncio.sleep(SETTLE)
        finally:
            forget()
            await subscription.unsubscribe()

    async def _last(self, subject: str) -> Stored | None:
        with _no_bucket():
            return await self._jetstream.last(layout.KEYS, subject)

    def _subject(self, key: str) -> str:
        return layout.key(self._bus.subjects, layout.KEYS, key)

    def _parsed(self, stored: Stored) -> ApiKey | None:
        if not _there(stored):
            return None
        try:
            return parse_entry(stored.subject.rsplit(".", 1)[-1], stored.data)
        except CallerError as error:
            if stored.sequence not in self._told:
                self._told.add(stored.sequence)
                log.warning("keys.unreadable", subject=stored.subject, reason=error.message)
            return None


def parse_entry(token: str, data: bytes) -> ApiKey:
    """The key of an entry of the bucket.

    Args:
        token: The last of its subject.
        data: Its body.

    Raises:
        CallerError: It is none; says nothing of its content.
    """
    entry = codec.decode(data, _Entry)
    name = unescape(token)
    _token(name)
    return ApiKey(
        name=name,
        owner=_owner(entry.owner),
        created=entry.created,
        requests_per_minute=entry.requests_per_minute,
        concurrency=entry.concurrency,
        sha256=entry.sha256,
    )


def _there(stored: Stored) -> bool:
    return bool(stored.data) and _OPERATION not in stored.headers


def _token(name: str) -> str:
    if not name.isprintable() or len(name) > NAME_LENGTH:
        raise InvalidRequest(
            f"a key's name is printable text of at most {NAME_LENGTH} characters", param="name"
        )
    return escape(name)


def _owner(owner: str) -> str:
    if escape(owner) == LIVE_OWNER:
        raise InvalidRequest(f"the owner {LIVE_OWNER!r} is reserved", param="owner")
    return owner


@contextlib.contextmanager
def _no_bucket() -> Iterator[None]:
    """Says what is missing where the bucket is."""
    mend = "has a worker been started, or `inferbus streams --adopt` run?"
    missing = BusUnavailable(f"no bucket {layout.KEYS.removeprefix('KV_')}: {mend}")
    try:
        yield
    except NoResponders:
        raise missing from None
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        raise missing from None
