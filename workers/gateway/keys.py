"""API keys: whose requests they are, and how many.

A file has one table for each key, by a name that may be logged:

    [acme-web]
    key = "sk-…"                  # or sha256 = "…", of the key
    owner = "acme"
    requests_per_minute = 600     # none: no limit
    concurrency = 64

It is read again when it changes. Keys of `inferbus keys` are in NATS: see `inferbus.workers.client.keys`. All
are kept and compared as digests, in constant time, and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from inferbus.schemas.errors import BusUnavailable, InferbusError
from inferbus.schemas.subjects import LIVE_OWNER, escape
from inferbus.workers.client.keys import ApiKey
from inferbus.workers.config import ConfigError, GatewaySettings
from inferbus.workers.gateway.errors import InvalidKey, RateLimited

log = structlog.get_logger()

ANYBODY: Final = "default"
"""Owner of all requests where there are no keys: the same that clients have by default."""

_Limit = Annotated[int, Meta(ge=1)]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    owner: str
    key: Annotated[str, Meta(min_length=16)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    requests_per_minute: _Limit | None = None
    concurrency: _Limit | None = None


class Key:
    """One API key, and what it uses at the moment.

    Args:
        name: For logs.
        owner: Whose requests it sends.
        per_minute: Requests a minute; 0: any number.
        concurrency: Open requests; 0: any number.
        clock: Monotonic seconds.

    Attributes:
        open: Its open requests.
        terms: All that was said of it.
    """

    def __init__(
        self,
        name: str,
        owner: str,
        *,
        per_minute: int = 0,
        concurrency: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.owner = owner
        self.open = 0
        self.terms = (name, owner, per_minute, concurrency)
        self._rate = per_minute / 60 if per_minute else math.inf
        self._burst = float(per_minute)
        self._concurrency = concurrency or math.inf
        self._clock = clock
        self._left, self._filled = self._burst, clock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its arrival to the end of its answer.

        Raises:
            RateLimited: Too many a minute, or at a time.
        """
        if self.open >= self._concurrency:
            raise RateLimited(f"this key may have {self._concurrency} requests open at a time")
        self._take()
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def _take(self) -> None:
        """Takes one of the requests that are left; they come back evenly over the minute."""
        if math.isinf(self._rate):
            return
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._filled) * self._rate)
        self._filled = now
        if self._left < 1:
            after = (1 - self._left) / self._rate
            raise RateLimited(f"this key may send {self._burst:g} requests a minute", after=after)
        self._left -= 1


class Keys:
    """All keys, by their digests.

    Args:
        settings: Which keys, and the limits of those that set none.

    Raises:
        ConfigError: They cannot be used.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._stamp = self._file_stamp()
        self._keys = self._load()
        self._stored: dict[bytes, tuple[bytes, Key]] | None = None
        self.required = settings.has_keys
        self._anybody = Key(
            "none", ANYBODY, per_minute=settings.requests_per_minute, concurrency=settings.concurrency
        )

    @property
    def owners(self) -> set[str]:
        """Whose requests may come."""
        if not self.required:
            return {ANYBODY}
        return {key.owner for _, key in (*self._keys.values(), *(self._stored or {}).values())}

    @property
    def known(self) -> bool:
        """Whether every key is known: those in NATS were read."""
        return not self._settings.stored_keys or self._stored is not None

    def find(self, authorization: str | None) -> Key:
        """The key in an `Authorization` header.

        Raises:
            InvalidKey: There is none, or it is not known.
            BusUnavailable: It may be one of those in NATS, which were not read yet.
        """
        if not self.required:
            return self._anybody
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise InvalidKey("an API key is needed: Authorization: Bearer …")
        digest = _digest(token.strip())
        # The look-up tells nothing of a key: who sends it cannot choose its digest.
        known, key = self._keys.get(digest) or (self._stored or {}).get(digest) or (b"", self._anybody)
        if hmac.compare_digest(known, digest):
            return key
        if not self.known:
            raise BusUnavailable("the API keys in NATS were not read yet")
        raise InvalidKey("this API key is not known")

    def refresh(self) -> None:
        """Reads the file again where it has changed; one that cannot be used changes nothing."""
        stamp = self._file_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("gateway.keys_unusable", problems=error.problems)
            return
        self._keys = _renewed(self._keys, loaded)
        log.info("gateway.keys_loaded", source="file", keys=len(loaded))

    def store(self, keys: Iterable[ApiKey]) -> None:
        """Takes these for all that are in NATS; where the file has the same key, the file's counts."""
        settings, before = self._settings, self._stored
        loaded = dict[bytes, tuple[bytes, Key]]()
        for each in keys:
            digest = bytes.fromhex(each.sha256)
            key = Key(
                each.name,
                each.owner,
                per_minute=each.requests_per_minute or settings.requests_per_minute,
                concurrency=each.concurrency or settings.concurrency,
            )
            loaded[digest] = (digest, key)
        self._stored = _renewed(before or {}, loaded)
        # Those that stay are the same objects.
        if before is None or self._stored != before:
            log.info("gateway.keys_loaded", source="nats", keys=len(loaded))

    def _file_stamp(self) -> tuple[int, int] | None:
        file = self._settings.keys_file
        try:
            stat = file.stat() if file is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_size)

    def _load(self) -> dict[bytes, tuple[bytes, Key]]:
        settings, problems = self._settings, list[str]()
        entries = {f"key {n}": _Entry(owner, key) for n, (key, owner) in enumerate(settings.keys.items(), 1)}
        if settings.keys_file is not None:
            entries |= _read(settings.keys_file, problems)
        keys: dict[bytes, tuple[bytes, Key]] = {}
        for name, entry in entries.items():
            problem = _problem(entry)
            digest = _digest(entry.key) if entry.key else bytes.fromhex(entry.sha256 or "")
            if problem is None and digest in keys:
                problem = "the same key as another one"
            if problem is not None:
                problems.append(f"gateway.keys ({name}): {problem}")
                continue
            keys[digest] = (
                digest,
                Key(
                    name,
                    entry.owner,
                    per_minute=entry.requests_per_minute or settings.requests_per_minute,
                    concurrency=entry.concurrency or settings.concurrency,
                ),
            )
        if problems:
            raise ConfigError(problems)
        return keys


def _renewed(
    old: dict[bytes, tuple[bytes, Key]], new: dict[bytes, tuple[bytes, Key]]
) -> dict[bytes, tuple[bytes, Key]]:
    """The new ones; those that are as they were keep what they use."""
    return {
        digest: old[digest] if digest in old and old[digest][1].terms == entry[1].terms else entry
        for digest, entry in new.items()
    }


def _read(file: Path, problems: list[str]) -> dict[str, _Entry]:
    where = f"gateway.keys_file (file {file})"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        problems.append(f"{where}: {error.strerror}")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{where}: not valid TOML: {error}")
        return {}
    entries = {}
    for name, table in tables.items():
        try:
            entries[name] = msgspec.convert(table, _Entry)
        except msgspec.ValidationError as error:
            # It names types and fields, never values.
            problems.append(f"{where}: {name}: {error}")
    return entries


def _problem(entry: _Entry) -> str | None:
    if (entry.key is None) == (entry.sha256 is None):
        return "has either key or sha256"
    try:
        owner = escape(entry.owner)
    except InferbusError as error:
        return f"owner: {error.message}"
    return f"the owner {LIVE_OWNER!r} is reserved" if owner == LIVE_OWNER else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
