"""Every limit of the wire contract, in one place.

What exceeds a limit is refused with a code before an engine sees it. Limits
that depend on the model (context length, vocabulary) or on the NATS server
(payload size) are announced by the workers and by the server instead.
"""

from __future__ import annotations

from typing import Final

SUBJECT_TOKEN_BYTES: Final = 128
"""Longest model name, owner or job id in UTF-8, before it is made subject-safe (at most three times that)."""

PREFIX_CHARS: Final = 64
"""Longest subject prefix."""

SUBJECT_CHARS: Final = 1024
"""Longest reply subject that a caller may name; every subject of the contract is shorter."""

NESTING_DEPTH: Final = 64
"""Deepest nesting of arrays and objects in a body."""

PARTS: Final = 100_000
"""Most objects, arrays, members of objects and texts in a request's body, all together."""

PART_BYTES: Final = 3
"""Fewest bytes a part has in an answer: log probabilities as MessagePack, the densest, have nearly four."""

VALUES: Final = 1_200_000
"""Most elements of arrays and members of objects in a body, all together."""

SMALL_BODY: Final = 65_536
"""Bytes of a body that is decoded at once; a larger one is decoded beside the event loop."""

RESUME_CHARS: Final = 128
"""Longest `Infer-Resume`; an answer whose request has a longer one is not kept."""

NAME_CHARS: Final = 64
"""How much of a name that a caller chose is repeated in messages."""

MESSAGES: Final = 4096
"""Most messages in one chat request."""

PROMPT_TOKENS: Final = 1_048_576
"""Most token ids in one request, whatever a model's context allows."""

EMBEDDING_INPUTS: Final = 2048
"""Most inputs in one embeddings request, as in OpenAI's API."""

TEXTS: Final = 2048
"""Most texts in one tokenize request, and lists in one detokenize request."""

CHOICES: Final = 128
"""Largest `n`; of a completion with several prompts, of `n` times their number."""

REASONING_EFFORT: Final = 0.99
"""Largest `reasoning_effort` that is a number, as in SGLang's API."""

STOP_STRINGS: Final = 32
"""Most stop strings, and most stop patterns (SGLang's own limit)."""

STOP_STRING_BYTES: Final = 256
"""Longest stop string or stop pattern in UTF-8. Of patterns it is SGLang's own limit. To see a stop string,
however it is cut into tokens, the scheduler decodes as many tokens again after every new one as the string
has bytes."""

STOP_TOKEN_IDS: Final = 1024
"""Most stop token ids."""

LOGIT_BIASES: Final = 1024
"""Most entries of `logit_bias`."""

LOGIT_BIAS: Final = 10_000.0
"""Largest bias either way: OpenAI's API has 100, and half-precision logits overflow at 65,504."""

TOP_LOGPROBS: Final = 20
"""Largest `top_logprobs`, as in OpenAI's API."""

TEMPERATURE_MAX: Final = 2.0
"""Highest temperature, as in OpenAI's API."""

GRAMMAR_CHARS: Final = 262_144
"""Longest JSON schema, regular expression or grammar."""

WARNINGS: Final = 16
"""Most warnings named in one answer; the rest are counted."""

DEADLINE_SECONDS: Final = 30 * 24 * 3600
"""Furthest deadline from now."""

OBJECT_BYTES: Final = 256 * 1024 * 1024
"""Largest body that travels in parts."""
