"""The announced workers: whether every model can be served."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from inferbus.schemas.fleet import WorkerInfo
from inferbus.workers.bus.fleet.condition import Trouble
from inferbus.workers.doctor.findings import Finding, fail, ok, warn
from inferbus.workers.pairing.picker import Picker


def check(workers: Sequence[WorkerInfo]) -> list[Finding]:
    """One finding for each model, and one for each worker that failed."""
    if not workers:
        return [fail("workers", "no worker is announced", "start one: `inferbus worker both --model-path …`")]
    ordered = sorted(workers, key=lambda info: info.model)
    found = [_model(model, list(group)) for model, group in groupby(ordered, key=lambda info: info.model)]
    return found + [
        warn("workers", f"{info.worker} on {info.host} failed: {info.reason}", "see its log; start it again")
        for info in ordered
        if info.state == "failed"
    ]


def trouble(found: Trouble) -> Finding:
    """A stream that fills, a lost consumer, or workers that differ: what `inferbus health` tells."""
    level = fail if found.serious else warn
    return level("fleet", found.text, "docs/operating.md has what to do, under troubleshooting")


def _model(model: str, workers: Sequence[WorkerInfo]) -> Finding:
    name = f"model {model}"
    roles = {
        role: [info for info in workers if info.state == "ready" and info.role == role]
        for role in ("prefill", "decode", "both")
    }
    there = ", ".join(f"{len(found)} {role}" for role, found in roles.items() if found) or "no worker ready"
    if roles["both"]:
        return ok(name, there)
    if starting := [info for info in workers if info.state == "starting"]:
        doing = "; ".join(f"{info.worker}: {info.reason or 'starting'}" for info in starting)
        if not (roles["decode"] and roles["prefill"]):
            return warn(name, f"{there}; {doing}", "wait until they are ready")
    if not roles["decode"] and not roles["prefill"]:
        return fail(name, there, "start a prefill and a decode worker, or one of the role `both`")
    if not roles["decode"]:
        return fail(name, f"{there}, and no decode worker: nothing is answered", "start a decode worker")
    if not roles["prefill"]:
        return fail(name, f"{there}, and no prefill worker: jobs wait", "start a prefill worker")
    unmatched = [
        info.worker
        for info in roles["decode"]
        if Picker(info.signature, lambda: roles["prefill"]).unavailable_reason is not None
    ]
    if unmatched:
        return fail(
            name,
            f"no prefill worker has the signature of {', '.join(unmatched)}",
            "start both sides with the same model, dtypes, page size and parallelism",
        )
    return ok(name, there)
