"""The streams and consumers that the contract needs: made where missing, never weakened.

Provisioning may be repeated by every worker at every start. What is there
already and at least as strong as asked for stays as it is; what is weaker is
told, field by field, and changed only on demand (`adopt`), upwards only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from schemas.errors import BusUnavailable
from schemas.subjects import JobClass, Subjects, escape
from workers.bus.connection import Bus
from workers.bus.differences import differences, strengthened
from workers.bus.errors import CONSUMER_NOT_FOUND, NOT_FOUND, ApiError, ProvisionError
from workers.bus.jetstream import api
from workers.config import MIB, StreamSettings

NANO: Final = 1_000_000_000
UNLIMITED: Final = -1
DAY: Final = 24 * 3600
ADVISORY: Final = "$JS.EVENT.ADVISORY.CONSUMER"
CANCEL_AGE: Final = DAY
ADVISORY_AGE: Final = 7 * DAY
MAX_ACK_PENDING: Final = 100_000
"""Of all workers together: workers bound what they hold by their slots, the server must not on top of it."""

MAX_WAITING: Final = 4096
"""Open pull requests of all workers together."""

REAPER: Final = "reaper"
"""The consumer that reads of jobs whose last worker died (trials A4, A6)."""

_IN_USE: Final = frozenset({10058, 10148, 10013})
"""Stream name, consumer name (2.10 and later, earlier): there already, with another configuration."""


class Streams(msgspec.Struct, frozen=True):
    """The names of the streams that belong to one subject prefix; `INFER_JOBS` and so on by default."""

    jobs: str
    stream: str
    results: str
    dead: str
    cancel: str
    advisories: str
    workers: str
    bucket: str

    @classmethod
    def of(cls, prefix: str = "infer") -> Streams:
        """Two prefixes may share an account, so the names follow the prefix."""
        first = prefix.upper().replace(".", "_").replace("=", "_")
        names = ("JOBS", "STREAM", "RESULTS", "DEAD", "CANCEL", "ADVISORIES")
        streams = {name.lower(): f"{first}_{name}" for name in names}
        return cls(**streams, workers=f"KV_{first}_WORKERS", bucket=f"{first}_WORKERS")


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable consumer as the server has it.

    Attributes:
        stream: Of this stream.
        name: The durable's name.
        filter: The subjects that it gets.
        ack_wait: Seconds; heartbeats are due three times as often.
        max_deliver: Attempts, -1 for no limit.
    """

    stream: str
    name: str
    filter: str
    ack_wait: float
    max_deliver: int


def stream_configs(
    subjects: Subjects, settings: StreamSettings, *, announce_ttl: float
) -> list[dict[str, Any]]:
    """What every stream should be, in the server's own terms."""
    names = Streams.of(subjects.prefix)
    # Chunks: kept long enough to heal a gap or to continue; the oldest make room, since a worker must never
    # wait for readers. Everything else refuses what does not fit, so that nothing is lost silently (A20).
    stream = {"storage": "memory", "discard": "old", "max_msgs_per_subject": settings.stream_max_chunks}
    return [
        _stream(
            names.jobs,
            [subjects.all("jobs")],
            settings,
            retention="workqueue",
            max_bytes=settings.jobs_max_bytes,
            max_age=settings.jobs_max_age,
        ),
        _stream(
            names.stream,
            [subjects.all("stream")],
            settings,
            max_bytes=settings.stream_max_bytes,
            max_age=settings.stream_max_age,
            **stream,
        ),
        _stream(
            names.results,
            [subjects.all("results")],
            settings,
            max_bytes=settings.results_max_bytes,
            max_age=settings.results_max_age,
        ),
        _stream(
            names.dead,
            [subjects.all("dead")],
            settings,
            max_bytes=settings.dead_max_bytes,
            max_age=settings.dead_max_age,
        ),
        # One mark per job is enough, and the newest counts.
        _stream(
            names.cancel,
            [subjects.all("cancel")],
            settings,
            max_bytes=64 * MIB,
            max_age=CANCEL_AGE,
            discard="old",
            max_msgs_per_subject=1,
        ),
        # Advisories are lost when nobody listens at that moment, so a stream listens (trial A6).
        _stream(
            names.advisories,
            [f"{ADVISORY}.{kind}.{names.jobs}.>" for kind in ("MAX_DELIVERIES", "MSG_TERMINATED")],
            settings,
            max_bytes=64 * MIB,
            max_age=ADVISORY_AGE,
            discard="old",
        ),
        # A key-value bucket, as ADR-8 lays it out, so that `nats kv` reads it.
        _stream(
            names.workers,
            [f"$KV.{names.bucket}.>"],
            settings,
            max_bytes=16 * MIB,
            max_age=announce_ttl,
            storage="memory",
            max_msgs_per_subject=1,
            duplicate_window=min(announce_ttl, settings.duplicate_window),
            allow_rollup_hdrs=True,
            deny_delete=True,
        ),
    ]


def _stream(
    name: str,
    subjects: list[str],
    settings: StreamSettings,
    *,
    max_bytes: int,
    max_age: float,
    **others: Any,
) -> dict[str, Any]:
    window = min(settings.duplicate_window, max_age or settings.duplicate_window)
    return {
        "name": name,
        "subjects": subjects,
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_bytes": max_bytes,
        "max_age": nanoseconds(max_age),
        "max_msgs": UNLIMITED,
        "max_msgs_per_subject": UNLIMITED,
        "max_msg_size": UNLIMITED,
        "max_consumers": UNLIMITED,
        "num_replicas": settings.replicas,
        "allow_direct": True,
        **(others | {"duplicate_window": nanoseconds(others.get("duplicate_window", window))}),
    }


