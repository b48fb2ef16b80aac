"""The streams that the contract needs: made where missing, never weakened.

Every worker may provision at every start. A stream or consumer that exists and is at least as strong as
asked for stays as it is; one that is weaker is reported, field by field, and changed only on demand
(`adopt`), upwards only, except for the number of copies (`lower_replicas`).

The server changes neither the storage nor the persist mode of a stream, and has no copies of one in the mode
`async`. Chunks and announcements may be lost, so their streams are made anew where that stands in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError, ProvisionError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.differences import changes, differences, strengthened
from inferbus.workers.bus.jetstream.models import capture_jobs
from inferbus.workers.config import StreamSettings

log = structlog.get_logger()

_IN_USE: Final = frozenset({10058, 10148, 10013})
"""Stream, consumer, consumer of an old server: exists already, with another configuration."""

LOSABLE: Final = frozenset({layout.STREAM, layout.WORKERS})
"""Streams whose messages may be lost."""

REMAKES: Final = 5
"""How often a stream is made anew; a running worker may make the old one again in between."""

SETTLE_SECONDS: Final = 30.0
SETTLE_POLL: Final = 0.1
"""Seconds until a stream has a leader again after a change of its copies: at times ten, without a leader."""

Report = Callable[[str], None]


async def provision(
    bus: Bus,
    settings: StreamSettings,
    *,
    model: str | None = None,
    adopt: bool = False,
    lower_replicas: bool = False,
    report: Report = lambda change: None,
) -> None:
    """Makes every stream that is missing.

    Args:
        bus: The connection.
        settings: Limits.
        model: Have the stream of jobs capture this model's jobs too.
        adopt: Raise what is weaker, instead of refusing it. Nothing is lowered.
        lower_replicas: With `adopt`: except for the number of copies.
        report: With `adopt`: called with a line of text after every change.

    Raises:
        ProvisionError: Streams are there, but weaker than asked for; names every field of all of them.
        BusUnavailable: JetStream is off, or a subject is not permitted; says which.
    """
    problems: list[str] = []
    jetstream = JetStream(bus)
    for config in layout.stream_configs(bus.subjects, settings):
        name = config["name"]
        new = layout.new_stream(config, bus.subjects) | {"name": layout.in_account(name, bus.subjects)}
        existing, made = await _get_or_create(jetstream, "STREAM", name, new)
        if foreign := _foreign(existing, bus.subjects):
            raise ProvisionError(
                f"the stream {new['name']} holds {', '.join(foreign)}: it belongs to a deployment with "
                f"another prefix than {bus.subjects.prefix!r}; choose one that differs beyond case and dots"
            )
        if adopt and made:
            report(f"{new['name']}: made")
        if not adopt:
            if differing := differences(config, existing):
                problems.append(f"stream {new['name']}: {'; '.join(differing)}")
            continue
        target = _target(config, existing, lower_replicas=lower_replicas)
        if not (changed := changes(existing, target)):
            continue
        if name in LOSABLE and _refused_in_place(existing, target):
            await _remake(jetstream, name, _anew(config, target), existing)
            report(f"{new['name']}: made anew, without its messages: {'; '.join(changed)}")
        else:
            await jetstream.call(f"STREAM.UPDATE.{name}", target)
            report(f"{new['name']}: {'; '.join(changed)}")
        await _settled(jetstream, name)
    if problems:
        raise _refusal(problems, settings.replicas)
    if model is not None:
        await capture_jobs(bus, model)


async def ensure_consumer(
    bus: Bus, stream: str, config: dict[str, Any], *, adopt: bool = False
) -> dict[str, Any]:
    """Makes a durable consumer if it is missing; returns its configuration as the server has it.

    Args:
        bus: The connection.
        stream: Of this stream.
        config: As wanted.
        adopt: Raise what is weaker, instead of refusing it. Nothing is ever lowered.

    Raises:
        ProvisionError: It is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    name = config["durable_name"]
    jetstream = JetStream(bus)
    stream = layout.in_account(stream, bus.subjects)
    existing, _ = await _get_or_create(jetstream, "CONSUMER", f"{stream}.{name}", config)
    if not (differing := differences(config, existing)):
        return existing
    if not adopt:
        raise _refusal([f"consumer {name} of {stream}: {'; '.join(differing)}"])
    body = {"stream_name": stream, "config": strengthened(config, existing), "action": "update"}
    updated: dict[str, Any] = (await jetstream.call(f"CONSUMER.CREATE.{stream}.{name}", body))["config"]
    return updated


