"""Prepares requests: a request of the contract is checked, rendered and tokenised once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from inferbus.schemas.errors import InvalidRequest, NotSupported
from inferbus.schemas.fleet import Role
from inferbus.schemas.requests import AnyRequest, ChatRequest, CompletionRequest, TokenRequest
from inferbus.schemas.sampling import GRAMMARS, INT64
from inferbus.workers.engine.sglang import grammars, patterns
from inferbus.workers.engine.sglang.answers import OpenAIAnswer
from inferbus.workers.engine.sglang.bounds import Bounds, prompt_field, warn
from inferbus.workers.engine.sglang.description import setting
from inferbus.workers.engine.sglang.prompts import SGLangPrompt
from inferbus.workers.engine.sglang.redaction import unquoted
from inferbus.workers.engine.sglang.serving import Serving, with_late_parameters
from inferbus.workers.engine.tokens import TokensAnswer, asks_logprobs

_OPTIONS: Final = (
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "lora_path",
    "priority",
    "require_reasoning",
)
"""Fields of SGLang's request that a leg's options take over from its conversion."""

_OUTPUT_DEPENDENT: Final = ("stop", "stop_regex", *GRAMMARS, "frequency_penalty", "presence_penalty")
"""Parameters whose effect depends on the output so far."""

_CONTEXT_TOKENS: Final = 5
"""Tokens of the prompt that SGLang's detokenizer decodes the first output tokens with."""

_NEED_TOKENIZER: Final = ("stop", "stop_regex", *GRAMMARS, "min_new_tokens")


