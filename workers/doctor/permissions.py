"""Whether this user may publish and subscribe to what its role needs.

The server tells a user its permissions by refusing, so every subject is tried. Nothing comes of it: the
model and the job that are named do not exist, and `Nats-Expected-Stream` names a stream that does not exist
either, so no stream stores the message. Calls of JetStream's API name streams and messages that do not exist.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from inferbus.schemas.subjects import LIVE_OWNER, Subjects
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import API
from inferbus.workers.doctor.findings import Finding, fail, ok

User = Literal["client", "worker", "operator", "gateway"]

NOBODY: Final = "inferbus-doctor"
"""A model, a worker and a stream that do not exist."""

_HEADERS: Final = {"Nats-Expected-Stream": NOBODY}
_NO_MATCH: Final = b'{"seq":0,"filter":"inferbus-doctor"}'
"""The body of every call: it selects no message, also where a call would delete some."""


class Need(msgspec.Struct, frozen=True):
    """A subject that a role uses.

    Attributes:
        what: For what.
        subject: The subject, of things that do not exist.
        subscribe: Whether it is subscribed to, else published to.
    """

    what: str
    subject: str
    subscribe: bool = False


def needs(user: User, subjects: Subjects, owner: str) -> list[Need]:
    """What a role needs.

    Args:
        user: Whose needs.
        subjects: Under the configured prefix.
        owner: Whose jobs a client submits.
    """
    found = {"client": _client, "worker": _worker, "operator": _operator, "gateway": _gateway}[user]
    return list(found(subjects, owner, secrets.token_hex(8)))


async def check(bus: Bus, user: User, owner: str) -> Finding:
    """Whether the connection's user may do what a role does.

    Raises:
        BusUnavailable: The connection was lost.
    """
    wanted = needs(user, bus.subjects, owner)
    for need in wanted:
        if not need.subscribe:
            bus.send(need.subject, _NO_MATCH if need.subject.startswith(API) else b"", _HEADERS)
    await bus.flush()
    missing = [need for need in wanted if not await _allowed(bus, need)]
    name = f"permissions ({user})"
    if not missing:
        return ok(name, f"all of {len(wanted)} subjects")
    # Several may be missing for one purpose, and the purposes are what an operator knows.
    purposes = ", ".join(dict.fromkeys(need.what for need in missing))
    return fail(
        name,
        f"this user may not: {purposes}",
        "; ".join(
            f"{verb}: {', '.join(subjects)}"
            for verb, subjects in (
                ("allow it to publish", [need.subject for need in missing if not need.subscribe]),
                ("allow it to subscribe", [need.subject for need in missing if need.subscribe]),
            )
            if subjects
        )
        + f" ({NOBODY} and random ids stand for any); deploy/nats/users.conf has users for every role",
    )


async def _allowed(bus: Bus, need: Need) -> bool:
    if not need.subscribe:
        return bus.may_publish(need.subject)
    try:
        subscription = await bus.subscribe(need.subject, lambda message: None)
    except NotPermitted:
        return False
    await subscription.unsubscribe()
    return True


def _client(subjects: Subjects, owner: str, job: str) -> Iterator[Need]:
    results, chunks, workers, objects = (
        layout.in_account(each, subjects)
        for each in (layout.RESULTS, layout.STREAM, layout.WORKERS, layout.OBJECTS)
    )
    result, stream = subjects.result(owner, job), subjects.stream(owner, job)
    part = subjects.object(owner, job, 0)
    yield Need("send live requests", subjects.request(NOBODY, "tokens"))
    yield Need("submit jobs", subjects.job(NOBODY, "batch", owner, "tokens"))
    yield Need("submit large jobs", part)
    yield Need("cancel jobs", subjects.cancel(owner, job))
    yield Need("cancel live requests", subjects.cancel(LIVE_OWNER, job))
    for asked in (owner, LIVE_OWNER):
        yield Need("ask whether a worker lives", subjects.alive(asked, job))
    yield Need("read jobs", subjects.read(owner, job))
    yield Need("read results", f"{API}.DIRECT.GET.{results}.{result}")
    yield Need("read chunks", f"{API}.DIRECT.GET.{chunks}.{stream}")
    yield Need("read large results", f"{API}.DIRECT.GET.{objects}.{part}")
    yield Need("see workers", f"{API}.DIRECT.GET.{workers}")
    yield Need("hear results", result, subscribe=True)
    yield Need("hear chunks", stream, subscribe=True)


def _worker(subjects: Subjects, owner: str, job: str) -> Iterator[Need]:
    jobs, workers = (layout.in_account(each, subjects) for each in (layout.JOBS, layout.WORKERS))
    yield Need("make streams", f"{API}.STREAM.CREATE.{NOBODY}")
    yield Need("look at streams", f"{API}.STREAM.INFO.{NOBODY}")
    yield Need("make consumers", f"{API}.CONSUMER.CREATE.{jobs}.{NOBODY}")
    yield Need("take jobs", f"{API}.CONSUMER.MSG.NEXT.{jobs}.{NOBODY}")
    yield Need("acknowledge jobs", f"$JS.ACK.{jobs}.{NOBODY}")
    yield Need("announce itself", layout.key(subjects, layout.WORKERS, f"{NOBODY}.{NOBODY}"))
    yield Need("see workers", f"{API}.DIRECT.GET.{workers}")
    yield Need("store chunks", subjects.stream(owner, job))
    yield Need("store results", f"{subjects.prefix}.in.{job}.results.{NOBODY}.{NOBODY}")
    yield Need("hand prompts off", subjects.prefill(NOBODY, NOBODY))
    yield Need("pass requests on", subjects.passed(NOBODY, NOBODY, "tokens"))
    yield Need("answer", f"_INBOX.{job}")
    yield Need("take live requests", subjects.request(NOBODY, "tokens"), subscribe=True)
    yield Need("take hand-offs", subjects.prefill(NOBODY, NOBODY), subscribe=True)
    for family in ("cancel", "alive", "read"):
        yield Need(f"hear {family} requests", subjects.all(family), subscribe=True)
    yield Need("see workers", layout.key(subjects, layout.WORKERS, ">"), subscribe=True)
    yield Need("answer `nats micro`", f"$SRV.PING.{NOBODY}", subscribe=True)


def _operator(subjects: Subjects, owner: str, job: str) -> Iterator[Need]:
    jobs, dead = (layout.in_account(each, subjects) for each in (layout.JOBS, layout.DEAD))
    yield Need("look at streams", f"{API}.STREAM.INFO.{NOBODY}")
    yield Need("look at queues", f"{API}.CONSUMER.LIST.{NOBODY}")
    yield Need("read any stream", f"{API}.DIRECT.GET.{NOBODY}.{NOBODY}")
    yield Need("read dead letters", f"{API}.STREAM.MSG.GET.{dead}")
    yield Need("remove dead letters", f"{API}.STREAM.MSG.DELETE.{dead}")
    yield Need("purge dead letters", f"{API}.STREAM.PURGE.{dead}")
    yield Need("pause and resume", f"{API}.CONSUMER.PAUSE.{jobs}.{NOBODY}")
    yield Need("replay dead letters", subjects.job(NOBODY, "batch", owner, "tokens"))
    yield Need("cancel jobs of any owner", subjects.cancel(owner, job))
    yield Need("ask workers", f"$SRV.PING.{NOBODY}")
    yield Need("add and remove API keys", f"{subjects.prefix}.in.{job}.keys.{NOBODY}")


def _gateway(subjects: Subjects, owner: str, job: str) -> Iterator[Need]:
    """What clients need, for every owner; and batches, their files, and keys."""
    batches, files, keys = (
        layout.in_account(each, subjects) for each in (layout.BATCHES, layout.FILES, layout.KEYS)
    )
    yield from _client(subjects, job, job)
    record, file = layout.batch_key(subjects, job, job), subjects.file(job, job, "input", 0)
    yield Need("run batches", record)
    yield Need("read batches", f"{API}.DIRECT.GET.{batches}.{record}")
    yield Need("list batches", f"{API}.DIRECT.GET.{batches}")
    yield Need("remove files and results", subjects.remove(job, job))
    yield Need("store files", file)
    yield Need("read files", f"{API}.DIRECT.GET.{files}.{file}")
    yield Need("list files", f"{API}.DIRECT.GET.{files}")
    jobs = layout.in_account(layout.JOBS, subjects)
    yield Need("know models that were served", f"{API}.CONSUMER.INFO.{jobs}.{NOBODY}")
    yield Need("see queues", f"{API}.CONSUMER.LIST.{jobs}")
    yield Need("read API keys", f"{API}.DIRECT.GET.{keys}")
    yield Need("hear of changed API keys", layout.key(subjects, layout.KEYS, ">"), subscribe=True)
