"""How long a request's KV transfer took and how large it was, from SGLang's prefill scheduler to the worker.

The scheduler process knows both and tells them to nobody. SGLang has a way for
further output of a request, `Req.customized_info`: lists by name, of which the
output streamer sends the part that belongs to the tokens it sends, and which
end up in `meta_info`. What is put there just before a prefill's only output
travels with it. Both 0.5.17 and 0.5.23 have all that is used here.

A figure that cannot be had is left out; no request may fail for it.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from inferbus.schemas.handoff import Transfer

log = logging.getLogger(__name__)

KEY: Final = "inferbus_kv_transfer"
"""In `customized_info` and `meta_info`."""

_TARGET: Final = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)


def register(server_args: Any) -> None:
    """Has this process tell of its transfers if it is a prefill engine's scheduler.

    To be called before SGLang loads its plugins there, which is when it applies the hooks that it knows.
    """
    if getattr(server_args, "disaggregation_mode", None) != "prefill":
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_TARGET, _Noter(), HookType.BEFORE)
    except Exception:  # a supervision point: an engine without the figure is better than none
        log.exception("KV transfers cannot be measured")


class _Noter:
    """Runs before `SchedulerOutputStreamer.stream_output(self, reqs, ...)`."""

    __name__ = "note_transfers"  # SGLang names a hook in its log.

    def __init__(self) -> None:
        self._failed = False

    def __call__(self, _streamer: Any, reqs: Any = (), *_rest: Any, **_named: Any) -> None:
        try:
            for req in reqs:
                _note(req)
        except Exception:  # a supervision point: what is raised here would end the engine
            if not self._failed:
                self._failed = True
                log.exception("a KV transfer could not be measured; said once")


def _note(req: Any) -> None:
    """Puts the figures of a transfer that has succeeded beside every token that the request has."""
    sender = getattr(req, "disagg_kv_sender", None)
    if sender is None or not req.finished() or type(req.finished_reason).__name__ == "FINISH_ABORT":
        return
    found = sender.get_transfer_metric()
    # SGLang leaves the time out where nothing was sent, and where the transfer backend cannot tell.
    if found.transfer_latency_s is None or found.transfer_total_bytes is None:
        return
    figures = [float(found.transfer_latency_s), int(found.transfer_total_bytes)]
    req.customized_info = {**(req.customized_info or {}), KEY: [figures] * len(req.output_ids)}


def take(meta: dict[str, Any]) -> Transfer | None:
    """The figures of a request, taken out of its `meta_info`; None where there are none."""
    # A request without them has None for every token where another one in the same batch has some.
    match (meta.pop(KEY, None) or [None])[-1]:
        case [float(seconds), int(size)]:
            return Transfer(seconds=seconds, bytes=size)
    return None
