"""What a worker sends back."""

from __future__ import annotations

from typing import Literal

import msgspec

from inferbus.schemas.errors import ErrorBody

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one request: prompt tokens once, whatever `n`; completion tokens of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TopLogprob(msgspec.Struct, array_like=True):
    """One alternative: `[logprob, token_id]`."""

    logprob: float
    token_id: int


class TokenLogprobs(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Log probabilities of the tokens beside them, in their order.

    Attributes:
        logprobs: One a token.
        top: Alternatives of each token, best first.
    """

    logprobs: list[float]
    top: list[list[TopLogprob]] | None = None


class TokenChunk(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """One message of a token stream: tokens of one choice that no other message repeats.

    Attributes:
        job: The job's id.
        attempt: From 1.
        seq: From 0 within the attempt, without holes.
        index: The choice.
        token_ids: May be empty on a choice's last chunk.
        finish_reason: On a choice's last chunk.
        matched: What ended the choice, where that was a stop string or stop token.
        logprobs: Where asked for.
        usage: On the last chunk of the request.
        warnings: On the first.
    """

    job: str
    attempt: int
    seq: int
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched: int | str | None = None
    logprobs: TokenLogprobs | None = None
    usage: Usage | None = None
    warnings: list[str] = []


class TokenChoice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One whole choice of a token request."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason
    matched: int | str | None = None
    logprobs: TokenLogprobs | None = None


class TokenAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The whole answer to a token request: of a live one with `stream: false`, and every job's result."""

    job: str
    attempt: int
    choices: list[TokenChoice]
    usage: Usage
    warnings: list[str] = []


class Embedding(msgspec.Struct, kw_only=True):
    """OpenAI's embedding object.

    Attributes:
        embedding: The vector, or its little-endian 32-bit floats in base64.
        index: Of the input.
        object: `embedding`.
    """

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """The answer to an embeddings request: OpenAI's object, with what all answers have.

    Attributes:
        job: The job's id.
        attempt: From 1.
        data: One an input, in the order of the inputs.
        model: The served model name.
        usage: Prompt tokens of all inputs; nothing is generated.
        object: `list`.
        warnings: What of the request was ignored.
    """

    job: str
    attempt: int
    data: list[Embedding]
    model: str
    usage: Usage
    object: str = "list"
    warnings: list[str] = []


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The answer to a tokenize request: SGLang's object, with what all answers have.

    Attributes:
        job: The job's id.
        attempt: From 1.
        tokens: Of the text, or of each text.
        count: How many.
        max_model_len: Of the tokenizer, or else of the model; SGLang's.
        warnings: What of the request was ignored.
    """

    job: str
    attempt: int
    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    warnings: list[str] = []


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The answer to a detokenize request: SGLang's object, with what all answers have.

    Attributes:
        job: The job's id.
        attempt: From 1.
        text: Of the tokens, or of each list of them.
        warnings: What of the request was ignored.
    """

    job: str
    attempt: int
    text: str | list[str]
    warnings: list[str] = []


ComputedAnswer = EmbeddingsAnswer | TokenizeAnswer | DetokenizeAnswer
"""Of the kinds whose answer comes in one piece."""


class TextChunk(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What inferbus adds to OpenAI's `chat.completion.chunk` and to a streamed `text_completion`.

    Attributes:
        job: The job's id.
        attempt: From 1.
        seq: From 0 within the attempt, without holes.
        token_ids: Of durable jobs with one choice: the tokens since the chunk before, from which another
            worker can go on.
        warnings: On the first.
    """

    job: str
    attempt: int
    seq: int
    token_ids: list[int] = []
    warnings: list[str] = []


class TextAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What inferbus adds to OpenAI's `chat.completion` and to a whole `text_completion`."""

    job: str
    attempt: int
    warnings: list[str] = []


class Retrying(msgspec.Struct, kw_only=True):
    """An attempt is over without an end mark, and another will follow; its chunks supersede this one's."""

    job: str
    attempt: int
    retrying: ErrorBody
