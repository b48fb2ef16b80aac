"""What workers tell of themselves in the KV bucket `INFER_WORKERS`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from inferbus.schemas.subjects import Kind

Role = Literal["prefill", "decode", "both"]
State = Literal["starting", "ready", "draining", "failed"]

BUCKET: Final = "INFER_WORKERS"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What must be equal on both sides of a KV transfer."""

    model: str
    dtype: str
    kv_dtype: str
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    tp: int
    dp: int
    pp: int
    backend: str


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prefill engine's bootstrap server listens, as other hosts reach it."""

    host: str
    port: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine can hold.

    Attributes:
        context_length: Prompt and answer together, tokens.
        kv_tokens: Tokens of the KV cache.
        page_size: Tokens of one KV page.
        max_running: Requests that run at once.
        max_prefill_tokens: Tokens of one prefill batch.
        vocabulary: Token ids are below this.
        step_tokens: Prompt tokens that the engine computes in one step; 0 where the worker does not tell.
    """

    context_length: Count
    kv_tokens: Count
    page_size: Count
    max_running: Count
    max_prefill_tokens: Count
    vocabulary: Count
    step_tokens: Count = 0


class Load(msgspec.Struct, kw_only=True):
    """How busy a worker is at the moment of an announcement.

    Attributes:
        slots: Requests that it takes at once.
        busy: Slots in use.
        running: Requests in the engine's batch.
        waiting: Requests that the engine has queued.
        kv_used: Tokens of the KV cache in use.
        kv_forecast: Tokens of the KV cache that the requests in the engine will need at most.
        queued: Requests that the worker holds back until the engine can start them.
    """

    slots: Count
    busy: Count = 0
    running: Count = 0
    waiting: Count = 0
    kv_used: Count = 0
    kv_forecast: Count = 0
    queued: Count = 0


class WorkerInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One worker's announcement; its KV key is `<escaped model>.<escaped worker id>`.

    Attributes:
        worker: Its id; no two workers have the same at one time.
        role: prefill, decode or both.
        state: Only a `ready` one takes work; `failed` is the last word of one that could not start.
        model: The served model name.
        kinds: Kinds of requests that it answers; empty for prefill.
        classes: Classes of jobs that it takes; empty for prefill, and for workers of older versions.
        tokenizer: Whether it can render, tokenise and decode text.
        engine: Name and version.
        version: inferbus's.
        host: Where it runs.
        started: Unix seconds.
        capacity: None before the engine is up.
        signature: None where nothing is handed off.
        bootstrap: Of a prefill worker.
        load: Now.
        reason: Why it failed, or what one that starts is doing, in one line.
        incarnation: Drawn anew by every process, so that two workers with one id are told apart; empty for
            workers of older versions.
    """

    worker: str
    role: Role
    state: State
    model: str
    kinds: list[Kind]
    tokenizer: bool
    engine: str
    version: str
    host: str
    started: float
    load: Load
    capacity: Capacity | None = None
    signature: Signature | None = None
    bootstrap: Bootstrap | None = None
    reason: str | None = None
    incarnation: str = ""
    classes: list[str] = []