async def _get_or_create(
    jetstream: JetStream, kind: str, name: str, config: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The server's configuration of a stream or consumer, which is made if it is not there; whether it was.

    Asked for before it is made, so that workers need no permission to make what an operator has made.
    """
    try:
        return dict((await jetstream.call(f"{kind}.INFO.{name}"))["config"]), False
    except ApiError as error:
        if error.err_code != (STREAM_NOT_FOUND if kind == "STREAM" else CONSUMER_NOT_FOUND):
            raise
    body = config
    if kind == "CONSUMER":
        # The filter is not repeated in the subject, where its wildcards would not be wildcards.
        body = {"stream_name": name.split(".")[0], "config": config, "action": "create"}
    try:
        made = dict((await jetstream.call(f"{kind}.CREATE.{name}", body))["config"])
    except ApiError as error:
        if error.err_code not in _IN_USE:
            raise
        # Another worker has made it meanwhile.
        return dict((await jetstream.call(f"{kind}.INFO.{name}"))["config"]), False
    log.info("jetstream.made", kind=kind.lower(), name=name)
    return made, True


def _target(config: dict[str, Any], existing: dict[str, Any], *, lower_replicas: bool) -> dict[str, Any]:
    """The configuration that adopting gives to a stream."""
    if lower_replicas:
        existing = existing | {"num_replicas": min(existing["num_replicas"], config["num_replicas"])}
    return strengthened(config, existing)


def _refused_in_place(existing: dict[str, Any], target: dict[str, Any]) -> bool:
    """Whether the server refuses a change because of how the stream is stored."""
    asynchronous = existing.get("persist_mode") == "async"
    return bool(target["storage"] != existing["storage"] or (asynchronous and target["num_replicas"] > 1))


def _anew(config: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    """A stream's configuration with the storage and persist mode that a new one would have."""
    kept = {name: value for name, value in target.items() if name not in ("storage", "persist_mode")}
    return kept | {name: config[name] for name in ("storage", "persist_mode") if name in config}


async def _remake(jetstream: JetStream, name: str, config: dict[str, Any], existing: dict[str, Any]) -> None:
    """Deletes a stream and makes it anew; where the server does not make it, as it was before.

    Its sequences go on, for readers that follow it.
    """
    problem: BusUnavailable | None = None
    for _ in range(REMAKES):
        first = (await jetstream.call(f"STREAM.INFO.{name}"))["state"]["last_seq"] + 1
        await jetstream.call(f"STREAM.DELETE.{name}")
        try:
            await jetstream.call(f"STREAM.CREATE.{name}", config | {"first_seq": first})
        except ApiError as error:
            problem = error
            if error.err_code not in _IN_USE:
                await jetstream.call(f"STREAM.CREATE.{name}", existing | {"first_seq": first})
                break
        else:
            return
    raise problem or BusUnavailable(f"{name} was not made anew")


async def _settled(jetstream: JetStream, name: str) -> None:
    """Returns once a stream has a leader, or after a while."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while loop.time() < deadline:
        try:
            info = await jetstream.call(f"STREAM.INFO.{name}", timeout=1.0)
        except BusUnavailable:
            continue
        cluster = info.get("cluster") or {}
        # A change of the number of copies goes on as long as `desired` is there (nats-server 2.15).
        if not cluster or (cluster.get("leader") and not cluster.get("desired")):
            return
        await asyncio.sleep(SETTLE_POLL)
    log.warning("jetstream.no_leader", name=name)


def _foreign(existing: dict[str, Any], subjects: Subjects) -> list[str]:
    """What a stream stores that no stream of this prefix stores."""
    transform = existing.get("subject_transform")
    stored = [transform["dest"]] if transform else existing.get("subjects") or []
    buckets = (layout.key(subjects, each, "") for each in (layout.WORKERS, layout.BATCHES, layout.KEYS))
    own = (f"{subjects.prefix}.", *buckets)
    return [each for each in stored if not each.startswith(own)]


def _refusal(problems: list[str], replicas: int = 1) -> ProvisionError:
    asked = f" --streams-replicas {replicas}" if replicas > 1 else ""
    return ProvisionError(
        "JetStream holds streams that are weaker than these settings ask for; nothing was changed. "
        f"`inferbus streams --adopt{asked}` raises them; or change the settings. " + " | ".join(problems)
    )
