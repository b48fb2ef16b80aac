"""The description of a running engine: for the registry and for pairing."""

from __future__ import annotations

from typing import Any

from inferbus.schemas.fleet import Capacity, Signature
from inferbus.schemas.subjects import Kind
from inferbus.workers.engine.interface import EngineInfo
from inferbus.workers.engine.sglang.options import Options
from inferbus.workers.engine.sglang.serving import Serving


def setting(manager: Any, name: str) -> Any:
    """A server argument as SGLang resolved it: newer versions keep that apart from the given value."""
    if hasattr(manager, "config_value"):
        return manager.config_value(name)
    return getattr(manager.server_args, name)


async def describe(engine: Any, options: Options, version: str, serving: Serving | None) -> EngineInfo:
    """The announcement of an engine."""
    manager = engine.tokenizer_manager
    kinds: list[Kind] = []
    if options.role != "prefill":
        kinds += _kinds(manager, serving)
    return EngineInfo(
        name=f"sglang {version}",
        model=manager.served_model_name,
        kinds=tuple(kinds),
        tokenizer=manager.tokenizer is not None,
        capacity=await _capacity(engine),
        signature=_signature(manager) if options.role != "both" else None,
        bootstrap=options.bootstrap,
    )


def _kinds(manager: Any, serving: Serving | None) -> list[Kind]:
    """The kinds that an engine answers; an embedding model generates nothing."""
    texts: list[Kind] = [] if serving is None else ["tokenize", "detokenize"]
    if not manager.is_generation:
        return ["embeddings", *texts]
    if serving is None:
        return ["tokens"]
    chat: list[Kind] = ["chat"] if serving.has_chat_template else []
    return ["tokens", *chat, "completions", *texts]


async def _capacity(engine: Any) -> Capacity:
    manager = engine.tokenizer_manager
    states = await manager.get_internal_state()
    return Capacity(
        context_length=manager.context_len,
        # Of one data-parallel rank: a request lives on one.
        kv_tokens=engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"],
        page_size=setting(manager, "page_size"),
        max_running=sum(state["effective_max_running_requests_per_dp"] for state in states),
        max_prefill_tokens=setting(manager, "max_prefill_tokens"),
        vocabulary=manager.model_config.vocab_size,
        step_tokens=_step_tokens(manager),
    )


def _step_tokens(manager: Any) -> int:
    """Tokens of one chunk of prompts; all of a prefill batch where prompts are not cut."""
    chunk, batch = setting(manager, "chunked_prefill_size"), setting(manager, "max_prefill_tokens")
    return int(min(chunk, batch) if chunk and chunk > 0 else batch)


def _signature(manager: Any) -> Signature:
    config = manager.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    kv_dtype = setting(manager, "kv_cache_dtype")
    return Signature(
        model=manager.served_model_name,
        dtype=dtype,
        kv_dtype=dtype if kv_dtype == "auto" else kv_dtype,
        page_size=setting(manager, "page_size"),
        layers=config.num_hidden_layers,
        kv_heads=config.get_total_num_kv_heads(),
        head_dim=config.head_dim,
        tp=setting(manager, "tp_size"),
        dp=setting(manager, "dp_size"),
        pp=setting(manager, "pp_size"),
        backend=setting(manager, "disaggregation_transfer_backend"),
    )
