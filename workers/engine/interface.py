"""What a role needs of an engine; nothing above this package knows SGLang.

A request that generates passes through an engine in three steps. `prepare` checks it,
renders and tokenises it: the result is a `Prompt`. `generate` runs one choice
of it as one engine call, a `Leg`, and yields `Delta`s. `Prompt.answer` makes
an `AnswerFormatter`, which turns the deltas of all legs into messages for the caller.
The legs of one request are separate engine calls because SGLang's own `n > 1`
shares one room between its samples and hangs with prefill apart from decode.

A request that is computed takes two: `plan` checks and tokenises it, `Computation.answer` gives its answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, Protocol

import msgspec

from inferbus.schemas.answers import ComputedAnswer
from inferbus.schemas.computed import AnyComputed
from inferbus.schemas.fleet import Bootstrap, Capacity, Signature
from inferbus.schemas.handoff import Transfer
from inferbus.schemas.requests import AnyRequest
from inferbus.schemas.subjects import Kind


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two legs of one choice meet: prefill's bootstrap server, and a room in it."""

    bootstrap: Bootstrap
    room: int


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One engine call: one choice.

    Attributes:
        rid: 32 hexadecimal digits: SGLang aborts by prefix, so no id may be another's.
        index: The choice.
        token_ids: The prompt.
        sampling: SGLang's sampling parameters, `n` left out.
        options: Further arguments of the engine call; plain data, so that a hand-off can carry them.
        rendezvous: Where prefill and decode meet; None for an engine of the role `both`.
    """

    rid: str
    index: int
    token_ids: list[int]
    sampling: dict[str, Any]
    options: dict[str, Any] = {}
    rendezvous: Rendezvous | None = None


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a choice ended: `stop` (by `matched`, or the model's own end) or `length`."""

    reason: str
    matched: int | str | None = None


class Delta(msgspec.Struct, kw_only=True, gc=False):
    """What one step of the engine added to one choice; nothing in it was in an earlier one.

    Attributes:
        index: The choice.
        token_ids: One or more new tokens; may be none on the last delta.
        text: Their text, as far as it is settled; empty where the engine has no tokenizer.
        finish: On the last delta.
        prompt_tokens: Tokens of the choice's prompt.
        completion_tokens: Tokens of the choice so far, this delta included.
        cached_tokens: How many of the prompt's tokens came from a prefix cache; None where that is not known.
        meta: Whatever else the engine has for its own formatter (SGLang's `meta_info`): log probabilities of
            this step's tokens, finish reason.
        transfer: Of the KV cache, on the last delta of a prefill leg whose engine measures it.
    """

    index: int
    token_ids: list[int]
    text: str
    finish: Finish | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    meta: dict[str, Any] = {}
    transfer: Transfer | None = None


class AnswerIdentity(msgspec.Struct, frozen=True):
    """What OpenAI's answers repeat in every chunk; clients drop chunks in which it changes.

    Attributes:
        id: Unique; the formatter may put a prefix before it.
        created: Unix seconds.
    """

    id: str
    created: int

    @classmethod
    def new(cls) -> AnswerIdentity:
        """A random one, of now."""
        return cls(secrets.token_hex(16), int(time.time()))


class AnswerFormatter(Protocol):
    """Turns the deltas of one request into the caller's messages. Used once."""

    def chunks(self, deltas: AsyncIterable[Delta]) -> AsyncGenerator[msgspec.Struct | bytes, None]:
        """The streamed messages.

        `bytes` are a JSON object that lacks `job`, `attempt` and `seq`; a struct has them as fields
        to be set. The generator consumes `deltas` as it goes; what they held is then in `whole`.
        """
        ...

    def whole(self) -> msgspec.Struct | bytes:
        """The answer in one piece, once `deltas` are exhausted; same two shapes."""
        ...


class Prompt(Protocol):
    """A request that was checked, rendered and tokenised."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt's tokens; of several prompts the first one's."""
        ...

    @property
    def choices(self) -> int:
        """How many legs it takes: those of one prompt after those of another."""
        ...

    def leg(self, index: int, *, rid: str) -> Leg:
        """The engine call of one choice, without a rendezvous."""
        ...

    def answer(self, identity: AnswerIdentity | None = None) -> AnswerFormatter:
        """A fresh formatter for one attempt.

        Args:
            identity: The same for every attempt at a request; None: a new one.
        """
        ...

    def resumed(self, token_ids: list[int], text: str) -> Prompt | None:
        """The prompt of a request whose answer exists up to here, to be continued.

        Args:
            token_ids: The answer's tokens so far.
            text: The text that its reader has.

        Returns:
            None where continuing could give another answer than an undisturbed run: several choices, log
            probabilities, stop strings, grammars, tools, penalties that count earlier tokens, a text that
            these tokens do not make.
        """
        ...


class Computation(Protocol):
    """A request of a computed kind that was checked and tokenised."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the engine has to compute for it; 0: it is answered without the engine."""
        ...

    async def answer(self, priority: int) -> ComputedAnswer:
        """The answer, with an empty `job` and attempt 0, for the role to set. Cancelling aborts its calls.

        Args:
            priority: Of the engine's calls, where it schedules by priority.

        Raises:
            CallerError: The engine refused the request.
            EngineFailed: Anything else.
        """
        ...


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do; announced in the registry.

    Attributes:
        name: Engine and version, `sglang 0.5.23`.
        model: The served model name.
        kinds: What it can answer.
        tokenizer: Whether it has one.
        capacity: See `Capacity`.
        signature: None for an engine that takes part in no transfer.
        bootstrap: Of a prefill engine.
    """

    name: str
    model: str
    kinds: tuple[Kind, ...]
    tokenizer: bool
    capacity: Capacity
    signature: Signature | None = None
    bootstrap: Bootstrap | None = None


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine is."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0


class Engine(Protocol):
    """One model on this worker's devices."""

    @property
    def info(self) -> EngineInfo:
        """Fixed once the engine is up."""
        ...

    async def prepare(self, request: AnyRequest) -> Prompt:
        """Checks a request against this model, renders and tokenises it.

        Raises:
            CallerError: The request cannot be served; the engine was not touched.
        """
        ...

    async def plan(self, request: AnyComputed) -> Computation:
        """Checks a request of a computed kind against this model, and tokenises it.

        Raises:
            CallerError: The request cannot be served; the engine was not touched.
        """
        ...

    def generate(self, leg: Leg) -> AsyncGenerator[Delta, None]:
        """Runs one leg. Closing the generator aborts it.

        Raises:
            CallerError: The engine refused the request.
            TransferFailed: The KV cache did not arrive; worth another prefill worker.
            Cancelled: `abort` was called.
            EngineFailed: Anything else.
        """
        ...

    def abort(self, rid: str) -> None:
        """Ends a leg wherever it is, also before its first token; unknown ids are no error."""
        ...

    async def load(self) -> EngineLoad:
        """How busy it is; cheap."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine's processes live and answer."""
        ...

    async def close(self) -> None:
        """Ends the engine and its processes."""
        ...
