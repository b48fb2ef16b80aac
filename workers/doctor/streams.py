"""The streams, compared with the settings; and other deployments in the account."""

from __future__ import annotations

from typing import Final

from inferbus.schemas.errors import BusUnavailable
from inferbus.workers.bus.connection.bus import Bus
from inferbus.workers.bus.errors import NotPermitted
from inferbus.workers.bus.jetstream import layout
from inferbus.workers.bus.jetstream.client import JetStream
from inferbus.workers.client.operator import Operator
from inferbus.workers.config import Settings
from inferbus.workers.doctor.findings import Finding, fail, ok, skip

_OURS: Final = (layout.JOBS.removeprefix("INFER"), layout.RESULTS.removeprefix("INFER"))


async def check(bus: Bus, settings: Settings) -> list[Finding]:
    """Streams and consumers, and other prefixes.

    Raises:
        BusUnavailable: The connection was lost.
    """
    try:
        states = await Operator(bus).streams(settings)
    except NotPermitted:
        return [skip("streams", "this user may not look at them; an operator or a worker may")]
    except BusUnavailable as error:
        return [skip("streams", error.message)]
    others = await _others(bus)
    found = _prefixes(bus, others)
    if not any(each.exists for each in states):
        mend = "start a worker, or run `inferbus streams --adopt`"
        if others:
            mend += f"; or set --nats-prefix to that of {' or '.join(others)}"
        return [fail("streams", f"no stream of the prefix {bus.subjects.prefix!r} is there", mend), *found]
    weaker = [
        f"{each.stream}: {text}"
        for each in states
        for text in ("missing",) * (not each.exists) + tuple(each.differences)
    ]
    weaker += [
        f"{consumer.consumer}: {text}"
        for each in states
        for consumer in each.consumers
        for text in consumer.differences
    ]
    if weaker:
        mend = "`inferbus streams --adopt` raises them, or change the settings"
        return [fail("streams", "; ".join(weaker), mend), *found]
    return [ok("streams", f"{len(states)} streams as the settings ask"), *found]


def _prefixes(bus: Bus, others: list[str]) -> list[Finding]:
    if not others:
        return []
    return [ok("prefix", f"{bus.subjects.prefix}; other deployments in this account: {', '.join(others)}")]


async def _others(bus: Bus) -> list[str]:
    """The first part of the streams' names of other deployments in this account."""
    jetstream, names = JetStream(bus), set[str]()
    try:
        while True:
            page = await jetstream.call("STREAM.NAMES", {"offset": len(names)})
            names.update(page["streams"] or ())
            if not page["streams"] or len(names) >= page["total"]:
                break
    except BusUnavailable:
        return []
    own = layout.in_account(layout.JOBS, bus.subjects).removesuffix(_OURS[0])
    first, second = _OURS
    return sorted(
        prefix
        for name in names
        if name.endswith(first)
        and (prefix := name.removesuffix(first)) != own
        and f"{prefix}{second}" in names
    )