class Preparer:
    """Prepares requests for one engine.

    Args:
        manager: SGLang's tokenizer manager.
        role: The worker's.
        bounds: The engine's limits.
        serving: None with `--skip-tokenizer-init`.
        trust_grammars: Whether grammars and stop patterns go to the engine unchecked.
    """

    def __init__(
        self,
        manager: Any,
        *,
        role: Role,
        bounds: Bounds,
        serving: Serving | None,
        trust_grammars: bool,
    ) -> None:
        self._manager = manager
        self._role = role
        self._bounds = bounds
        self._serving = serving
        self._trust_grammars = trust_grammars
        self._deterministic = bool(setting(manager, "enable_deterministic_inference"))
        self._model_defaults: dict[str, Any] = manager.model_config.get_default_sampling_params() or {}
        patterns.load_classes()

    async def prepare(self, request: AnyRequest) -> SGLangPrompt:
        """See `Engine.prepare`."""
        request.sampling.check_vocabulary(self._bounds.vocabulary)
        if request.priority is not None and request.priority not in INT64:
            raise InvalidRequest("priority must fit a signed 64-bit integer", param="priority")
        if request.lora_path is not None:
            self._check_adapter(request.lora_path)
        if self._serving is None:
            _refuse_text(request)
        if not self._trust_grammars:
            grammars.check(request)
        if request.sampling.sampling_seed is not None and not self._deterministic:
            warn(request, "seed may give another text each time: --enable-deterministic-inference is not set")
        if isinstance(request, TokenRequest):
            return self._tokens(request)
        return await self._openai(request)

    def _check_adapter(self, name: str) -> None:
        """Refuses an adapter that SGLang would refuse only once prefill is at work."""
        if not setting(self._manager, "enable_lora"):
            raise NotSupported("this model's workers have no adapters: --enable-lora", param="lora_path")
        if name not in getattr(self._manager, "lora_ref_cache", (name,)):
            raise InvalidRequest("lora_path names no adapter that was loaded", param="lora_path")

    def _tokens(self, request: TokenRequest) -> SGLangPrompt:
        sampling = {**self._model_defaults, **request.sampling.given()}
        options: dict[str, Any] = {
            "priority": request.priority,
            "lora_path": request.lora_path,
            "cache_salt": request.cache_salt,
            "extra_key": request.extra_key,
        }
        if request.logprobs:
            options["return_logprob"] = True
            options["top_logprobs_num"] = request.top_logprobs or 0
        choices = request.sampling.choices
        return self._prompt(
            request,
            [request.token_ids],
            sampling=sampling,
            options=options,
            answer=lambda _: TokensAnswer(request, prompt_tokens=len(request.token_ids), choices=choices),
        )

    async def _openai(self, request: ChatRequest | CompletionRequest) -> SGLangPrompt:
        serving = self._serving
        assert serving is not None  # `prepare` has refused these kinds otherwise.
        chat = isinstance(request, ChatRequest)
        if chat and not serving.has_chat_template:
            raise NotSupported("the model has no chat template")
        if self._role != "both":
            _refuse_prefills_own(request)
        converted, openai = await serving.convert(request)
        handler = serving.chat if chat else serving.completion
        sampling = with_late_parameters(converted.sampling_params, request)
        if (grammar := request.sampling.grammar) and sum(bool(sampling.get(name)) for name in GRAMMARS) > 1:
            raise InvalidRequest(f"{grammar} and response_format or tools exclude each other", param=grammar)
        if not self._trust_grammars and any(sampling.get(name) for name in GRAMMARS):
            grammars.check_tools(request)
        return self._prompt(
            request,
            converted.input_ids,
            sampling=sampling,
            options={name: getattr(converted, name, None) for name in _OPTIONS}
            | {"cache_salt": request.cache_salt, "extra_key": request.extra_key},
            answer=partial(OpenAIAnswer, handler, openai, prompts=converted.input_ids, chat=chat),
        )

    def _prompt(
        self,
        request: AnyRequest,
        prompts: list[list[int]],
        *,
        sampling: dict[str, Any],
        options: dict[str, Any],
        answer: Any,
    ) -> SGLangPrompt:
        for token_ids in prompts:
            self._bounds.check_ids(token_ids, prompt_field(request))
        sampling = {name: value for name, value in sampling.items() if name != "n"}
        lengths = [self._bounds.new_tokens(request, len(token_ids)) for token_ids in prompts]
        sampling["max_new_tokens"] = lengths[0]
        if sampling.get("stop"):
            sampling["stop_regex"] = grammars.with_window(sampling["stop"], sampling.get("stop_regex"))
        self._verify(sampling)
        return SGLangPrompt(
            prompts,
            lengths=lengths,
            sampling=sampling,
            options={
                name: value for name, value in options.items() if value is not None and value is not False
            },
            choices=request.sampling.choices,
            answer=answer,
            decode=None if request.kind == "tokens" else self._decoder(prompts[0], sampling),
            resumable=self._resumable(request, sampling),
        )

    def _resumable(self, request: AnyRequest, sampling: dict[str, Any]) -> bool:
        """Whether an answer resumed after its first tokens equals an undisturbed one.

        Stop strings, penalties, grammars and parsers read the output so far, and would not see the part
        that has become prompt.
        """
        parsed = (
            isinstance(request, ChatRequest)
            and self._serving is not None
            and bool(self._serving.chat.reasoning_parser or request.tools)
        )
        return (
            request.sampling.choices == 1
            and len(getattr(request, "prompts", ())) < 2
            and not parsed
            and not asks_logprobs(request)
            and not getattr(request, "echo", None)
            and not any(sampling.get(name) for name in _OUTPUT_DEPENDENT)
            and sampling.get("repetition_penalty", 1.0) == 1.0
        )

    def _decoder(self, prompt: list[int], sampling: dict[str, Any]) -> Callable[[list[int]], str]:
        """The text of output tokens, decoded after the prompt's last tokens as SGLang's detokenizer does."""
        tail = prompt[-_CONTEXT_TOKENS:]
        decode = partial(
            self._manager.tokenizer.decode,
            skip_special_tokens=sampling.get("skip_special_tokens", True),
            spaces_between_special_tokens=sampling.get("spaces_between_special_tokens", True),
        )

        def text(token_ids: list[int]) -> str:
            return str(decode(tail + token_ids)).removeprefix(str(decode(tail)))

        return text

    def _verify(self, sampling: dict[str, Any]) -> None:
        """Runs SGLang's own checks before a hand-off instead of during it."""
        try:
            parameters = self._manager.sampling_params_class(**sampling)
            parameters.normalize(self._manager.tokenizer)
            parameters.verify(self._bounds.vocabulary)
        except (ValueError, TypeError, re.error, RecursionError) as error:
            raise InvalidRequest(
                f"SGLang refused the sampling parameters: {unquoted(error)}", param="sampling_params"
            ) from error


def _refuse_prefills_own(request: ChatRequest | CompletionRequest) -> None:
    """Refuses what only the engine that computes the prompt knows."""
    if request.return_cached_tokens_details:
        raise NotSupported(
            "return_cached_tokens_details needs the cache of the prompt's engine, which is another worker's",
            param="return_cached_tokens_details",
        )
    if isinstance(request, CompletionRequest) and request.echo and asks_logprobs(request):
        raise NotSupported(
            "echo with logprobs needs the prompt's own, which a decode engine does not have", param="echo"
        )


def _refuse_text(request: AnyRequest) -> None:
    """Refuses what an engine without a tokenizer ignores silently, or dies of (sgl-project/sglang#9039)."""
    if not isinstance(request, TokenRequest):
        raise NotSupported(f"this worker has no tokenizer, so it cannot serve {request.kind}")
    for name in _NEED_TOKENIZER:
        if getattr(request.sampling, name):
            raise NotSupported(f"this worker has no tokenizer, so it cannot honour {name}", param=name)
