"""Draws the graphs of docs/performance.md from the readings in results/h200, or of a comparison of layouts.

python -m benchmarks.graphs [DIR]
python -m benchmarks.graphs --rates FILE [DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from benchmarks.disaggregation import Reading as Paced
from benchmarks.readings import Reading
from benchmarks.report import RESULTS, write

READINGS: Final = RESULTS / "h200"
DAY: Final = "2026-12-01"
FOLDER: Final = Path(__file__).parents[1] / "docs" / "graphs"

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 330, 62, 64, 40
COLOURS: Final = ("#5b6770", "#2a78b8", "#2f9e6e", "#c9a227", "#b4532a")
TICKS: Final = 4


class File(msgspec.Struct):
    """What is read of a report."""

    readings: list[Reading]


class Source:
    """The readings of one run.

    Args:
        name: Of its report.
    """

    def __init__(self, name: str) -> None:
        data = (READINGS / f"{name}-{DAY}.json").read_bytes()
        self._readings = msgspec.json.decode(data, type=File).readings

    def mean(self, layout: str, label: str, figure: Callable[[Reading], float], *, phase: str = "") -> float:
        """The mean of one figure over the passes, of one phase or of all."""
        return fmean(
            figure(each)
            for each in self._readings
            if each.layout == layout and each.item.label() == label and phase in ("", each.phase)
        )


def bars(
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Sequence[tuple[str, Sequence[float]]],
    shown: Callable[[float], str],
) -> str:
    """Grouped bars as an SVG; every bar carries its value."""
    # Where nothing was good enough all bars are 0.
    top = max(value for _, values in series for value in values) or 1.0
    plot, slot = HEIGHT - TOP - BOTTOM, (WIDTH - LEFT - 12) / len(groups)
    wide = min(46.0, slot * 0.86 / len(series))

    def level(value: float) -> float:
        return TOP + plot * (1 - value / (top * 1.08))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(12, 22, title, size=15, weight="bold"),
    ]
    at = 12.0
    for (name, _), colour in zip(series, COLOURS, strict=False):
        lines.append(f'<rect x="{at:.0f}" y="34" width="11" height="11" fill="{colour}"/>')
        lines.append(_text(at + 16, 44, name, size=12))
        at += 30 + 6.3 * len(name)
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = level(value)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 12}" stroke="#d8dde1"/>')
        label = shown(value) + (f" {unit}" if tick == TICKS else "")
        lines.append(_text(LEFT - 6, y + 4, label, size=11, anchor="end"))
    for number, group in enumerate(groups):
        middle = LEFT + slot * (number + 0.5)
        lines.append(_text(middle, HEIGHT - 14, group, size=12, anchor="middle"))
        for index, (_, values) in enumerate(series):
            x, y = middle + wide * (index - len(series) / 2), level(values[number])
            size = f'width="{wide - 3:.1f}" height="{level(0) - y:.1f}"'
            lines.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{COLOURS[index]}"/>')
            lines.append(_text(x + wide / 2 - 1.5, y - 4, shown(values[number]), size=10, anchor="middle"))
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, *, size: int, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="#22282d">{text}</text>'
    )


class PacedFile(msgspec.Struct):
    """What is read of a report of `benchmarks.disaggregation`."""

    readings: list[Paced]


def rates(report: Path, folder: Path) -> None:
    """Draws goodput and the first token's 99th percentile over the rate, for each trace of a comparison."""
    readings = msgspec.json.decode(report.read_bytes(), type=PacedFile).readings
    layouts = list(dict.fromkeys(each.layout for each in readings))
    for trace in dict.fromkeys(each.trace for each in readings):
        mine = {(each.layout, each.rate): each.outcome for each in readings if each.trace == trace}
        # A rate that some layout has no reading of, as the time was over, cannot be compared.
        sent = sorted({rate for _, rate in mine})
        sent = [rate for rate in sent if all((layout, rate) in mine for layout in layouts)]
        if not sent:
            continue
        groups = [f"{rate:g}/s" for rate in sent]
        good = [(layout, [mine[layout, rate].goodput for rate in sent]) for layout in layouts]
        firsts = {key: found.first.p99 if found.first else 0.0 for key, found in mine.items()}
        late = [(layout, [firsts[layout, rate] for rate in sent]) for layout in layouts]
        title = f"{trace} prompts: good answers a second, by requests a second"
        write(folder / f"rates-{trace}-goodput.svg", bars(title, "", groups, good, lambda v: f"{v:.1f}"))
        title = f"{trace} prompts: time to the first token, p99 in ms, by requests a second"
        write(folder / f"rates-{trace}-first.svg", bars(title, "", groups, late, lambda v: f"{v:,.0f}"))


