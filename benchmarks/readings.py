"""What is measured on a GPU, and the figures that come of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from benchmarks.handoffs import Handoffs
from benchmarks.load import LoadFailed, Sent
from benchmarks.report import Quantiles
from benchmarks.traces import arrivals, first
from benchmarks.workload import Kind, Plan, Shape

What = Literal["jobs", "whole", "streams", "paced"]


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One reading.

    Attributes:
        what: All requests at once and answered whole (`jobs`: their chunks are stored as well; `whole`: they
            are not; both are one `Engine.async_generate` for the bare engine), `streams`, or streams that
            come when they want to (`paced`).
        kind: Of the requests.
        concurrency: Streams open at a time.
        requests: How many in all; on average, where they are paced.
        rate: Of paced requests, a second.
    """

    what: What
    kind: Kind = "tokens"
    concurrency: int = 0
    requests: int
    rate: float = 0.0

    def label(self) -> str:
        """For people."""
        names = {"streams": f"{self.concurrency} streams", "paced": f"paced {self.rate:g}/s"}
        return f"{self.kind}, {names.get(self.what, self.what)}"

    def due(self, number: int) -> list[float]:
        """When paced requests are to be sent, in seconds; the same for every layout."""
        # 20 draws as 20.0 does, which it becomes on its way to another process.
        return arrivals(float(self.rate), self.requests / self.rate, seed=str(number))

    def bodies(self, plan: Plan, number: int) -> list[dict[str, Any]]:
        """The requests: the same for every layout, and never twice in an engine's life."""
        # A plan does not know of `what`, so the number keeps apart what differs in it alone.
        salt = {"streams": 0, "jobs": 100, "whole": 200, "paced": 300}[self.what] + number
        count, concurrency = self.requests, self.concurrency
        if self.what == "paced":
            count, concurrency = len(self.due(number)), round(self.rate)
        return plan.bodies(Shape(kind=self.kind, concurrency=concurrency, requests=count), salt)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """What one item gave.

    Attributes:
        phase: Of the run.
        layout: `bare`, `both`, `http`, `pair`, or a pair that differs from it, as `pair-pieces`.
        item: What was measured.
        number: Which pass.
        seconds: From the first request to the last answer's end.
        rate: Output tokens a second.
        messages: That the tokens came in.
        first: From a request to its first message; from the moment it was due, where requests are paced.
        gap: From a message to the next one of its stream.
        token: A stream's time after its first message for each further token.
        cpu_us: CPU of the process that holds the engine's tokenizer manager, microseconds a token.
        others: Cores that none of this phase's processes used.
        stolen: Cores that the hypervisor kept.
        failed: Paced requests that were not answered to their ends, by what became of them.
        late: How far the sender was behind paced requests' moments.
        handoffs: What the prefill worker told, in a pair.
    """

    phase: str
    layout: str
    item: Item
    number: int
    seconds: float
    rate: float
    messages: int
    first: Quantiles | None
    gap: Quantiles | None
    token: Quantiles | None
    cpu_us: float
    others: float
    stolen: float = 0.0
    failed: dict[str, int] = {}
    late: Quantiles | None = None
    handoffs: Handoffs | None = None


class Taken(msgspec.Struct, kw_only=True):
    """What a layout's own way of asking found."""

    seconds: float
    tokens: int
    messages: int = 0
    first: list[float] = []
    moments: list[list[float]] = []
    cpu: float = 0.0
    others: float = 0.0
    stolen: float = 0.0
    failed: dict[str, int] = {}
    late: list[float] = []
    handoffs: Handoffs | None = None

    @classmethod
    def of(cls, sent: Sequence[Sent], answer: int) -> Taken:
        """Of paced requests.

        Args:
            sent: What became of each.
            answer: Tokens of a whole answer.

        Raises:
            LoadFailed: None was answered to its end.
        """
        whole = [request for request in sent if request.fate == "ok"]
        fates = Counter(request.fate for request in sent if request.fate != "ok")
        if not whole:
            raise LoadFailed(f"nothing was answered: {dict(fates)}")
        return cls(
            seconds=max(request.moments[-1] for request in whole),
            tokens=len(whole) * answer,
            messages=sum(len(request.moments) for request in whole),
            first=[first(request) for request in whole],
            moments=[request.moments for request in whole],
            failed=dict(fates),
            late=[request.sent - request.due for request in sent],
        )

    def reading(self, phase: str, layout: str, item: Item, number: int, answer: int) -> Reading:
        """The figures of it."""
        gaps = (b - a for times in self.moments for a, b in pairwise(times))
        tokens = ((times[-1] - times[0]) / (answer - 1) for times in self.moments if len(times) > 1)
        return Reading(
            phase=phase,
            layout=layout,
            item=item,
            number=number,
            seconds=round(self.seconds, 3),
            rate=round(self.tokens / self.seconds, 1),
            messages=self.messages,
            first=Quantiles.of(self.first),
            gap=Quantiles.of(gaps),
            token=Quantiles.of(tokens),
            cpu_us=round(self.cpu / self.tokens * 1e6, 1),
            others=self.others,
            stolen=self.stolen,
            failed=self.failed,
            late=Quantiles.of(self.late),
            handoffs=self.handoffs,
        )


def shown(found: Reading) -> str:
    """A reading in a line."""
    line = (
        f"{found.item.label()}: {found.rate:,.0f} tok/s in {found.seconds:.2f} s, {found.cpu_us:.0f} us CPU"
    )
    if found.first and found.token and found.gap:
        line += (
            f", first {found.first.p50:.1f} (p99 {found.first.p99:.1f}) ms, token {found.token.p50:.2f} ms, "
            f"gap p50 {found.gap.p50:.2f} p99 {found.gap.p99:.2f} ms, {found.messages} messages"
        )
    if found.late:
        line += f", sent {found.late.p99:.1f} ms late (p99)"
    if found.handoffs and found.handoffs.seconds:
        line += f", hand-off {found.handoffs.seconds.p50:.0f} (p99 {found.handoffs.seconds.p99:.0f}) ms"
    if found.handoffs and found.handoffs.transfer_seconds:
        took = found.handoffs.transfer_seconds
        line += f", KV {took.p50:.1f} (p99 {took.p99:.1f}) ms"
    return line + "".join(f", {count} {fate}" for fate, count in found.failed.items())
