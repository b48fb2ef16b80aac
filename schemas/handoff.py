"""Decode to prefill: the structured hand-off of one tokenised prompt, and what prefill says of it.

Bodies are MessagePack. Decode sends `Prefill` as a NATS request to one
worker's subject; the worker answers on the request's inbox with `Refused`, or
with `Queued` at intervals while the prompt waits for its turn, then with
`Accepted`, and later with `Done` or `Failed`. `Abort` ends a hand-off
that decode no longer wants.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from inferbus.schemas.errors import ErrorBody
from inferbus.schemas.fleet import Signature
from inferbus.schemas.requests import TokenIds

Rid = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
"""An engine's request id. SGLang aborts by prefix: a short or empty one would end others' work."""

Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]
QUEUED_EVERY: Final = 2.0
"""Seconds between two `Queued`."""

TraceField = Annotated[str, Meta(max_length=512)]
"""W3C's bound for `tracestate`; `traceparent` is shorter."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Prefill(msgspec.Struct, tag="prefill", omit_defaults=True, kw_only=True):
    """Compute this prompt's KV cache and send it to the room.

    Attributes:
        rid: The engine's request id; fixed length, so that none is another's prefix.
        room: The KV transfer's meeting place: random, 63 bits.
        token_ids: The prompt.
        sampling: SGLang's sampling parameters: prefill samples the first token.
        options: Further engine arguments of the call (log probabilities, adapter, cache salt, …).
        worker: The decode worker.
        job: For logs.
        signature: Of the decode engine; checked again by prefill.
        timeout: Seconds after `Accepted` after which prefill gives up on its own.
        trace: W3C trace context, as headers; empty where the decode worker does not trace.
    """

    rid: Rid
    room: Room
    token_ids: TokenIds
    sampling: dict[str, Any]
    worker: str
    job: str
    signature: Signature
    timeout: Seconds
    options: dict[str, Any] = {}
    trace: dict[str, TraceField] = {}


class Abort(msgspec.Struct, tag="abort", kw_only=True):
    """Stop a hand-off."""

    rid: Rid


class Queued(msgspec.Struct, tag="queued", kw_only=True):
    """The prompt waits until the engine has room for it; said again every `QUEUED_EVERY` seconds."""

    worker: str


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """The prompt is on its way to the engine; decode starts its own leg now."""

    worker: str


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """This worker will not take it; another may."""

    worker: str
    error: ErrorBody


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What a KV transfer took.

    Attributes:
        seconds: From the sending of the first piece until the engine knew that the last one was there. A
            prompt that is computed in several chunks is sent while it is computed.
        bytes: KV bytes sent by one rank of the engine; with tensor parallelism each sends as many.
    """

    seconds: float
    bytes: int


class Done(msgspec.Struct, tag="done", omit_defaults=True, kw_only=True):
    """The KV cache was sent.

    Attributes:
        worker: The prefill worker.
        cached_tokens: How much of the prompt it had in its prefix cache.
        seconds: From acceptance to here.
        transfer: Of the cache, where the engine can tell.
    """

    worker: str
    cached_tokens: int = 0
    seconds: float = 0.0
    transfer: Transfer | None = None


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """It was not."""

    worker: str
    error: ErrorBody


ToPrefill = Prefill | Abort
FromPrefill = Queued | Accepted | Refused | Done | Failed
