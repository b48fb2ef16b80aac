"""What a scripted engine does with a request: built in code, or loaded from a TOML or JSON file.

    tokenizer = true

    [[rules]]                    # the first rule that fits a leg is played
    user = "fails-twice"
    [rules.fault]
    at = 3                       # after three tokens
    do = "fail"
    code = "kv_transfer_failed"
    times = 2

    [[rules]]
    first_token = 7
    text = "Paris."
    delay = 0.02

What no rule fits counts on from the prompt's last token, 16 tokens far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from inferbus.schemas.errors import BY_CODE, EngineFailed
from inferbus.schemas.fleet import Bootstrap
from inferbus.schemas.handoff import Transfer
from inferbus.workers.engine.interface import Leg

USER = "user"
"""The option of a leg that carries the request's `user`, for rules to match."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong with a leg.

    Attributes:
        at: After that many of its tokens.
        do: `fail` with an error; `hang` until aborted; `crash` (abort) or `kill` (SIGKILL) the process.
        code: Of the error, from `inferbus.schemas.errors`.
        times: For that many legs of this engine; None: for every one.
        once: A file that is made when it happens; where it exists already, nothing happens, so that only
            the first of several processes fails.
    """

    do: Literal["fail", "hang", "crash", "kill"] = "fail"
    at: int = 0
    code: str = "engine_failed"
    times: int | None = None
    once: str | None = None

    def __post_init__(self) -> None:
        if self.code not in BY_CODE:
            raise ValueError(f"no error has the code {self.code!r}")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which legs it is for, and how they go.

    Attributes:
        first_token: Legs whose prompt begins with this token.
        user: Legs of requests with this `user`.
        index: Legs of this choice.
        tokens: The answer.
        text: The answer, one token a byte; needs a tokenizer to be read.
        count: Where neither is given, the answer counts on from the prompt's last token: each token is the
            one before plus 1, within these bounds (the second one excluded), from the first one again
            after that. So it depends on the tokens so far alone, as a greedy model's does.
        length: Tokens of a counted answer; one that is continued by another leg begins anew with them.
        end: A token that ends the answer, itself included, however far it has come.
        continues: Whether `tokens` or `text` go on where the prompt ends with their beginning.
        per_delta: Tokens of one delta.
        first_delay: Seconds before the first delta; of a prefill leg, before it is done.
        delay: Seconds before each further one.
        finish: How it ends where `max_tokens` does not cut it.
        cached_tokens: Tokens of the prompt that are reported as cached.
        transfer: The reported KV transfer of a prefill leg.
        fault: What goes wrong.
    """

    first_token: int | None = None
    user: str | None = None
    index: int | None = None
    tokens: list[int] | None = None
    text: str | None = None
    count: tuple[int, int] | None = None
    length: int = 16
    end: int | None = None
    continues: bool = False
    per_delta: int = 1
    first_delay: float = 0.0
    delay: float = 0.0
    finish: Literal["stop", "length"] = "stop"
    cached_tokens: int = 0
    transfer: Transfer | None = None
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.text is not None:
            raise ValueError("a rule has tokens or a text, not both")
        if self.per_delta < 1:
            raise ValueError("per_delta must be at least 1")
        if self.count is not None and not 0 <= self.count[0] < self.count[1]:
            raise ValueError("count must be two rising token ids")

    def fits(self, leg: Leg) -> bool:
        """Whether it is for this leg."""
        return (
            (self.first_token is None or self.first_token == leg.token_ids[0])
            and (self.index is None or self.index == leg.index)
            and (self.user is None or self.user == leg.options.get(USER))
        )

    def answer(self, prompt: list[int], *, vocabulary: int, endless: bool) -> Iterator[int]:
        """The tokens of the answer to a prompt.

        Args:
            prompt: Its tokens.
            vocabulary: How many tokens there are.
            endless: Whether a counted answer goes on beyond its length and its end token.
        """
        fixed = self.tokens if self.text is None else list(self.text.encode())
        if fixed is not None:
            return iter(fixed[_overlap(prompt, fixed) :] if self.continues else fixed)
        low, high = self.count or (0, vocabulary)
        start = prompt[-1] + 1 if low <= prompt[-1] + 1 < high else low
        counted = itertools.chain(range(start, high), itertools.cycle(range(low, high)))
        return counted if endless else itertools.islice(counted, self.length)


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a scripted engine behaves.

    Attributes:
        rules: The first one that fits a leg is played.
        tokenizer: Whether it has one; without it serves tokens only.
        embedding: Dimensions of the embeddings that it gives; it generates nothing then. 0: it generates.
        words: Tokens that are not what `ByteTokenizer` makes of their id: text, or bytes.
        vocabulary: Token ids are below this.
        context_length: Prompt and answer together.
        kv_tokens: Announced; what runs at a time is bounded by it where prompts take time.
        prefill_tokens_per_second: Of prompts, which are then computed one after the other: the highest
            `priority` first, each once the KV cache has room for it and all that it may generate.
            0: at once.
        page_size: Announced, and part of the signature.
        max_running: Announced.
        max_prefill_tokens: Announced.
        step_tokens: Announced.
        bootstrap: Announced by a prefill engine; nothing listens there.
        burst: Deltas without a delay that come in one go, before other tasks have their turn.
    """

    rules: list[Rule] = []
    tokenizer: bool = True
    embedding: int = 0
    words: dict[int, str | list[int]] = {}
    vocabulary: int = 32_768
    context_length: int = 32_768
    kv_tokens: int = 1_048_576
    prefill_tokens_per_second: float = 0.0
    page_size: int = 16
    max_running: int = 256
    max_prefill_tokens: int = 16_384
    step_tokens: int = 0
    bootstrap: Bootstrap = Bootstrap(host="127.0.0.1", port=8998)
    burst: int = 16

    def rule(self, leg: Leg) -> Rule:
        """The rule for a leg."""
        return next((rule for rule in self.rules if rule.fits(leg)), _OTHERWISE)


_OTHERWISE = Rule()


def load(path: Path) -> Script:
    """The script in a file.

    Raises:
        EngineFailed: It cannot be read, or is no script; the message names the file and the field.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=Script)
        return msgspec.toml.decode(data, type=Script)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineFailed(f"the script {path} cannot be used: {error}") from error


def _overlap(prompt: list[int], answer: list[int]) -> int:
    """How many tokens of an answer a prompt ends with already."""
    longest = min(len(prompt), len(answer))
    return next((size for size in range(longest, 0, -1) if prompt[-size:] == answer[:size]), 0)
