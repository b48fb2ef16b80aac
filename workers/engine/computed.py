"""The answers of computed kinds, whatever the engine."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

from inferbus.schemas.answers import ComputedAnswer, Embedding, EmbeddingsAnswer, Usage
from inferbus.schemas.computed import EmbeddingsRequest


class Known:
    """`inferbus.workers.engine.interface.Computation` of an answer that needed no engine."""

    prompt_tokens = 0

    def __init__(self, answer: ComputedAnswer) -> None:
        self._answer = answer

    async def answer(self, priority: int) -> ComputedAnswer:
        """See `Computation.answer`."""
        return self._answer


def embeddings_answer(
    request: EmbeddingsRequest, vectors: Sequence[list[float]], *, model: str, prompt_tokens: int
) -> EmbeddingsAnswer:
    """The answer to an embeddings request.

    Args:
        request: Says how vectors are written.
        vectors: One an input.
        model: The served model name.
        prompt_tokens: Of all inputs.
    """
    data = [
        Embedding(index=i, embedding=_base64(vector) if request.encoding_format == "base64" else vector)
        for i, vector in enumerate(vectors)
    ]
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=0, total_tokens=prompt_tokens)
    return EmbeddingsAnswer(job="", attempt=0, data=data, model=model, usage=usage)


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
