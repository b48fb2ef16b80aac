"""JetStream: whether it is on, its limits, and its store in memory."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any, Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import FULL, ApiError, NotPermitted
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.config import MIB, Settings
from inferbus.workers.doctor.findings import Finding, fail, ok, skip, warn

PROBE: Final = "INFERBUS_DOCTOR"


async def check(bus: Bus, settings: Settings) -> list[Finding]:
    """JetStream as this user's account has it.

    Raises:
        BusUnavailable: The connection was lost.
    """
    try:
        account = await JetStream(bus).call("INFO")
    except NotPermitted:
        return [skip("jetstream", "this user may not ask for it; an operator or a worker may")]
    except BusUnavailable as error:
        mend = "put `jetstream {store_dir: …}` into the server's configuration (deploy/nats/nats.conf)"
        if isinstance(error, ApiError):
            mend = "enable it for this account: `jetstream: enabled`"
        return [fail("jetstream", error.message, mend)]
    return [_files(bus, account, settings), await _memory(bus, account, settings)]


def _files(bus: Bus, account: dict[str, Any], settings: Settings) -> Finding:
    configs = layout.stream_configs(bus.subjects, settings.streams)
    on_disk = [config for config in configs if config["storage"] == "file"]
    wanted = sum(config["max_bytes"] * config["num_replicas"] for config in on_disk)
    limit = account["limits"]["max_storage"]
    if 0 <= limit < wanted:
        return fail(
            "jetstream",
            f"the account may store {limit // MIB} MiB, and the streams ask for {wanted // MIB} MiB",
            "raise the account's max_file, or lower --streams-jobs-max-bytes and the other limits of streams",
        )
    shown = "no limit of the account" if limit < 0 else f"{limit // MIB} MiB allowed"
    return ok("jetstream", f"on; {account['storage'] // MIB} MiB stored, {shown}")


async def _memory(bus: Bus, account: dict[str, Any], settings: Settings) -> Finding:
    """Replicated streams of chunks and announcements are in memory, so the server must have room there."""
    problem = await _memory_refused(bus, account)
    if problem is None:
        return ok("memory store", "streams in memory are possible")
    if isinstance(problem, str):
        return skip("memory store", problem)
    mend = (
        "set max_memory_store in `jetstream {…}`; in NATS's Helm chart: config.jetstream.memoryStore.enabled"
    )
    if settings.streams.replicas > 1:
        return fail(
            "memory store", f"no streams in memory, which several copies need: {problem.message}", mend
        )
    text = f"no streams in memory: {problem.message}; one copy (--streams-replicas 1) needs none"
    return warn("memory store", text, f"for several copies {mend}")


async def _memory_refused(bus: Bus, account: dict[str, Any]) -> BusUnavailable | str | None:
    """Makes a stream in memory and deletes it: the server tells its limit in no other way.

    Returns:
        Why the server has no room for it, as an error; or why it was not tried, as text; None where it has.
    """
    if account["limits"]["max_memory"] == 0:
        return BusUnavailable("the account has no memory for streams")
    jetstream, name = JetStream(bus), f"{PROBE}_{secrets.token_hex(4)}"
    config = {
        "name": name,
        "subjects": [f"{name}.none"],
        "storage": "memory",
        "max_bytes": MIB,
        "max_age": 60 * 10**9,
        "num_replicas": 1,
    }
    try:
        await jetstream.call(f"STREAM.CREATE.{name}", config)
    except NotPermitted:
        return "this user may not make streams; a worker may"
    except ApiError as error:
        return error if error.err_code in FULL else error.message
    with contextlib.suppress(BusUnavailable):
        await jetstream.call(f"STREAM.DELETE.{name}")
    return None