def main(arguments: Sequence[str]) -> int:
    """Draws all of them."""
    if arguments[:1] == ["--rates"]:
        report, *to = map(Path, arguments[1:])
        target = to[0] if to else report.parent
        target.mkdir(parents=True, exist_ok=True)
        rates(report, target)
        return 0
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    single, http, pairs = Source("gpu-single-again"), Source("gpu-http"), Source("gpu-pairs")
    before = Source("gpu-single-before")

    def rate(reading: Reading) -> float:
        return reading.rate

    def cpu(reading: Reading) -> float:
        return reading.cpu_us

    def transfer(reading: Reading) -> float:
        found = reading.handoffs and reading.handoffs.transfer_seconds
        return found.p50 if found else 0.0

    labels = [f"tokens, {streams} streams" for streams in (16, 64, 256)]
    series = [
        ("bare engine", [single.mean("bare", label, rate) for label in labels]),
        ("SGLang's server", [http.mean("http", label, rate) for label in labels]),
        ("worker", [single.mean("both", label, rate) for label in labels]),
        ("pair", [pairs.mean("pair", label, rate, phase="pair") for label in labels]),
        ("pair under MPS", [pairs.mean("pair", label, rate, phase="pair-mps") for label in labels]),
    ]
    groups: Sequence[str] = ("16 streams", "64 streams", "256 streams")
    title = "One H200, Llama-3.1-8B shape, 512 in / 128 out: output tokens a second"
    write(folder / "gpu-throughput.svg", bars(title, "", groups, series, lambda value: f"{value:,.0f}"))

    whole, stored = "tokens, whole", "tokens, jobs"
    labels = [whole, "tokens, 256 streams", "chat, 64 streams", "chat, 256 streams"]
    ratios = [
        (name, [src.mean("both", label, rate) / src.mean("bare", label, rate) for label in labels])
        for name, src in (("at first", before), ("now", single))
    ]
    groups = ("512 jobs", "256 streams", "64 chats", "256 chats")
    title = "A worker against the bare engine: throughput"
    write(folder / "gpu-worker.svg", bars(title, "", groups, ratios, lambda value: f"{value:.2f}"))

    labels = ["tokens, 64 streams", "tokens, 256 streams", "chat, 64 streams", "chat, 256 streams"]
    costs = [
        ("bare engine", [single.mean("bare", label, cpu) for label in labels]),
        ("worker", [single.mean("both", label, cpu) for label in labels]),
        ("SGLang's server", [http.mean("http", label, cpu) for label in labels]),
    ]
    groups = ("64 streams", "256 streams", "64 chats", "256 chats")
    title = "CPU of the process with the tokenizer manager, microseconds for an output token"
    write(folder / "gpu-cpu.svg", bars(title, "", groups, costs, lambda value: f"{value:.0f}"))

    labels = ["tokens, paced 20/s", "tokens, paced 40/s", "tokens, 64 streams", "tokens, 256 streams", stored]
    took = [
        (name, [pairs.mean("pair", label, transfer, phase=phase) for label in labels])
        for name, phase in (("pair", "pair"), ("pair under MPS", "pair-mps"))
    ]
    groups = ("20/s", "40/s", "64 streams", "256 streams", "512 jobs")
    title = "KV transfer of a request (64 MiB), median in ms"
    write(folder / "gpu-transfer.svg", bars(title, "", groups, took, lambda value: f"{value:.0f}"))
    rates(READINGS / f"disaggregation-one-gpu-{DAY}.json", folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
