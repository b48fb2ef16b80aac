"""Do workers give the answers that the bare engine gives? The same greedy requests, three layouts, one run.

    python -m benchmarks.answers MODEL [--out FILE] [SGLang's flags]

Asks `sgl.Engine` alone, then a worker of the role `both`, then a prefill and a decode worker, one layout
after the other, for chat, completions, tokens, two choices and a JSON schema. Exits with 1 where an answer
differs. Made for machines that are lent for minutes: it says what it is doing, and needs no test tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from inferbus.schemas.fleet import Role
from inferbus.workers.client import Client
from inferbus.workers.stack.flags import placement
from inferbus.workers.stack.local import LocalStack

NAME: Final = "answers"
QUESTIONS: Final = (
    "What is the capital of France?",
    "List three primary colors.",
    "How many days are in a week?",
    "Give me a short recipe for tea.",
    "Explain gravity to a child in two sentences.",
    "What is 2 plus 2?",
    "Name an animal that can fly.",
    "Write one sentence about the sea.",
)
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "max_tokens": 48}
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
LAYOUTS: Final[dict[str, tuple[Role, ...]]] = {"both": ("both",), "pair": ("prefill", "decode")}


def main(argv: list[str]) -> int:
    """Asks everybody, compares, prints and writes what was found."""
    model, flags, out = argv[0], argv[1:], None
    if "--out" in flags:
        at = flags.index("--out")
        out = Path(flags[at + 1])
        del flags[at : at + 2]
    prompts = _prompts(model)
    found = {"bare": _bare(model, flags, prompts)}
    for layout, roles in LAYOUTS.items():
        found[layout] = asyncio.run(_fleet(model, flags, roles, prompts))
    equal = {layout: _equal(found["bare"], found[layout]) for layout in LAYOUTS}
    report = {
        "versions": {name: version(name) for name in ("sglang", "torch", "nats-py", "msgspec")},
        "flags": flags,
        "equal": equal,
        "found": found,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    print(json.dumps({**report, "found": {name: each["seconds"] for name, each in found.items()}}, indent=1))
    print("chat:", json.dumps(found["pair"]["chat"][:2], ensure_ascii=False))
    return 0 if all(all(each.values()) for each in equal.values()) else 1


def _prompts(model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [
        list(
            tokenizer.encode(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
                )
            )
        )
        for question in QUESTIONS
    ]


def _bare(model: str, flags: list[str], prompts: list[list[int]]) -> dict[str, Any]:
    """In a process of its own, so that nothing of the engine is left."""
    place = placement()
    env = {name: value for name, value in {**os.environ, **place.env}.items() if value is not None}
    command = [sys.executable, "-m", "benchmarks.answers", "--bare", model, *place.flags, *flags]
    done = subprocess.run(
        command, input=json.dumps(prompts), env=env, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _bare_main(argv: list[str]) -> int:
    from benchmarks.bare import read_arguments

    prompts = json.loads(sys.stdin.read())
    started = time.monotonic()
    arguments = read_arguments(["--model-path", argv[0], "--host", "127.0.0.1", *argv[1:]], "bare")
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(server_args=arguments)
    ready = time.monotonic() - started
    sampling = {"temperature": 0, "max_new_tokens": GREEDY["max_tokens"]}

    def generate(ids: list[int]) -> tuple[list[int], str]:
        # One at a time: a batch of another size may round otherwise. Streamed, since a stream of
        # increments is what the arguments ask for.
        token_ids: list[int] = []
        text = ""
        for step in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
            token_ids += step["output_ids"]
            text += step["text"]
        return token_ids, text

    answers = [generate(ids) for ids in prompts]
    engine.shutdown()
    print(
        json.dumps(
            {
                "seconds": {"ready": round(ready, 1)},
                "tokens": [token_ids for token_ids, _ in answers],
                "chat": [text for _, text in answers],
            }
        )
    )
    return 0


async def _fleet(
    model: str, flags: list[str], roles: tuple[Role, ...], prompts: list[list[int]]
) -> dict[str, Any]:
    place = placement()
    started = time.monotonic()
    print(f"starting {' and '.join(roles)}", file=sys.stderr, flush=True)
    async with (
        LocalStack(
            model,
            model="m",
            roles=roles,
            flags=[*place.flags, *flags],
            role_flags=place.role_flags,
            env=place.env,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        ) as stack,
        Client.connect(stack.url) as client,
    ):
        seconds = {"ready": round(time.monotonic() - started, 1)}
        began = time.monotonic()
        chat: list[str] = []
        tokens: list[list[int]] = []
        for question, ids in zip(QUESTIONS, prompts, strict=True):
            whole: Any = await client.chat("m", [{"role": "user", "content": question}], **GREEDY).answer()
            chat.append(whole["choices"][0]["message"]["content"])
            answer: Any = await client.tokens("m", ids, **GREEDY).answer()
            tokens.append(answer.choices[0].token_ids)
        completions = []
        for ids in prompts[:2]:
            whole = await client.complete("m", ids, **GREEDY).answer()
            completions.append(whole["choices"][0]["text"])
        two: Any = await client.chat("m", [{"role": "user", "content": QUESTIONS[0]}], n=2, **GREEDY).answer()
        shaped: Any = await client.chat(
            "m",
            [{"role": "user", "content": "Name a city as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
            **GREEDY,
        ).answer()
        job = await client.submit(
            "chat", "m", {"messages": [{"role": "user", "content": QUESTIONS[0]}], **GREEDY}
        )
        result = await client.result(job, timeout=120)
        burst: list[Any] = await asyncio.gather(
            *(client.tokens("m", ids, **GREEDY).answer() for ids in prompts * 4)
        )
        seconds["asked"] = round(time.monotonic() - began, 1)
    return {
        "seconds": seconds,
        "chat": chat,
        "tokens": tokens,
        "completions": completions,
        "choices": [choice["message"]["content"] for choice in two["choices"]],
        "shaped": shaped["choices"][0]["message"]["content"],
        "job": result.answer["choices"][0]["message"]["content"] if isinstance(result.answer, dict) else "",
        "burst": sum(len(answer.choices[0].token_ids) for answer in burst),
    }


def _equal(bare: dict[str, Any], found: dict[str, Any]) -> dict[str, bool]:
    return {
        "tokens": found["tokens"] == bare["tokens"],
        "chat": found["chat"] == bare["chat"],
        "completions": found["completions"] == bare["chat"][:2],
        "choices": found["choices"] == bare["chat"][:1] * 2,
        "job": found["job"] == bare["chat"][0],
        "schema": _has_city(found["shaped"]),
    }


def _has_city(text: str) -> bool:
    try:
        return set(json.loads(text)) == {"city"}
    except ValueError:
        return False


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(_bare_main(arguments[1:]) if arguments[0] == "--bare" else main(arguments))
