"""Batches over HTTP: registered in NATS, and run by whichever gateway takes them.

A gateway runs a batch as `inferbus batch run --shared` does, in a temporary folder. One that ends gives its
batches back; those of one that died are taken over once their lease is old. So gateways keep no state.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import structlog
from msgspec import Meta

from inferbus.schemas.errors import BusUnavailable, CallerError, InferbusError, InvalidRequest
from inferbus.workers.batch.errors import BatchHeld
from inferbus.workers.batch.lines import KINDS, Problem
from inferbus.workers.batch.runs import admit, fail, proceed, register, run
from inferbus.workers.batch.state import ENDED, Batches, Kept
from inferbus.workers.client import Client
from inferbus.workers.gateway.files import Files
from inferbus.workers.observe import defects

log = structlog.get_logger()

AT_ONCE: Final = 8
"""Batches that one gateway runs at a time; others wait."""

LOOK_EVERY: Final = 10.0
"""Seconds between two looks for batches that nobody runs."""

_WINDOW: Final = re.compile(r"([1-9]\d{0,4})([mhd])")
_SECONDS: Final = {"m": 60.0, "h": 3600.0, "d": 24 * 3600.0}


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16),
        ]
        | None
    ) = None


_asked: Final = msgspec.json.Decoder(_Asked)


async def create(client: Client, body: bytes) -> Kept:
    """Registers a batch.

    Raises:
        InvalidRequest: The request is not one for a batch.
        FileNotFound: There is no such input.
    """
    try:
        asked = _asked.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        named = re.search(r"at `\$\.(\w+)|field `(\w+)`", str(error))
        raise InvalidRequest(f"not a batch: {error}", param=named and named[named.lastindex or 0]) from None
    kind = KINDS.get(asked.endpoint)
    if kind is None:
        raise InvalidRequest(f"endpoint must be one of {', '.join(KINDS)}", param="endpoint")
    window = _WINDOW.fullmatch(asked.completion_window)
    if window is None:
        raise InvalidRequest("completion_window must be a time, 24h for example", param="completion_window")
    file = await Files(client).get(asked.input_file_id)
    return await register(
        client,
        file.id,
        kind,
        window=int(window[1]) * _SECONDS[window[2]],
        metadata=asked.metadata or {},
    )


async def find(client: Client, batch: str) -> Kept:
    """A batch that came over HTTP.

    Raises:
        BatchNotFound: There is none.
    """
    return await Batches(client.bus, client.owner).get(batch)


async def listed(client: Client) -> list[dict[str, Any]]:
    """All batches that came over HTTP, the newest first."""
    found = await Batches(client.bus, client.owner).all()
    return [kept.record.openai() for kept in found if kept.record.input_file]


async def cancel(client: Client, batch: str) -> dict[str, Any]:
    """Stops a batch; whoever runs it notices within a second.

    Raises:
        BatchNotFound: There is none.
        InvalidRequest: It has ended.
    """
    record = (await find(client, batch)).record
    if record.status in ENDED:
        raise InvalidRequest(f"the batch has ended: {record.status}", param="batch_id")
    await Batches(client.bus, client.owner).ask_cancel(batch)
    return record.openai() | {"status": "cancelling"}


class Runner:
    """Runs batches beside the gateway's requests.

    Args:
        owners: Whose.
        client: Of an owner.
    """

    def __init__(self, owners: Callable[[], Iterable[str]], client: Callable[[str], Client]) -> None:
        self._owners = owners
        self._client = client
        self._running: dict[str, asyncio.Task[None]] = {}
        self._seen: dict[str, int] = {}

    def start(self, kept: Kept) -> None:
        """Runs a batch, unless as many run as may; then it is found later."""
        batch = kept.record.id
        if batch not in self._running and len(self._running) < AT_ONCE:
            self._running[batch] = task = asyncio.create_task(self._run(kept))
            task.add_done_callback(lambda _: self._running.pop(batch, None))

    async def look(self) -> None:
        """Looks for batches that nobody runs, again and again."""
        try:
            while True:
                for owner in sorted(set(self._owners())):
                    try:
                        await self._look_once(owner)
                    except InferbusError as error:
                        log.debug("gateway.batches_not_read", reason=error.message)
                await asyncio.sleep(LOOK_EVERY)
        finally:
            await self._stop()

    async def _look_once(self, owner: str) -> None:
        client = self._client(owner)
        for kept in await Batches(client.bus, owner).all():
            record = kept.record
            if not record.input_file or record.status in ENDED:
                self._seen.pop(record.id, None)
                continue
            # Who runs it writes its record every two seconds.
            alone = record.holder is None or self._seen.get(record.id) == kept.sequence
            self._seen[record.id] = kept.sequence
            if alone:
                self.start(kept)

    async def _stop(self) -> None:
        """Gives all batches back."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _run(self, kept: Kept) -> None:
        record = kept.record
        client, batch = self._client(record.owner), record.id
        try:
            with tempfile.TemporaryDirectory(prefix="inferbus-batch-", ignore_cleanup_errors=True) as folder:
                output = Path(folder) / "output.jsonl"
                if record.status == "validating":
                    begun = await admit(client, kept, output)
                else:
                    begun = await proceed(client, batch, output=output)
                if begun is None:
                    return
                log.info("gateway.batch_begun", batch=batch)
                record = await run(client, begun)
                if not record.shared:
                    message = "there is no room on the server for the output"
                    await self._fail(client, batch, Problem(code="no_room", message=message))
            log.info("gateway.batch_ended", batch=batch, status=record.status)
        except BatchHeld:
            log.debug("gateway.batch_held", batch=batch)
        except CallerError as error:
            await self._fail(client, batch, Problem(code=error.code, message=error.message))
        except InferbusError as error:
            log.warning("gateway.batch_interrupted", batch=batch, reason=error.message)
        except Exception:  # a supervision point: it is tried again, here or by another gateway
            defects.exception("gateway.defect", batch=batch)

    async def _fail(self, client: Client, batch: str, problem: Problem) -> None:
        log.warning("gateway.batch_failed", batch=batch, code=problem.code)
        try:
            await fail(client, await find(client, batch), [problem])
        except (BatchHeld, BusUnavailable) as error:
            log.debug("gateway.batch_interrupted", batch=batch, reason=error.message)
