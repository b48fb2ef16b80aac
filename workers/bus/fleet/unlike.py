"""Workers of one model that serve different things.

They share the model's requests, so what a caller gets depends on which of them takes his request.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from inferbus.schemas.fleet import WorkerInfo


def unlike(workers: Iterable[WorkerInfo]) -> list[str]:
    """One line for each thing in which workers that answer requests of one model differ."""
    answering = sorted(
        (info for info in workers if info.kinds and info.capacity and info.state != "failed"),
        key=lambda info: (info.model, info.worker),
    )
    return [
        line for model, group in groupby(answering, lambda info: info.model) for line in _lines(model, group)
    ]


def _lines(model: str, group: Iterable[WorkerInfo]) -> Iterable[str]:
    found: dict[str, dict[str, list[str]]] = {}
    for info in group:
        for name, value in _served(info).items():
            found.setdefault(name, {}).setdefault(value, []).append(info.worker)
    for name, values in found.items():
        if len(values) > 1:
            told = "; ".join(f"{value} ({', '.join(workers)})" for value, workers in values.items())
            yield f"workers of {model} serve different things under one name: {name} {told}"


def _served(info: WorkerInfo) -> dict[str, str]:
    served = {"kinds": " ".join(sorted(info.kinds))}
    if info.capacity is not None:
        served |= {
            "context length": str(info.capacity.context_length),
            "vocabulary": str(info.capacity.vocabulary),
        }
    return served