async def provision(
    bus: Bus, settings: StreamSettings, *, announce_ttl: float = 10.0, adopt: bool = False
) -> Streams:
    """Makes every stream that is missing.

    Args:
        bus: The connection.
        settings: Limits.
        announce_ttl: Seconds after which a silent worker is no longer listed.
        adopt: Raise what is weaker, instead of refusing it. Nothing is ever lowered.

    Raises:
        ProvisionError: Streams are there, but weaker than asked for; names every field of all of them.
        BusUnavailable: JetStream is off, or a subject is not permitted; says which.
    """
    problems: list[str] = []
    for config in stream_configs(bus.subjects, settings, announce_ttl=announce_ttl):
        found = await _create_or_get(bus, "STREAM", config["name"], config)
        if not (differing := differences(config, found)):
            continue
        if adopt:
            await api(bus, f"STREAM.UPDATE.{config['name']}", strengthened(config, found))
        else:
            problems.append(f"stream {config['name']}: {'; '.join(differing)}")
    if problems:
        raise _refusal(problems)
    names = Streams.of(bus.subjects.prefix)
    await _ensure(bus, names.advisories, _reaper(names), adopt=adopt)
    return names


async def job_consumers(
    bus: Bus,
    model: str,
    classes: Sequence[JobClass],
    *,
    ack_wait: float,
    max_deliver: int,
    adopt: bool = False,
) -> list[Consumer]:
    """One durable consumer per class for a model, shared by all its workers.

    Raises:
        ProvisionError: One is there, but weaker than asked for.
        BusUnavailable: JetStream is off, or a subject is not permitted.
    """
    stream = Streams.of(bus.subjects.prefix).jobs
    consumers = []
    for job_class in classes:
        config = {
            "durable_name": durable(model, job_class),
            "filter_subject": bus.subjects.jobs_of(model, job_class),
            "deliver_policy": "all",
            "replay_policy": "instant",
            "ack_policy": "explicit",
            "ack_wait": nanoseconds(ack_wait),
            "max_deliver": max_deliver,
            "max_ack_pending": MAX_ACK_PENDING,
            "max_waiting": MAX_WAITING,
        }
        consumers.append(await _ensure(bus, stream, config, adopt=adopt))
    return consumers


def durable(model: str, job_class: JobClass) -> str:
    """The name of the durable consumer of a model and class; the server takes 255 characters."""
    name = f"{escape(model)}-{job_class}"
    if len(name) <= 200:
        return name
    return f"{name[:160]}-{hashlib.sha256(name.encode()).hexdigest()[:24]}-{job_class}"


def nanoseconds(seconds: float) -> int:
    """JetStream counts time in them."""
    return round(seconds * NANO)


def _reaper(names: Streams) -> dict[str, Any]:
    return {
        "durable_name": REAPER,
        "filter_subject": f"{ADVISORY}.MAX_DELIVERIES.{names.jobs}.>",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": nanoseconds(30),
        "max_deliver": UNLIMITED,
        "max_ack_pending": 1000,
        "max_waiting": 512,
    }


async def _ensure(bus: Bus, stream: str, config: dict[str, Any], *, adopt: bool) -> Consumer:
    name = config["durable_name"]
    found = await _create_or_get(bus, "CONSUMER", f"{stream}.{name}", config)
    if differing := differences(config, found):
        if not adopt:
            raise _refusal([f"consumer {name} of {stream}: {'; '.join(differing)}"])
        body = {"stream_name": stream, "config": strengthened(config, found), "action": "update"}
        found = (await api(bus, f"CONSUMER.CREATE.{stream}.{name}", body))["config"]
    return Consumer(
        stream=stream,
        name=name,
        filter=config["filter_subject"],
        ack_wait=found.get("ack_wait", config["ack_wait"]) / NANO,
        max_deliver=found.get("max_deliver", UNLIMITED),
    )


async def _create_or_get(bus: Bus, kind: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The server's configuration of a stream or consumer, which is made if it is not there.

    Asked for before it is made, so that workers need no permission to make what an operator has made.
    """
    try:
        return dict((await api(bus, f"{kind}.INFO.{name}"))["config"])
    except ApiError as error:
        if error.status != NOT_FOUND or (kind == "CONSUMER" and error.err_code != CONSUMER_NOT_FOUND):
            raise
    path, body = f"{kind}.CREATE.{name}", config
    if kind == "CONSUMER":
        body = {"stream_name": name.split(".")[0], "config": config, "action": "create"}
    try:
        return dict((await api(bus, path, body))["config"])
    except ApiError as error:
        if error.err_code not in _IN_USE:
            raise
        # Another worker was quicker.
        return dict((await api(bus, f"{kind}.INFO.{name}"))["config"])


def _refusal(problems: list[str]) -> ProvisionError:
    return ProvisionError(
        "JetStream already holds what inferbus would weaken by using it; nothing was changed. "
        "`inferbus streams --adopt` raises it to these settings; or change the settings. "
        + " | ".join(problems)
    )


async def require_jetstream(bus: Bus) -> None:
    """Fails early, with one line, where JetStream is off or may not be asked.

    Raises:
        BusUnavailable: Saying which.
    """
    try:
        await api(bus, "INFO")
    except ApiError as error:
        raise BusUnavailable(error.message) from error
