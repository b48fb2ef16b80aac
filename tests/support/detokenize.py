"""Streams tokens through SGLang's detokenizer as a scheduler would, and compares with decoding them at once.

    python -m tests.support.detokenize TOKENIZER [--plain] [--time]

prints a JSON object: streams, those whose text differs, and the processor time of a step in microseconds.
In a process of its own because importing SGLang takes a quarter of a minute and changes its process.
"""

from __future__ import annotations

import json
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

INTERVALS = (1, 3, 4, 30, 32)
TEXTS = (
    "人工智能是计算机科学的一个分支、它企图了解智能的实质、并生产出一种新的能以人类智能相似的方式做出反应的智能机器。",
    "😀🏳️‍🌈世 é漢字 😀 hello 👨‍👩‍👧‍👦 мир, naïve façade",
    "مرحبا بالعالم नमस्ते दुनिया 한국어 테스트 ไทย日本語のテキスト、ひらがな",
    "The quick brown fox.\n\n\tdef f(x):\n    return x + 1  # a😀b😀c d",
)


class Detokenizer:
    """SGLang's detokenizer without its process."""

    def __init__(self, tokenizer: Any) -> None:
        from sglang.srt.managers import detokenizer_manager

        self._manager = object.__new__(detokenizer_manager.DetokenizerManager)
        self._manager.tokenizer = tokenizer
        self._manager.vocab_size = len(tokenizer)
        self._manager.decode_status = detokenizer_manager.LimitedCapacityDict(1 << 16)
        self._manager.disable_tokenizer_batch_decode = False
        self._manager.is_tool_call_parser_gpt_oss = False
        self._manager.tool_close_token_ids = frozenset()

    def stream(self, tail: list[int], ids: list[int], sizes: list[int], **fields: Any) -> list[str]:
        """The text of each step.

        Args:
            tail: The last tokens of the prompt.
            ids: The output.
            sizes: Tokens of each step.
            fields: `skip`, `finish`, `keep_stop`.
        """
        texts: list[str] = []
        first, at = True, 0
        for number, size in enumerate(sizes):
            new = ids[at : at + size]
            at += size
            last = number == len(sizes) - 1
            batch = SimpleNamespace(
                rids=["r"],
                decoded_texts=[""],
                decode_ids=[tail + new if first else new],
                read_offsets=[len(tail)],
                finished_reasons=[fields.get("finish", {"type": "length"}) if last else None],
                no_stop_trim=[fields.get("keep_stop", False)],
                skip_special_tokens=[fields.get("skip", True)],
                spaces_between_special_tokens=[True],
            )
            first = False
            texts += self._manager._decode_batch_token_id_output(batch)
        return texts


def outputs(tokenizer: Any, rng: random.Random) -> list[int]:
    """Text in several scripts, any tokens, special ones, or mostly parts of characters."""
    kind = rng.random()
    if kind < 0.5:
        text = "".join(rng.choice(TEXTS)[rng.randrange(20) :] for _ in range(rng.randrange(1, 4)))
        return list(tokenizer.encode(text, add_special_tokens=False))
    parts = [tokenizer.convert_tokens_to_ids(piece) for piece in "äåæçèéðŁĺĢ¤"]
    share = 0.0 if kind < 0.75 else 0.6
    return [
        rng.choice(parts) if rng.random() < share else rng.randrange(len(tokenizer))
        for _ in range(rng.randrange(1, 90))
    ]


def main(path: str, *flags: str) -> None:
    """Compares."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    if "--plain" not in flags:
        from inferbus.workers.engine.sglang import detokenizer

        detokenizer.install()
    detok = Detokenizer(tokenizer)
    rng = random.Random(1)
    streams = wrong = steps = 0
    spent = 0.0
    prompt = tokenizer.encode("Once upon a time in 中国 <|im_end|>")
    for _ in range(1200):
        ids, skip = outputs(tokenizer, rng), rng.random() < 0.5
        tail = prompt[: rng.randrange(1, len(prompt))][-5:]

        def whole(ids: list[int], tail: list[int] = tail, skip: bool = skip) -> str:
            at_once = tokenizer.decode(tail + ids, skip_special_tokens=skip)
            return str(at_once)[len(tokenizer.decode(tail, skip_special_tokens=skip)) :]

        expected = whole(ids)
        for interval in (*INTERVALS, 0):
            sizes, left = [], len(ids)
            while left > 0:
                # 0 stands for steps of any size, as where text is held back that may begin a stop string.
                sizes.append(min(left, interval or rng.randrange(1, 9)))
                left -= sizes[-1]
            begun = time.process_time()
            texts = detok.stream(tail, ids, sizes, skip=skip)
            spent += time.process_time() - begun
            streams += 1
            steps += len(sizes)
            wrong += "".join(texts) != expected
        # A stop string ends the text; it is trimmed, or kept and what follows it is trimmed.
        if len(expected) > 8 and "�" not in expected:
            stop = expected[5:7]
            before = expected[: expected.index(stop)]
            for keep in (False, True):
                fields = {"finish": {"type": "stop", "matched": stop}, "keep_stop": keep, "skip": skip}
                got = "".join(detok.stream(tail, ids, [len(ids)], **fields))
                streams += 1
                wrong += got != before + stop * keep
    result = {"streams": streams, "wrong": wrong, "microseconds": round(spent / steps * 1e6, 1)}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
