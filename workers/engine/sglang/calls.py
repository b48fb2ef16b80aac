"""Runs legs on SGLang's tokenizer manager, and maps its failures to the contract's errors.

Every call streams: a streamed request ends with a chunk that has the reason,
where others raise FastAPI's exceptions. `generate_request` is used instead of
`Engine.async_generate` because the latter's signature lacks fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

import structlog

from inferbus.schemas.errors import (
    Cancelled,
    EngineFailed,
    InferbusError,
    InvalidRequest,
    Overloaded,
    TransferFailed,
)
from inferbus.schemas.fleet import Role
from inferbus.schemas.sampling import GRAMMARS
from inferbus.workers import tracing
from inferbus.workers.engine.interface import Delta, Finish, Leg
from inferbus.workers.engine.sglang import bootstrap, transfer
from inferbus.workers.engine.sglang.redaction import unquoted

log = structlog.get_logger()

BAD_REQUEST: Final = 400
UNAVAILABLE: Final = 503
ABORT_AGAIN_SECONDS: Final = 0.02

UNSATISFIED: Final = "Grammar accept_token failed"
"""How SGLang's message begins where a grammar allowed no token at all; with status 500."""


class Calls:
    """The engine calls of one engine."""

    def __init__(self, manager: Any, role: Role) -> None:
        self._manager = manager
        self._role = role
        self._fields = _request_fields()
        # A leg may come from a worker with another version, whose parameters this one does not have.
        self._sampling = frozenset(manager.sampling_params_class.__struct_fields__)
        self._servers = bootstrap.KnownServers()
        self._live: set[str] = set()
        self._aborted: set[str] = set()

    async def run(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        """Yields what the engine adds to the leg; see `Engine.generate`."""
        request = self._request(leg)
        if leg.rid in self._live:
            raise EngineFailed("a leg with this rid is running already")
        self._live.add(leg.rid)
        source = leg.rendezvous.bootstrap if leg.rendezvous is not None and self._role == "decode" else None
        begun = False
        try:
            if source is not None:
                await self._servers.check(source)
            if leg.rid in self._aborted:
                raise Cancelled("cancelled")
            # Closing SGLang's generator is what aborts the request when ours is closed or cancelled.
            async with (
                aclosing(self._manager.generate_request(request, None)) as outputs,
                aclosing(self._deltas(leg, outputs)) as deltas,
            ):
                async for delta in deltas:
                    begun = True
                    yield delta
        except ValueError as error:
            if leg.rid in self._aborted:  # SGLang 0.5.17 raises for an abort before the scheduler has it.
                raise Cancelled("cancelled") from error
            # SGLang's checks before it schedules a request. `prepare` makes them too, so this is rare.
            raise InvalidRequest(f"the engine refused the request: {unquoted(error)}") from error
        finally:
            if source is not None and not begun:
                self._servers.forget(source)
            self._live.discard(leg.rid)
            self._aborted.discard(leg.rid)

    def abort(self, rid: str) -> None:
        """Ends a leg; unknown ids are no error."""
        if rid in self._live:
            self._aborted.add(rid)
            self._send_abort(rid)

    def _send_abort(self, rid: str) -> None:
        if rid not in self._live:
            return
        state = self._manager.rid_to_state.get(rid)
        if state is not None and state.dispatched:
            self._manager.abort_request(rid)
        else:
            # The scheduler would find nothing to abort and then run the request when it comes.
            asyncio.get_running_loop().call_later(ABORT_AGAIN_SECONDS, self._send_abort, rid)

    async def _deltas(
        self, leg: Leg, outputs: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[Delta, None]:
        seen = 0
        async for output in outputs:
            meta = output["meta_info"]
            reason = meta.get("finish_reason")
            if reason is not None and reason["type"] == "abort":
                # Its text and ids repeat what went before (sgl-project/sglang#40901).
                raise self._failure(leg, reason)
            seen += len(output["output_ids"])
            if reason is not None and seen != meta["completion_tokens"]:
                log.error("leg.miscounted", rid=leg.rid, received=seen, counted=meta["completion_tokens"])
                raise EngineFailed("the engine's stream does not add up")
            finish = reason and Finish(reason=reason["type"], matched=reason.get("matched"))
            yield Delta(
                index=leg.index,
                token_ids=output["output_ids"],
                text=output.get("text", ""),
                finish=finish,
                prompt_tokens=meta["prompt_tokens"],
                completion_tokens=meta["completion_tokens"],
                cached_tokens=meta.get("cached_tokens"),
                meta=meta,
                transfer=transfer.take(meta) if self._role == "prefill" else None,
            )
            if finish is not None:
                return
        raise EngineFailed("the engine's stream ended without a reason")

    def _failure(self, leg: Leg, reason: dict[str, Any]) -> InferbusError:
        if leg.rid in self._aborted:
            return Cancelled("cancelled")
        status = int(reason.get("status_code") or 0)
        message = unquoted(reason.get("message") or "no reason given")
        grammar = next((name for name in GRAMMARS if leg.sampling.get(name)), None)
        # What is said of a grammar may repeat it.
        log.warning("leg.aborted", rid=leg.rid, status=status, reason=grammar or message)
        if grammar is not None and message.startswith(UNSATISFIED):
            return InvalidRequest(f"no output can satisfy the {grammar}", param=grammar)
        if status == BAD_REQUEST:
            return InvalidRequest(f"the engine refused the request: {message}", param=grammar)
        if status == UNAVAILABLE:
            return Overloaded("the engine has no room for the request")
        if self._role != "both":
            return TransferFailed("the KV cache could not be transferred")
        return EngineFailed("the engine aborted the request")

    def _request(self, leg: Leg) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        if (leg.rendezvous is None) != (self._role == "both"):
            raise EngineFailed("a leg needs a rendezvous exactly where prefill and decode are apart")
        sampling = {name: value for name, value in leg.sampling.items() if name in self._sampling}
        if self._role == "prefill":
            # SGLang's prefill stops after one token by itself, but plans memory for all of them.
            sampling["max_new_tokens"] = 1
            sampling["min_new_tokens"] = min(1, sampling.get("min_new_tokens") or 0)
        fields: dict[str, Any] = {
            **self._options(leg.options),
            "rid": leg.rid,
            "input_ids": list(leg.token_ids),
            "sampling_params": sampling,
            "stream": True,
        }
        # SGLang's own spans are below ours where it traces, too: --enable-trace.
        if tracing.active() and "external_trace_header" in self._fields:
            fields["external_trace_header"] = tracing.carried()
        if leg.rendezvous is not None:
            fields |= {
                "bootstrap_host": leg.rendezvous.bootstrap.host,
                "bootstrap_port": leg.rendezvous.bootstrap.port,
                "bootstrap_room": leg.rendezvous.room,
            }
        return GenerateReqInput(**fields)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options in this SGLang's terms: the worker that made them may run another version."""
        known = {name: value for name, value in options.items() if name in self._fields}
        if "cache_salt" in options and "cache_salt" not in self._fields:
            # Before 0.5.23 the server glued the two together itself.
            known["extra_key"] = options["cache_salt"] + (options.get("extra_key") or "")
        return known


def _request_fields() -> frozenset[str]:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return frozenset(GenerateReqInput.__dataclass_fields__)
