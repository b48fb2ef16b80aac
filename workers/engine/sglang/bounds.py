"""The limits of one request on an engine, checked once its tokens are known and before the engine runs.

An id outside the vocabulary reads memory that is not an embedding. An over-long
prompt that only one side of a prefill/decode pair refuses makes the other
generate from a KV cache that was never written (sgl-project/sglang#30233).
"""

from __future__ import annotations

from typing import Any, Final, Self

import msgspec

from inferbus.schemas.errors import ContextLengthExceeded, InvalidRequest
from inferbus.schemas.requests import AnyRequest

_PROMPT_FIELD: Final = {"tokens": "token_ids", "chat": "messages", "completions": "prompt"}


_SCHEDULER_MARGIN: Final = 5
"""SGLang's scheduler keeps this much between the longest prompt and the longest request."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one request.

    Attributes:
        context_length: Prompt and answer together, of the model.
        longest_prompt: In tokens: the context and the KV cache both limit it.
        longest_total: Prompt and answer together, of the engine's scheduler, which otherwise lowers
            `max_new_tokens` silently.
        vocabulary: Token ids are below this.
    """

    context_length: int
    longest_prompt: int
    longest_total: int
    vocabulary: int

    @classmethod
    def of(cls, engine: Any) -> Self:
        """The limits of a running `sgl.Engine`."""
        manager = engine.tokenizer_manager
        # The scheduler refuses prompts of this length and more.
        too_long = manager.max_req_input_len
        return cls(
            context_length=manager.context_len,
            longest_prompt=min(too_long, manager.context_len - manager.num_reserved_tokens) - 1,
            longest_total=too_long + _SCHEDULER_MARGIN - 1,
            vocabulary=manager.model_config.vocab_size,
        )

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Refuses ids outside the vocabulary.

        Raises:
            InvalidRequest: `param` names the field that they came in.
        """
        if not token_ids:
            raise InvalidRequest(f"{param} gives an empty prompt", param=param)
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary:
            raise InvalidRequest(
                f"{param} holds a token id outside the vocabulary (0 to {self.vocabulary - 1})", param=param
            )

    def new_tokens(self, request: AnyRequest, prompt: int) -> int:
        """How many tokens a choice may have: what was asked for, or what there is room for.

        Raises:
            ContextLengthExceeded: The prompt, or prompt and answer, do not fit.
        """
        param = prompt_field(request)
        wanted = request.sampling.max_new_tokens
        if prompt > self.longest_prompt:
            raise ContextLengthExceeded(
                f"the prompt has {prompt} tokens; at most {self.longest_prompt} fit this worker",
                param=param,
                prompt=prompt,
                total=prompt + (wanted or 1),
            )
        if wanted is not None and prompt + wanted > self.context_length:
            raise ContextLengthExceeded(
                f"the prompt's {prompt} tokens and max_tokens {wanted} do not fit the context of "
                f"{self.context_length} tokens",
                param="max_tokens",
                prompt=prompt,
                total=prompt + wanted,
            )
        room = self.longest_total - prompt
        if wanted is None:
            return room
        if wanted > room:
            warn(request, f"max_tokens lowered to {room}, which is what the engine has room for")
        return min(wanted, room)


def prompt_field(request: AnyRequest) -> str:
    """The field that a request's prompt comes in."""
    return "input_ids" if getattr(request, "input_ids", None) else _PROMPT_FIELD[request.kind]


def warn(request: AnyRequest, warning: str) -> None:
    """Adds a warning to the answer, once."""
    if warning not in request.warnings:
        request.warnings = [*request.warnings, warning]
