"""The streams that the contract needs: made where missing, never weakened.

Every worker may provision at every start. A stream or consumer that exists and is at least as strong as
asked for stays as it is; one that is weaker is reported, field by field, and changed only on demand
(`adopt`), upwards only.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

from inferbus.schemas.subjects import Subjects
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, ApiError, ProvisionError
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.bus.jetstream.differences import differences, strengthened
from inferbus.workers.bus.jetstream.models import capture_jobs
from inferbus.workers.config import StreamSettings

log = structlog.get_logger()

_IN_USE: Final = frozenset({10058, 10148, 10013})
"""Stream, consumer, consumer of an old server: exists already, with another configuration."""


async def provision(
    bus: Bus, settings: StreamSettings, *, model: str | None = None, adopt: bool = False
) -> None:
    """Makes every stream that is missing.

    Args:
        bus: The connection.
        settings: Limits.
        model: Have the stream of jobs capture this model's jobs too.
        adopt: Raise what is weaker, instead of refusing it. Nothing is ever lowered.

    Raises:
        ProvisionError: Streams are there, but weaker than asked for; names every field of all of them.
        BusUnavailable: JetStream is off, or a subject is not permitted; says which.
    """
    problems: list[str] = []
    jetstream = JetStream(bus)
    for config in layout.stream_configs(bus.subjects, settings):
        name = config["name"]
        new = layout.new_stream(config, bus.subjects) | {"name": layout.in_account(name, bus.subjects)}
        existing = await _get_or_create(jetstream, "STREAM", name, new)
        if foreign := _foreign(existing, bus.subjects):
            raise ProvisionError(
                f"the stream {new['name']} holds {', '.join(foreign)}: it belongs to a deployment with "
                f"another prefix than {bus.subjects.prefix!r}; choose one that differs beyond case and dots"
            )
        if not (differing := differences(config, existing)):
            continue
        if adopt:
            await jetstream.call(f"STREAM.UPDATE.{name}", strengthened(config, existing))
        else:
            problems.append(f"stream {new['name']}: {'; '.join(differing)}")
    if problems:
        raise _refusal(problems)
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
    existing = await _get_or_create(jetstream, "CONSUMER", f"{stream}.{name}", config)
    if not (differing := differences(config, existing)):
        return existing
    if not adopt:
        raise _refusal([f"consumer {name} of {stream}: {'; '.join(differing)}"])
    body = {"stream_name": stream, "config": strengthened(config, existing), "action": "update"}
    updated: dict[str, Any] = (await jetstream.call(f"CONSUMER.CREATE.{stream}.{name}", body))["config"]
    return updated


async def _get_or_create(
    jetstream: JetStream, kind: str, name: str, config: dict[str, Any]
) -> dict[str, Any]:
    """The server's configuration of a stream or consumer, which is made if it is not there.

    Asked for before it is made, so that workers need no permission to make what an operator has made.
    """
    try:
        return dict((await jetstream.call(f"{kind}.INFO.{name}"))["config"])
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
        return dict((await jetstream.call(f"{kind}.INFO.{name}"))["config"])
    log.info("jetstream.made", kind=kind.lower(), name=name)
    return made


def _foreign(existing: dict[str, Any], subjects: Subjects) -> list[str]:
    """What a stream stores that no stream of this prefix stores."""
    transform = existing.get("subject_transform")
    stored = [transform["dest"]] if transform else existing.get("subjects") or []
    own = (f"{subjects.prefix}.", f"$KV.{layout.bucket(subjects)}.")
    return [each for each in stored if not each.startswith(own)]


def _refusal(problems: list[str]) -> ProvisionError:
    return ProvisionError(
        "JetStream holds streams that are weaker than these settings ask for; nothing was changed. "
        "`inferbus streams --adopt` raises them; or change the settings. " + " | ".join(problems)
    )
