"""The duration and size of a request's KV transfer, from SGLang's prefill scheduler to the worker.

The scheduler process measures both and does not report them. SGLang carries
further output of a request in `Req.customized_info`: lists by name, of which the
output streamer sends the part that belongs to the tokens it sends, and which
end up in `meta_info`. What is put there just before a prefill's only output is
sent with it. Both 0.5.17 and 0.5.23 have what is used here.

A missing figure is left out; no request may fail for it.
"""

from __future__ import annotations

from typing import Any, Final

import structlog

from inferbus.schemas.handoff import Transfer

log = structlog.get_logger()

KEY: Final = "inferbus_kv_transfer"
"""In `customized_info` and `meta_info`."""

_TARGET: Final = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)


def register(server_args: Any) -> None:
    """Has this process report its transfers if it is a prefill engine's scheduler.

    To be called before SGLang loads its plugins, which is when it applies registered hooks.
    """
    if getattr(server_args, "disaggregation_mode", None) != "prefill":
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_TARGET, _Recorder(), HookType.BEFORE)
    except Exception:  # a supervision point: an engine without the figure is better than none
        log.exception("transfer.unmeasured")


class _Recorder:
    """Runs before `SchedulerOutputStreamer.stream_output(self, reqs, ...)`."""

    __name__ = "record_transfers"  # SGLang names a hook in its log.

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, _streamer: Any, reqs: Any = (), *_rest: Any, **_named: Any) -> None:
        try:
            for req in reqs:
                _record(req)
        except Exception:  # a supervision point: an exception here would end the engine; logged once
            if not self._failed:
                self._failed = True
                log.exception("transfer.unmeasured")


def _record(req: Any) -> None:
    """Puts the figures of a transfer that has succeeded beside every token that the request has."""
    sender = getattr(req, "disagg_kv_sender", None)
    if sender is None or not req.finished() or type(req.finished_reason).__name__ == "FINISH_ABORT":
        return
    metric = sender.get_transfer_metric()
    # SGLang leaves the time out where nothing was sent, and where the transfer backend does not measure it.
    if metric.transfer_latency_s is None or metric.transfer_total_bytes is None:
        return
    figures = [float(metric.transfer_latency_s), int(metric.transfer_total_bytes)]
    req.customized_info = {**(req.customized_info or {}), KEY: [figures] * len(req.output_ids)}


def take(meta: dict[str, Any]) -> Transfer | None:
    """The figures of a request, taken out of its `meta_info`; None where there are none."""
    # A request without them has None for every token where another one in the same batch has some.
    match (meta.pop(KEY, None) or [None])[-1]:
        case [float(seconds), int(size)]:
            return Transfer(seconds=seconds, bytes=size)
    return None
