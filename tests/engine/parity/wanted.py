"""The differences between inferbus and SGLang's server that are meant to be; docs/openai.md shows them."""

from __future__ import annotations

from typing import Final

import msgspec

from tests.engine.parity.told import Difference


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One of them.

    Attributes:
        what: The request, or the field.
        sglang: What SGLang's server does.
        inferbus: What inferbus does.
        reason: Why.
        paths: Of the fields that differ.
        cases: Where, each of them; empty: wherever it occurs.
    """

    what: str
    sglang: str
    inferbus: str
    reason: str
    paths: tuple[str, ...]
    cases: tuple[str, ...] = ()

    @property
    def row(self) -> str:
        """As the documentation has it."""
        return f"| {self.what} | {self.sglang} | {self.inferbus} | {self.reason} |"


CONTENT: Final = (
    "choices.message.content",
    "choices.content",
    "choices.text",
    "choices.finish_reason",
    "choices.matched_stop",
    "usage.completion_tokens",
    "usage.total_tokens",
    "shape",
)
"""What differs where an answer is longer or shorter."""

REFUSES: Final = ("refuses",)

WANTED: Final = (
    Wanted(
        what="a request that both refuse",
        sglang="`{object, message, type, param: null, code}`; the message may quote the request",
        inferbus="`{error: {code, message, param, retryable}}`",
        reason="a program can act on `code` and `param`, and nothing of a request gets into logs",
        paths=("error",),
    ),
    Wanted(
        what="`metadata.weight_versions` of a whole answer",
        sglang="a list",
        inferbus="left out",
        reason="OpenAI's types have texts in `metadata`, and refuse the whole answer otherwise",
        paths=("metadata.weight_versions",),
    ),
    Wanted(
        what="`meta_info.response_sent_to_client_ts`",
        sglang="a time",
        inferbus="left out",
        reason="it is the HTTP server's",
        paths=("choices.meta_info.response_sent_to_client_ts",),
    ),
    Wanted(
        what="no `model` in the body",
        sglang='answers as `"default"`',
        inferbus="answers with the model's name",
        reason="the subject has named it",
        paths=("model",),
        cases=("chat: no model", "completions: no model"),
    ),
    Wanted(
        what="another `model` than the one served",
        sglang="answers, and says that it was the other one",
        inferbus="`model_not_found`",
        reason="the answer would be another model's than asked for",
        paths=REFUSES,
        cases=("chat: another model",),
    ),
    Wanted(
        what="`null` in a field",
        sglang="refuses it for `n`, `stream`, and for `max_tokens` and `temperature` of completions",
        inferbus="the default, everywhere",
        reason="OpenAI's clients send it",
        paths=("answers",),
        cases=("chat: null is the default", "completions: nulls"),
    ),
    Wanted(
        what="completions without `max_tokens`",
        sglang="end after 16 tokens",
        inferbus="may fill the context; at the gateway and in batch files 16 tokens",
        reason="the default is OpenAI's own; the bus has one rule for all kinds",
        paths=CONTENT,
        cases=("completions: no max_tokens",),
    ),
    Wanted(
        what="`max_completion_tokens` of completions",
        sglang="passes it over",
        inferbus="heeds it",
        reason="it is the same wish",
        paths=CONTENT,
        cases=("completions: max_completion_tokens",),
    ),
    Wanted(
        what="`max_new_tokens`, `sampling_params`, `json_schema` of a chat",
        sglang="passes them over",
        inferbus="heeds them",
        reason="they are its own parameters' names",
        paths=CONTENT,
        cases=("chat: max_new_tokens", "chat: sampling_params", "chat: json_schema at the top"),
    ),
    Wanted(
        what="`max_tokens` and `max_completion_tokens` that differ",
        sglang="takes the second",
        inferbus="`invalid_request`",
        reason="one of the two is a mistake",
        paths=REFUSES,
        cases=("chat: max_tokens and max_completion_tokens that differ",),
    ),
    Wanted(
        what="a stop string that the model says in more tokens than it needs",
        sglang="misses it, and goes on",
        inferbus="sees it",
        reason="a stop string is text, however it is cut into tokens",
        paths=CONTENT,
        cases=("chat: a stop string", "chat: a stop string that is kept"),
    ),
    Wanted(
        what="a stop string over 256 bytes",
        sglang="takes it",
        inferbus="`invalid_request`",
        reason="to see it as the row above says, SGLang decodes as many tokens again for every new one",
        paths=REFUSES,
        cases=("chat: a stop string of 300 bytes",),
    ),
    Wanted(
        what="an empty stop string",
        sglang="ends the answer before it begins",
        inferbus="`invalid_request`",
        reason="nobody means it",
        paths=REFUSES,
        cases=("chat: an empty stop string",),
    ),
    Wanted(
        what="stop token ids outside the vocabulary",
        sglang="answers; with `min_tokens` its server dies",
        inferbus="`invalid_request`",
        reason="one request must not end an engine",
        paths=REFUSES,
        cases=("chat: stop token ids outside the vocabulary",),
    ),
    Wanted(
        what='`"6"` for a number, `true` for one',
        sglang="takes them as numbers",
        inferbus="`invalid_request`",
        reason="OpenAI's API refuses them too",
        paths=REFUSES,
        cases=("chat: numbers as texts", "completions: logprobs true"),
    ),
    Wanted(
        what="`temperature` over 2, `top_logprobs` over 20, `n` over 128",
        sglang="answers",
        inferbus="`invalid_request`",
        reason="OpenAI's limits",
        paths=REFUSES,
        cases=("chat: temperature 2.5", "chat: top_logprobs 21", "chat: n 129"),
    ),
    Wanted(
        what="`top_k` 0; `max_tokens` 0 of a chat",
        sglang="answers where it is greedy; an empty answer",
        inferbus="`invalid_request`",
        reason="out of range, whatever the other parameters say",
        paths=REFUSES,
        cases=("chat: top_k 0", "chat: max_tokens 0"),
    ),
    Wanted(
        what="the role `root`",
        sglang="answers",
        inferbus="`invalid_request`",
        reason="it is one model family's, and OpenAI has none",
        paths=REFUSES,
        cases=("chat: the role root",),
    ),
    Wanted(
        what="`suffix`",
        sglang="passes it over, unless the server has a completion template",
        inferbus="`invalid_request`",
        reason="the answer would not fit between the two",
        paths=REFUSES,
        cases=("completions: suffix",),
    ),
    Wanted(
        what="a whole answer with tools",
        sglang="is parsed anew: other blanks, no `matched_stop`, calls that were cut off left out",
        inferbus="says what its stream said",
        reason="a job has both, and its chunks may have been acted on",
        paths=(
            "choices.message.content",
            "choices.message.tool_calls",
            "choices.message.tool_calls.function.arguments",
            "choices.finish_reason",
            "choices.matched_stop",
        ),
        cases=(),
    ),
    Wanted(
        what="a streamed tool call that is cut off",
        sglang="its arguments are completed to JSON that the model never wrote",
        inferbus="as far as the model wrote it",
        reason="an invented end looks like a call to be made",
        paths=("choices.calls.0.arguments",),
        cases=("chat: tools, required", "chat: tools, named"),
    ),
)


def wanted_by(case: str, difference: Difference) -> Wanted | None:
    """The entry that a difference belongs to; None: it is not wanted."""
    fitting = (each for each in WANTED if difference.path in each.paths)
    return next((each for each in fitting if _is_of(case, each)), None)


def _is_of(case: str, wanted: Wanted) -> bool:
    if wanted.cases:
        return case in wanted.cases
    return "choices.message.content" not in wanted.paths or case.startswith("chat: tools")
