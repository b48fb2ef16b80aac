"""A snapshot, drawn for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.cli.tables import printable, span
from inferbus.workers.top.collector import total
from inferbus.workers.top.snapshot import BatchLine, QueueLine, Rate, Snapshot

_STATES: Final = {"ready": "green", "starting": "yellow", "draining": "yellow", "failed": "red"}
_WORKERS: Final = (
    *("worker", "role", "model", "state", "busy", "held", "engine", "kv"),
    *("req/s", "err/s", "mean"),
)
_QUEUES: Final = ("queue", "class", "pending", "taken", "again", "pulls", "oldest", "")
_BATCHES: Final = ("batch", "owner", "model", "status", "done", "lines", "failed", "lines/s")


def drawn(now: Snapshot) -> RenderableType:
    """Workers, queues, batches and what is wrong, one below the other."""
    parts: list[RenderableType] = [_summary(now), Text()]
    parts.append(_table(_WORKERS, (_worker(info, now.rates.get(info.worker)) for info in now.workers)))
    if now.queues:
        parts += [Text(), _table(_QUEUES, map(_queue, now.queues))]
    if now.batches:
        parts += [Text(), _table(_BATCHES, map(_batch, now.batches))]
    notes = [*now.troubles]
    if now.hidden:
        notes.append(f"this user may not look at: {', '.join(now.hidden)}")
    parts += [Text(), *(Text(printable(each), style="yellow") for each in notes)] if notes else []
    return Group(*parts)


def _summary(now: Snapshot) -> Text:
    busy, slots = total(now.workers)
    words = [f"{len(now.workers)} workers", f"{busy}/{slots} slots"]
    if now.rates:
        words.append(f"{sum(rate.requests for rate in now.rates.values()):.1f} requests/s")
        words.append(f"{sum(rate.errors for rate in now.rates.values()):.1f} errors/s")
    words.append(f"{sum(each.pending for each in now.queues)} jobs queued")
    if now.batches and now.tokens is not None:
        words.append(f"{now.tokens:.0f} tokens/s of batches")
    if now.dead is not None:
        words.append(f"{now.dead} dead letters")
    return Text(" · ".join(words), style="bold")


def _table(columns: Sequence[str], rows: Iterable[Sequence[Text | str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    return table


def _worker(info: WorkerInfo, rate: Rate | None) -> Sequence[Text | str]:
    load = info.load
    kv = info.capacity.kv_tokens if info.capacity else 0
    state = f"{info.state}: {info.reason}" if info.reason else info.state
    return (
        info.worker,
        info.role,
        info.model,
        Text(printable(state), style=_STATES[info.state]),
        f"{load.busy}/{load.slots}",
        str(load.queued),
        f"{load.running}+{load.waiting}",
        f"{load.kv_used / kv:.0%}" if kv else "-",
        "-" if rate is None else f"{rate.requests:.1f}",
        "-" if rate is None else f"{rate.errors:.1f}",
        "-" if rate is None or rate.latency is None else f"{rate.latency:.2f} s",
    )


def _queue(each: QueueLine) -> Sequence[Text | str]:
    return (
        each.model,
        each.job_class,
        str(each.pending),
        str(each.taken),
        str(each.redelivered),
        str(each.pulls),
        "-" if each.oldest is None else span(each.oldest),
        Text("paused", style="yellow") if each.paused else "",
    )


def _batch(each: BatchLine) -> Sequence[Text | str]:
    share = f"{each.ended / each.lines:.0%}" if each.lines else "-"
    return (
        each.id,
        each.owner,
        each.model,
        each.status,
        share,
        str(each.lines),
        str(each.failed),
        f"{each.rate:.1f}",
    )
