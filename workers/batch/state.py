"""The state of a batch in NATS: one small record, which is also the lease of the process that runs it.

Every record replaces the one before, and only if nobody has written another meanwhile. So of two processes
that run one batch, one finds out and stops. Subjects name the owner, so that permissions can restrict them.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any, Final, Literal

import msgspec

from inferbus.schemas import codec
from inferbus.schemas.errors import BusUnavailable, CallerError
from inferbus.schemas.subjects import Kind
from inferbus.workers.batch.counts import Counts, Usage
from inferbus.workers.batch.errors import BatchHeld, BatchNotFound
from inferbus.workers.batch.lines import URLS, Problem
from inferbus.workers.batch.template import Template
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NOT_FOUND, ApiError, NotPermitted
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.removal import Removal
from inferbus.workers.client import reads

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that runs a batch."""

    host: str
    pid: int
    token: str

    @property
    def gone(self) -> bool:
        """Whether it ran on this machine, and is no longer there."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return self.pid == os.getpid()


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The input file as it was validated.

    Attributes:
        path: Absolute.
        size: Bytes.
        modified: Nanoseconds.
        lines: That are not blank.
        digest: Of these.
        duplicates: Whether some repeat an id.
        template: What is made of the rows of a table; None: the batch began with a batch file.
        filled: Whether the file has what the template makes, as another machine finds it on the server.
    """

    path: str
    size: int
    modified: int
    lines: int
    digest: str
    duplicates: bool = False
    template: Template | None = None
    filled: bool = False

    @property
    def mapping(self) -> Template | None:
        """What is made of its rows; None: they are lines of a batch file."""
        return None if self.filled else self.template


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One batch.

    Attributes:
        id: Its id, unique for its owner.
        owner: Whose it is.
        kind: Of its requests.
        model: The served model.
        any_model: Whether `model` stands for whatever the lines name.
        status: As in OpenAI's API.
        source: Its input.
        output: Path of the output file.
        errors: Path of the error file.
        counts: Lines that ended.
        usage: Tokens so far.
        stamps: Unix seconds by name: `created_at`, `in_progress_at`, …
        window: Seconds after `created_at` when it expires; None: never.
        deadline: Seconds that a line may take; None: no limit.
        skip_invalid: Whether lines that cannot be run become error lines.
        ordered: Whether the output is in the order of the input.
        as_read: Whether lines are sent in the order of the input; see `grouping`.
        problems: What validation has found.
        first: Number of the oldest job that may be open.
        reserved: Jobs with this number and above were never sent.
        since: Stream sequence of the oldest job that may be open.
        oldest: Stream sequence of the first job; 0: there was none.
        alone: Input lines of the open jobs that hold one line each, by job.
        replies: Token of the subject on which jobs tell that they are done.
        holder: Who runs it; None: nobody.
        rate: Lines a second, of late.
        shared: Whether its files are on the server too; see `copies`.
        host: Where its files are complete: the machine that ran it last.
        copied: Bytes of its files that are on the server, at least, by their names there.
        input_copied: The digest of the input that is on the server as a whole.
        retries: How often failed lines were run again: each time begins an error file.
        input_file: Of a batch that came over HTTP, the id of its input; gateways run it. Its output is on the
            server alone.
        metadata: Of the caller.
    """

    id: str
    owner: str
    kind: Kind
    model: str
    any_model: bool = False
    status: Status = "validating"
    source: Source
    output: str
    errors: str
    counts: Counts = msgspec.field(default_factory=Counts)
    usage: Usage = msgspec.field(default_factory=Usage)
    stamps: dict[str, int] = {}
    window: float | None = None
    deadline: float | None = None
    skip_invalid: bool = False
    ordered: bool = False
    as_read: bool = False
    problems: list[Problem] = []
    first: int = 0
    reserved: int = 0
    since: int = 1
    oldest: int = 0
    alone: dict[str, int] = {}
    replies: str = ""
    holder: Holder | None = None
    rate: float = 0.0
    shared: bool = False
    host: str = ""
    copied: dict[str, int] = {}
    input_copied: str = ""
    retries: int = 0
    input_file: str = ""
    metadata: dict[str, str] = {}

    @property
    def copy_names(self) -> dict[str, str]:
        """What its files are called on the server, by their paths here."""
        return {self.output: "output", self.errors: self.error_name}

    @property
    def error_name(self) -> str:
        """What its error file is called on the server."""
        return f"errors-{self.retries}"

    @property
    def input_name(self) -> str:
        """What its input is called on the server; one that has grown is another."""
        return f"input-{self.source.digest}"

    @property
    def here(self) -> bool:
        """Whether this machine ran it last, or none has."""
        return self.host in ("", socket.gethostname())

    def enter(self, status: Status, now: float) -> None:
        """Changes the status, and stamps when."""
        self.status = status
        self.stamps = self.stamps | {f"{status}_at": int(now)}

    def openai(self) -> dict[str, Any]:
        """OpenAI's batch object, with five counts that sum to the total beside its own three."""
        total, counts = self.source.lines, self.counts
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        created = self.stamps.get("created_at")
        errors = [msgspec.to_builtins(each) for each in self.problems]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": URLS[self.kind],
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file or self.source.path,
            "completion_window": None if self.window is None else _window(self.window),
            "status": self.status,
            "output_file_id": self._file_id(self.output, "output", counts.succeeded),
            "error_file_id": self._file_id(self.errors, self.error_name, counts.ended - counts.succeeded),
            "created_at": created,
            "expires_at": None if self.window is None or created is None else int(created + self.window),
            **{f"{name}_at": self.stamps.get(f"{name}_at") for name in names},
            "request_counts": {
                "total": total,
                "completed": counts.succeeded,
                "failed": counts.errored,
                "processing": total - counts.ended,
                "succeeded": counts.succeeded,
                "errored": counts.errored,
                "cancelled": counts.cancelled,
                "expired": counts.expired,
            },
            "usage": self.usage.openai(),
            "metadata": self.metadata or None,
        }

    def _file_id(self, path: str, name: str, lines: int) -> str | None:
        """Where a file of the output is; None: it has no lines, or is not to be had yet."""
        if self.input_file:
            return f"file-{self.id}-{name}" if self.status in ENDED and self.copied.get(name) else None
        return path if lines else None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A record as the server has it."""

    record: Record
    sequence: int


class Batches:
    """The records of one owner's batches.

    Args:
        bus: The connection.
        owner: Whose.
    """

    def __init__(self, bus: Bus, owner: str) -> None:
        self._bus = bus
        self._jetstream = JetStream(bus)
        self._owner = owner

    async def find(self, batch: str) -> Kept | None:
        """A batch's record, if there is one.

        Raises:
            BusUnavailable: No worker has made the streams yet, or the server does not answer.
        """
        return _kept(await self._last(batch, "state"))

    async def last(self, batch: str) -> int:
        """The sequence that a new record replaces; 0: there is none."""
        stored = await self._last(batch, "state")
        return 0 if stored is None else stored.sequence

    async def get(self, batch: str) -> Kept:
        """A batch's record.

        Raises:
            BatchNotFound: There is none.
        """
        if (found := await self.find(batch)) is None:
            raise BatchNotFound(f"there is no batch {batch} of the owner {self._owner}")
        return found

    async def all(self) -> list[Kept]:
        """Every batch of this owner, the newest first."""
        try:
            stored = await self._jetstream.read(layout.BATCHES, self._subject("*"))
        except NotPermitted:
            stored = await reads.through_a_worker(self._bus, "batches", self._owner, "batches")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return []
        found = [kept for each in stored if (kept := _kept(each)) is not None]
        return sorted(found, key=lambda each: -each.record.stamps.get("created_at", 0))

    async def save(self, record: Record, after: int) -> int:
        """Replaces a record; returns the new one's sequence.

        Args:
            record: The new one.
            after: The sequence of the one that it replaces; 0: there is none.

        Raises:
            BatchHeld: Somebody else has written one meanwhile.
        """
        ack = await self._jetstream.store(self._subject(record.id), codec.encode(record), expect=after)
        if ack is None:
            raise BatchHeld("another process has taken this batch over")
        return ack.sequence

    async def ask_cancel(self, batch: str) -> None:
        """Leaves the wish that a batch be cancelled; whoever runs it sees that within a second."""
        await self._jetstream.store(self._subject(batch, "cancel"), b"cancel")

    async def cancel_asked(self, batch: str) -> bool:
        """Whether somebody wishes that."""
        stored = await self._last(batch, "cancel")
        return stored is not None and bool(stored.data)

    async def forget_cancel(self, batch: str) -> None:
        """Takes the wish back: the batch is run again."""
        await self._jetstream.store(self._subject(batch, "cancel"), b"", {"KV-Operation": "DEL"})

    async def remove(self, record: Record) -> None:
        """Removes a batch's record, and what else is on the server of it."""
        with contextlib.suppress(BusUnavailable):
            await Removal(self._bus, self._owner).remove(record.id, "jobs", max(record.oldest, 1))
        if record.shared:
            await self.remove_files(record.id)
        for key in ("state", "cancel"):
            await self._jetstream.store(self._subject(record.id, key), b"", {"KV-Operation": "DEL"})

    async def remove_files(self, batch: str) -> None:
        """Removes what a batch has on the server besides its record; see `copies`."""
        await Removal(self._bus, self._owner).remove(batch, "files")

    async def _last(self, batch: str, key: str) -> Stored | None:
        try:
            return await self._jetstream.last(layout.BATCHES, self._subject(batch, key))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            raise BusUnavailable(f"no stream {layout.BATCHES}: has a worker been started?") from None

    def _subject(self, batch: str, key: str = "state") -> str:
        return layout.batch_key(self._bus.subjects, self._owner, batch, key)


def _window(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:g}h" if hours.is_integer() else f"{seconds:g}s"


def _kept(stored: Stored | None) -> Kept | None:
    if stored is None or not stored.data:
        return None
    try:
        record = codec.decode(stored.data, Record)
    except CallerError:
        return None
    return Kept(record=record, sequence=stored.sequence)
