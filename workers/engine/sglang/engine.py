"""`SGLangEngine`: the engine interface on an embedded `sgl.Engine`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from inferbus.schemas.computed import AnyComputed
from inferbus.schemas.fleet import Role
from inferbus.schemas.requests import AnyRequest
from inferbus.workers.engine.interface import Computation, Delta, EngineInfo, EngineLoad, Leg, Prompt
from inferbus.workers.engine.progress import Progress
from inferbus.workers.engine.sglang import bootstrap, health, launch, options
from inferbus.workers.engine.sglang.bounds import Bounds
from inferbus.workers.engine.sglang.calls import Calls
from inferbus.workers.engine.sglang.computing import Computing
from inferbus.workers.engine.sglang.description import describe
from inferbus.workers.engine.sglang.preparer import Preparer
from inferbus.workers.engine.sglang.serving import Serving
from inferbus.workers.engine.sglang.startup import LaunchFailed, collector_paused, installed_version


class SGLangEngine:
    """One SGLang engine in this process; see the package for how to use it.

    The methods are those of `inferbus.workers.engine.interface.Engine`.
    """

    def __init__(
        self, engine: Any, *, role: Role, info: EngineInfo, preparer: Preparer, computing: Computing
    ) -> None:
        """Use `launch`."""
        self._engine = engine
        self._role = role
        self._info = info
        self._preparer = preparer
        self._computing = computing
        self._calls = Calls(engine.tokenizer_manager, role)

    @classmethod
    async def launch(
        cls,
        argv: Sequence[str],
        *,
        role: Role,
        model: str | None = None,
        bootstrap_port: int | None = None,
        advertise_host: str | None = None,
        transfer_timeout: float = options.TRANSFER_SECONDS,
        trust_grammars: bool = False,
        progress: Progress | None = None,
    ) -> SGLangEngine:
        """Starts an engine in this process; blocks the event loop while the model loads.

        Args:
            argv: SGLang's own flags. A prefill engine's bootstrap server listens on their `--host`; by
                default on all interfaces, or on the loopback one where that is advertised.
            role: The worker's.
            model: Name to serve the model under, as `--served-model-name`.
            bootstrap_port: Port of the bootstrap server; a free one by default.
            advertise_host: How other hosts reach this one; by default the address listened on, or this
                machine's own.
            transfer_timeout: Seconds that one side of a KV transfer waits for the other.
            trust_grammars: Whether grammars and stop patterns of requests go to the engine unchecked.
            progress: Told what is being done.

        Raises:
            LaunchFailed: It did not start; nothing of it is left behind.
        """
        version = installed_version()
        progress = progress or Progress()
        progress.say("loading SGLang")
        options.prepare_environment(transfer_timeout)
        with collector_paused():
            chosen = options.read(
                argv, role=role, model=model, bootstrap_port=bootstrap_port, advertise_host=advertise_host
            )
            engine = launch.build(chosen, progress)
        try:
            manager = engine.tokenizer_manager
            if role != "both" and not manager.is_generation:
                raise LaunchFailed(f"an embedding model contradicts the role {role}: it needs the role both")
            if chosen.bootstrap is not None:
                await bootstrap.wait_ready(manager, chosen.bootstrap)
            progress.say("computing a first token")
            # The first request would wait for this otherwise, and a worker is announced only if it works.
            await health.probe(manager, role, within=health.FIRST_SECONDS)
            answers = role != "prefill" and manager.tokenizer is not None
            serving = Serving(engine) if answers else None
            info = await describe(engine, chosen, version, serving)
            bounds = Bounds.of(engine)
            computing = Computing(manager, bounds=bounds, serving=serving)
            preparer = Preparer(
                manager,
                role=role,
                bounds=bounds,
                serving=serving,
                trust_grammars=trust_grammars,
            )
        except TimeoutError:
            launch.stop(engine)
            raise LaunchFailed("the engine started, but computes nothing") from None
        except BaseException:
            launch.stop(engine)
            raise
        launch.settle()
        return cls(engine, role=role, info=info, preparer=preparer, computing=computing)

    @property
    def info(self) -> EngineInfo:
        """What it can do."""
        return self._info

    async def prepare(self, request: AnyRequest) -> Prompt:
        """Checks, renders and tokenises a request."""
        return await self._preparer.prepare(request)

    async def plan(self, request: AnyComputed) -> Computation:
        """Checks and tokenises a request of a computed kind."""
        return await self._computing.plan(request)

    def generate(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        """Runs a leg. A prefill engine yields one delta, whose finish says that the KV cache was sent."""
        return self._calls.run(leg)

    def abort(self, rid: str) -> None:
        """Ends a leg."""
        self._calls.abort(rid)

    async def load(self) -> EngineLoad:
        """How busy it is, from the snapshot that the scheduler keeps in shared memory."""
        ranks = await self._engine.tokenizer_manager.get_loads()
        return EngineLoad(
            running=sum(rank.num_running_reqs for rank in ranks),
            waiting=sum(rank.num_waiting_reqs for rank in ranks),
            kv_used=sum(rank.num_used_tokens for rank in ranks),
        )

    async def healthy(self) -> bool:
        """Whether its processes live and answer."""
        return await health.healthy(self._engine, self._role)

    async def close(self) -> None:
        """Ends its processes."""
        launch.stop(self._engine)
