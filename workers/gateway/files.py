"""Files of batches over HTTP: uploads, and what batches have written. They are in the stream `INFER_FILES`.

    infer.files.<owner>.<file>.content.<offset>    what was uploaded, as `copies` stores files
    infer.files.<owner>.<file>.about.0             its name, purpose and size; stored last: then it is whole

The output of a batch is its copy on the server: the id `file-<batch>-output` names it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from inferbus.schemas import codec
from inferbus.schemas.errors import CallerError, InferbusError, InvalidRequest, Overloaded, PayloadTooLarge
from inferbus.workers.batch.copies import SEGMENT, Copy
from inferbus.workers.batch.runs import CONTENT
from inferbus.workers.batch.state import ENDED, Batches, Record
from inferbus.workers.bus.errors import StreamFull
from inferbus.workers.bus.interface import Stored
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.removal import Removal
from inferbus.workers.client import Client
from inferbus.workers.gateway.errors import FileInUse, FileNotFound
from inferbus.workers.gateway.events import AnswerCut

PURPOSE: Final = "batch"
"""The only one that files have here."""

ENVELOPE: Final = 64 * 1024
"""Bytes of a body beside the file in it."""

_OUTPUT: Final = re.compile(r"file-(batch_[0-9a-f]+)-(output|errors-\d+)")


class File(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is on the server.

    Attributes:
        id: Its id, unique for its owner.
        bytes: Its size.
        created_at: Unix seconds.
        filename: Of the caller.
        purpose: As in OpenAI's API.
        place: Batch or file, and name, under which its bytes are stored.
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    place: tuple[str, str]

    def openai(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Files:
    """The files of one owner.

    Args:
        client: Connected; its owner is theirs.
    """

    def __init__(self, client: Client) -> None:
        self._bus = client.bus
        self._owner = client.owner
        self._jetstream = JetStream(client.bus)
        self._batches = Batches(client.bus, client.owner)

    async def store(self, upload: UploadFile) -> File:
        """Stores an uploaded file.

        Raises:
            Overloaded: There is no room for it.
            BusUnavailable: The server did not take it.
        """
        identity = f"file-{secrets.token_hex(12)}"
        copy = Copy(self._bus, self._owner, identity, CONTENT)
        try:
            while data := await upload.read(SEGMENT):
                copy.add(data)
                await copy.store()
            file = File(
                id=identity,
                bytes=copy.end,
                created_at=int(time.time()),
                filename=upload.filename or identity,
                purpose=PURPOSE,
                place=(identity, CONTENT),
            )
            await self._jetstream.store(self._about(identity), codec.encode(file), expect=0)
        except InferbusError as error:
            with contextlib.suppress(InferbusError):
                await self._remove(identity)
            if isinstance(error, StreamFull):
                raise Overloaded(f"there is no room for this file: {error.description}") from None
            raise
        return file

    async def get(self, identity: str) -> File:
        """A file by its id.

        Raises:
            FileNotFound: There is none.
        """
        if (output := _OUTPUT.fullmatch(identity)) is not None:
            kept = await self._batches.find(output[1])
            written = [] if kept is None else _outputs(kept.record)
            found = next((each for each in written if each.id == identity), None)
        else:
            found = _read(await self._jetstream.last(layout.FILES, self._about(identity)))
        if found is None:
            raise FileNotFound(f"there is no file {identity}", param="file_id")
        return found

    async def all(self) -> list[File]:
        """Uploads and outputs, the newest first."""
        about = await self._jetstream.read(layout.FILES, self._bus.subjects.files_about(self._owner))
        found = [file for stored in about if (file := _read(stored)) is not None]
        for kept in await self._batches.all():
            found += _outputs(kept.record)
        return sorted(found, key=lambda file: -file.created_at)

    async def remove(self, identity: str) -> None:
        """Removes a file; the output of a batch and its error file go together.

        Raises:
            FileNotFound: There is none.
            FileInUse: It is the input of a batch that has not ended.
        """
        file = await self.get(identity)
        batch, _ = file.place
        if batch != identity:
            kept = await self._batches.get(batch)
            await self._batches.remove_files(batch)
            kept.record.copied = {}
            await self._batches.save(kept.record, kept.sequence)
            return
        for kept in await self._batches.all():
            if kept.record.input_file == identity and kept.record.status not in ENDED:
                raise FileInUse(f"the batch {kept.record.id} reads this file", param="file_id")
        await self._remove(identity)

    def content(self, file: File) -> Content:
        """What is in a file, as a response."""
        return Content(Copy(self._bus, self._owner, *file.place).read(), file.bytes)

    async def _remove(self, identity: str) -> None:
        await Removal(self._bus, self._owner).remove(identity, "files")

    def _about(self, identity: str) -> str:
        return self._bus.subjects.file(self._owner, identity, "about", 0)


class Content:
    """An ASGI response: a file.

    Args:
        parts: Of it.
        size: All of them together.
    """

    def __init__(self, parts: AsyncIterator[bytes], size: int) -> None:
        self._parts = parts
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it.

        Raises:
            AnswerCut: It cannot be read to its end; its reader notices by its length.
        """
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(self._size).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for part in self._parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except InferbusError:
            raise AnswerCut("unreadable") from None
        await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def upload(request: Request, limit: int) -> AsyncIterator[UploadFile]:
    """The file in a form; what is in memory or on the disk of it goes with the block.

    Raises:
        PayloadTooLarge: Over the limit; the rest is not read.
        InvalidRequest: The form has not what it should.
    """
    size = 0

    async def bounded() -> Any:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > limit + ENVELOPE:
            raise MultiPartException("too large")
        return message

    try:
        async with Request(request.scope, bounded).form(max_files=1, max_fields=16) as form:
            yield _file_of(form, limit)
    except HTTPException as problem:
        if size > limit + ENVELOPE:
            raise _too_large(limit) from None
        raise InvalidRequest(f"the form cannot be read: {problem.detail}") from None


def _file_of(form: FormData, limit: int) -> UploadFile:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file is missing: a form with `file` and `purpose` is needed", param="file")
    if form.get("purpose") != PURPOSE:
        raise InvalidRequest(f"purpose must be {PURPOSE}", param="purpose")
    for name in form:
        if name not in ("file", "purpose"):
            raise InvalidRequest(f"{name!r} is not supported", param=name)
    if (file.size or 0) > limit:
        raise _too_large(limit)
    return file


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"a file has at most {limit} bytes", param="file")


def _read(stored: Stored | None) -> File | None:
    if stored is None or not stored.data:
        return None
    try:
        return codec.decode(stored.data, File)
    except CallerError:
        return None


def _outputs(record: Record) -> list[File]:
    """What a batch has written, once it has ended."""
    if not record.input_file:
        return []
    shown = record.openai()
    return [
        File(
            id=identity,
            bytes=record.copied[name],
            created_at=max(record.stamps.values()),
            filename=f"{record.id}.{name}.jsonl",
            purpose="batch_output",
            place=(record.id, name),
        )
        for field, name in (("output_file_id", "output"), ("error_file_id", record.error_name))
        if (identity := shown[field]) is not None
    ]
