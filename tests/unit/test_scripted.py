"""The scripted engine: the behaviour of every engine, and what a script makes of it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferbus.schemas.errors import (
    BY_CODE,
    Cancelled,
    ContextLengthExceeded,
    EngineFailed,
    NotSupported,
    TransferFailed,
)
from inferbus.schemas.fleet import Bootstrap, Role
from inferbus.schemas.requests import parse
from inferbus.workers.engine.interface import Delta, EngineLoad, Leg, Rendezvous
from inferbus.workers.engine.scripted import ByteTokenizer, Fault, Rule, Script, ScriptedEngine, load
from tests.support.engine_suite import (
    BODIES,
    PROMPT,
    EngineSuite,
    answered,
    consumed,
    ids,
    leg_of,
    prepared,
    rid,
    texts,
)
from tests.support.eventually import eventually

HARD = "ď🏳️‍🌈世"
BOOTSTRAP = Bootstrap(host="127.0.0.1", port=8998)


class TestScriptedEngine(EngineSuite):
    """It is an engine like any other."""

    @pytest.fixture
    async def engine(self) -> AsyncIterator[ScriptedEngine]:
        engine = ScriptedEngine()
        yield engine
        assert engine.running == 0
        await engine.close()


class TestScriptedEngineOfReadableText(EngineSuite):
    """Also where several tokens come at once, and wrap around."""

    @pytest.fixture
    async def engine(self) -> AsyncIterator[ScriptedEngine]:
        engine = ScriptedEngine(Script(rules=[Rule(count=(97, 123), per_delta=3, delay=0.0005)], burst=1))
        yield engine
        assert engine.running == 0
        await engine.close()


def scripted(*rules: Rule, **fields: Any) -> ScriptedEngine:
    return ScriptedEngine(Script(rules=list(rules), **fields))


def leg(role: Role = "both", **options: Any) -> Leg:
    meeting = None if role == "both" else Rendezvous(bootstrap=BOOTSTRAP, room=1)
    return Leg(rid=rid(), index=0, token_ids=PROMPT, sampling={}, options=options, rendezvous=meeting)


async def played(engine: ScriptedEngine, call: Leg | None = None) -> list[Delta]:
    async with aclosing(engine.generate(call or leg())) as deltas:
        return [delta async for delta in deltas]


async def told(engine: ScriptedEngine, **fields: Any) -> str:
    """The text of a chat answer, from its chunks."""
    chunks, _ = await answered(engine, "chat", ignore_eos=None, **fields)
    return texts(chunks, "chat").get(0, "")


async def test_without_a_script_it_counts_on_from_the_prompt() -> None:
    deltas = await played(ScriptedEngine())
    assert ids(deltas) == list(range(50, 66))
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == "stop"


async def test_the_first_rule_that_fits_is_played() -> None:
    engine = scripted(
        Rule(first_token=40, user="a", tokens=[1]),
        Rule(index=1, tokens=[2]),
        Rule(user="b", tokens=[3]),
        Rule(tokens=[4]),
    )
    assert ids(await played(engine, leg(user="a"))) == [1]
    assert ids(await played(engine, leg(user="b"))) == [3]
    assert ids(await played(engine)) == [4]
    prompt = await engine.prepare(parse("tokens", {"token_ids": [9], "n": 2, "user": "b"}))
    assert [ids(await played(engine, prompt.leg(i, rid=rid()))) for i in range(2)] == [[3], [2]]


async def test_an_end_token_ends_an_answer_unless_it_is_to_be_ignored() -> None:
    engine = scripted(Rule(count=(40, 60), end=52))
    deltas = await leg_of(engine, PROMPT, ignore_eos=False)
    assert ids(deltas) == [50, 51, 52]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.matched == 52
    assert ids(await leg_of(engine, PROMPT, max_new_tokens=12)) == [*range(50, 60), 40, 41]


async def test_an_end_token_is_no_part_of_the_text_unless_it_is_to_be_kept() -> None:
    engine = scripted(Rule(text="abcXdef", end=ord("X")))
    assert await told(engine) == "abc"
    assert await told(engine, no_stop_trim=True) == "abcX"


@pytest.mark.parametrize("per_delta", [1, 2, 3, 100])
async def test_max_tokens_cuts_an_answer(per_delta: int) -> None:
    engine = scripted(Rule(tokens=[1, 2, 3, 4, 5], per_delta=per_delta))
    deltas = await leg_of(engine, PROMPT, max_new_tokens=4)
    assert ids(deltas) == [1, 2, 3, 4]
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == "length"


async def test_an_answer_ends_where_the_context_does() -> None:
    engine = scripted(context_length=len(PROMPT) + 3)
    assert len(ids(await leg_of(engine, PROMPT))) == 3
    with pytest.raises(ContextLengthExceeded):
        await prepared(engine, "tokens", max_tokens=4)


async def test_an_empty_answer_still_finishes() -> None:
    chunks, whole = await answered(scripted(Rule(tokens=[])), "tokens")
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [([], "stop")]
    assert whole.choices[0].token_ids == []


@pytest.mark.parametrize("per_delta", [1, 2, 3, 5])
async def test_characters_split_over_tokens_come_whole(per_delta: int) -> None:
    engine = scripted(Rule(text=HARD, per_delta=per_delta))
    prompt = await prepared(engine, "chat")
    deltas = await played(engine, prompt.leg(0, rid=rid()))
    assert "".join(delta.text for delta in deltas) == HARD
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert await told(engine) == HARD


async def test_a_literal_replacement_character_streams_through() -> None:
    engine = scripted(Rule(text="prefix \ufffd after"))
    assert await told(engine) == "prefix \ufffd after"
    deltas = await played(engine)
    assert deltas[-1].text == "r"


async def test_a_character_cut_by_the_end_comes_as_one_replacement() -> None:
    engine = scripted(Rule(text="a🏳"))
    chunks, whole = await answered(engine, "chat", max_tokens=3)
    assert texts(chunks, "chat")[0] == "a\ufffd" == whole["choices"][0]["message"]["content"]


async def test_bytes_that_are_no_text_do_no_harm() -> None:
    engine = scripted(Rule(tokens=[0xFF, 0x80, 65, 0xC3]))
    assert await told(engine) == "\ufffd\ufffdA\ufffd"


async def test_words_stand_for_tokens() -> None:
    engine = scripted(Rule(tokens=[300, 301, 302, 7]), words={300: "Par", 301: [0xC3], 302: [0xA9], 7: "!"})
    assert await told(engine) == "Paré!"


PIECES = st.lists(st.integers(1, 6), min_size=1, max_size=40)


@given(st.text(max_size=30).filter(lambda text: text.isprintable()), PIECES)
def test_joined_pieces_are_the_text_whatever_the_split(text: str, sizes: list[int]) -> None:
    tokenizer = ByteTokenizer()
    stream, rest, pieces = tokenizer.stream(), tokenizer.encode(text), []
    for size in sizes:
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    pieces.append(stream.push(rest, last=True))
    assert "".join(pieces) == text == tokenizer.decode(tokenizer.encode(text))


@given(st.lists(st.integers(0, 400), max_size=30), PIECES)
def test_joined_pieces_of_any_bytes_are_their_decoding(tokens: list[int], sizes: list[int]) -> None:
    tokenizer = ByteTokenizer({300: HARD, 301: [0xF0, 0x9F], 302: [0x8F, 0xB3]})
    stream, rest, pieces = tokenizer.stream(), tokens, []
    for size in sizes:
        pieces.append(stream.push(rest[:size]))
        rest = rest[size:]
    pieces.append(stream.push(rest, last=True))
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize("code", sorted(BY_CODE))
async def test_a_leg_fails_with_any_error_after_as_many_tokens_as_scripted(code: str) -> None:
    engine = scripted(Rule(per_delta=2, fault=Fault(at=5, code=code)))
    deltas = engine.generate(leg())
    seen = await consumed(deltas, 3)
    with pytest.raises(BY_CODE[code]) as caught:
        await anext(deltas)
    assert type(caught.value) is BY_CODE[code]
    assert len(ids(seen)) == 5
    assert engine.running == 0


async def test_a_leg_fails_before_its_first_token() -> None:
    engine = scripted(Rule(fault=Fault()))
    with pytest.raises(EngineFailed):
        await played(engine)


async def test_a_fault_happens_as_often_as_scripted() -> None:
    engine = scripted(Rule(tokens=[1], fault=Fault(code="kv_transfer_failed", times=2)))
    for _ in range(2):
        with pytest.raises(TransferFailed):
            await played(engine)
    assert ids(await played(engine)) == [1]


async def test_a_fault_happens_once_among_several_engines(tmp_path: Path) -> None:
    rule = Rule(tokens=[1], fault=Fault(once=str(tmp_path / "struck")))
    with pytest.raises(EngineFailed):
        await played(scripted(rule))
    assert ids(await played(scripted(rule))) == [1]


@pytest.mark.parametrize("at", [0, 2])
async def test_a_leg_hangs_until_it_is_aborted(at: int) -> None:
    engine = scripted(Rule(fault=Fault(do="hang", at=at)))
    call = leg()
    task = asyncio.create_task(played(engine, call))
    await eventually(lambda: engine.running)
    engine.abort(call.rid)
    with pytest.raises(Cancelled):
        await task
    assert engine.running == 0


@pytest.mark.parametrize("rule", [Rule(first_delay=3600), Rule(delay=3600)], ids=["first", "further"])
async def test_an_abort_does_not_wait_for_a_delay(rule: Rule) -> None:
    engine = scripted(rule)
    call = leg()
    task = asyncio.create_task(played(engine, call))
    await eventually(lambda: engine.running)
    engine.abort(call.rid)
    with pytest.raises(Cancelled):
        await task


async def test_a_cancelled_task_leaves_nothing_running() -> None:
    engine = scripted(Rule(first_delay=3600))
    task = asyncio.create_task(played(engine))
    await eventually(lambda: engine.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0


def sized(prompt: int, answer: int, *, role: Role = "both", priority: int | None = None) -> Leg:
    options = {} if priority is None else {"priority": priority}
    return msgspec.structs.replace(
        leg(role, **options), token_ids=[7] * prompt, sampling={"max_new_tokens": answer}
    )


async def test_prompts_are_computed_one_after_the_other_the_most_urgent_first() -> None:
    engine = scripted(prefill_tokens_per_second=10_000)
    done: list[int | None] = []

    async def first_token(call: Leg) -> None:
        await consumed(engine.generate(call), 1)
        done.append(call.options.get("priority"))

    async with asyncio.TaskGroup() as group:
        for call in (sized(300, 9), sized(9, 9, priority=0), sized(9, 9, priority=5)):
            group.create_task(first_token(call))
    assert done == [None, 5, 0]


async def test_a_leg_waits_until_the_kv_cache_holds_its_prompt_and_its_answer() -> None:
    engine = scripted(Rule(delay=3600), kv_tokens=100, prefill_tokens_per_second=1e9)
    first, second = sized(10, 50), sized(10, 50)
    tasks = [asyncio.create_task(played(engine, call)) for call in (first, second)]

    async def has(load: EngineLoad) -> bool:
        return await engine.load() == load

    await eventually(lambda: has(EngineLoad(running=1, waiting=1, kv_used=11)))
    engine.abort(first.rid)
    await eventually(lambda: has(EngineLoad(running=1, kv_used=11)))
    engine.abort(second.rid)
    await asyncio.wait(tasks)
    assert await engine.load() == EngineLoad()


async def test_a_leg_larger_than_the_kv_cache_starts_alone() -> None:
    engine = scripted(kv_tokens=10, prefill_tokens_per_second=1e9)
    answers = await asyncio.gather(*(played(engine, sized(20, 5)) for _ in range(3)))
    assert [len(answer) for answer in answers] == [5, 5, 5]


async def test_an_abort_reaches_a_leg_that_waits_for_its_turn() -> None:
    engine = scripted(prefill_tokens_per_second=0.001)
    calls = [sized(9, 9) for _ in range(3)]
    tasks = [asyncio.create_task(played(engine, call)) for call in calls]
    await eventually(lambda: engine.running == 3)
    for call, task in zip(calls[::-1], tasks[::-1], strict=True):
        engine.abort(call.rid)
        with pytest.raises(Cancelled):
            await task
    assert await engine.load() == EngineLoad()


async def test_a_decode_engine_finds_prompts_computed_and_a_prefill_engine_keeps_no_room_for_answers() -> (
    None
):
    decode = ScriptedEngine(Script(prefill_tokens_per_second=0.001), role="decode")
    assert await played(decode, sized(9, 9, role="decode"))
    prefill = ScriptedEngine(Script(kv_tokens=10, prefill_tokens_per_second=1e9), role="prefill")
    assert await played(prefill, sized(9, 9, role="prefill"))


async def test_other_tasks_have_their_turn_while_it_talks_without_a_pause() -> None:
    engine = scripted(Rule(length=10_000), burst=16)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await played(engine)
    task.cancel()
    assert turns >= 600


async def test_closing_it_fails_what_runs_and_what_comes() -> None:
    engine = scripted(Rule(fault=Fault(do="hang", at=1)))
    deltas = engine.generate(leg())
    await consumed(deltas, 1)
    await engine.close()
    with pytest.raises(EngineFailed):
        await consumed(deltas, 2)
    with pytest.raises(EngineFailed):
        await played(engine)
    assert not await engine.healthy()


async def test_one_request_id_does_not_run_twice() -> None:
    engine = ScriptedEngine()
    call = leg()
    first = engine.generate(call)
    await consumed(first, 1)
    with pytest.raises(EngineFailed):
        await played(engine, call)
    await first.aclose()
    assert engine.running == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_half_of_a_pair_insists_on_a_rendezvous(role: Role) -> None:
    engine = ScriptedEngine(role=role)
    with pytest.raises(EngineFailed):
        await played(engine)
    assert await played(engine, leg(role))


async def test_a_prefill_leg_is_done_without_a_token() -> None:
    engine = ScriptedEngine(Script(rules=[Rule(cached_tokens=4)]), role="prefill")
    (delta,) = await played(engine, leg("prefill"))
    assert delta.token_ids == []
    assert delta.finish is not None
    assert delta.cached_tokens == 4
    assert engine.info.bootstrap == BOOTSTRAP
    assert engine.info.kinds == ()


async def test_a_prefill_leg_fails_as_scripted_wherever_the_fault_is() -> None:
    engine = ScriptedEngine(Script(rules=[Rule(fault=Fault(code="prefill_failed", at=3))]), role="prefill")
    with pytest.raises(BY_CODE["prefill_failed"]):
        await played(engine, leg("prefill"))


def test_prefill_and_decode_fit_together_only_when_scripted_alike() -> None:
    prefill, decode = (ScriptedEngine(role=role).info.signature for role in ("prefill", "decode"))
    assert prefill == decode
    assert prefill is not None
    assert ScriptedEngine(Script(page_size=1), role="decode").info.signature != prefill
    assert ScriptedEngine().info.signature is None


@pytest.mark.parametrize("emitted", [0, 1, 7, 12])
async def test_a_fixed_answer_goes_on_where_the_prompt_left_it_if_scripted_so(emitted: int) -> None:
    text = "Paris is it."
    engine = scripted(Rule(text=text, continues=True))
    deltas = await leg_of(engine, PROMPT + list(text.encode())[:emitted])
    assert "".join(delta.text for delta in deltas) == text[emitted:]


async def test_a_cached_prefix_is_told_once_for_all_choices() -> None:
    engine = scripted(Rule(cached_tokens=8))
    chunks, whole = await answered(engine, "chat", n=3, stream_options={"include_usage": True}, max_tokens=2)
    assert (
        chunks[-1]["usage"]["prompt_tokens_details"]
        == {"cached_tokens": 8}
        == whole["usage"]["prompt_tokens_details"]
    )


async def test_a_completion_echoes_its_prompt_where_asked() -> None:
    engine = scripted(Rule(text="Paris"))
    chunks, whole = await answered(engine, "completions", prompt="So: ", echo=True, n=2)
    assert texts(chunks, "completions") == {0: "So: Paris", 1: "So: Paris"}
    assert whole["choices"][0]["text"] == "So: Paris"


async def test_content_parts_are_read_as_their_text() -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    engine = ScriptedEngine()
    split = await prepared(engine, "chat", messages=[{"role": "user", "content": parts}])
    joined = await prepared(engine, "chat", messages=[{"role": "user", "content": "hi there"}])
    assert split.token_ids == joined.token_ids
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(NotSupported):
        await prepared(engine, "chat", messages=[{"role": "user", "content": image}])


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("tokens", {"stop": "x"}, "stop"),
        ("tokens", {"json_schema": "{}"}, "json_schema"),
        ("chat", {"stop": ["x"]}, "stop"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("completions", {"regex": "x"}, "regex"),
        ("completions", {"logprobs": 0}, "logprobs"),
        ("completions", {"logprobs": 1}, "logprobs"),
    ],
)
async def test_what_a_script_cannot_do_is_refused_and_never_passed_over(
    kind: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(NotSupported) as caught:
        await prepared(ScriptedEngine(), kind, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_without_a_tokenizer_it_serves_tokens_alone(kind: Any) -> None:
    engine = ScriptedEngine(Script(tokenizer=False))
    assert engine.info.kinds == ("tokens",)
    with pytest.raises(NotSupported):
        await engine.prepare(parse(kind, BODIES[kind]))
    assert [delta.text for delta in await played(engine)] == [""] * 16


def test_a_script_is_read_from_a_file(tmp_path: Path) -> None:
    toml = tmp_path / "script.toml"
    toml.write_text(
        'tokenizer = false\n[words]\n300 = "Par"\n301 = [195]\n'
        '[[rules]]\nuser = "a"\nper_delta = 2\n[rules.fault]\nat = 3\ndo = "hang"\n'
    )
    made = Script(
        tokenizer=False,
        words={300: "Par", 301: [195]},
        rules=[Rule(user="a", per_delta=2, fault=Fault(at=3, do="hang"))],
    )
    assert load(toml) == made
    json = tmp_path / "script.json"
    json.write_text(
        '{"tokenizer":false,"words":{"300":"Par","301":[195]},"rules":[{"user":"a","per_delta":2,'
        '"fault":{"at":3,"do":"hang"}}]}'
    )
    assert load(json) == made


@pytest.mark.parametrize(
    "text",
    [
        "rules = 1",
        "[[rules]]\nusers = 'a'",
        "[[rules]]\nper_delta = 0",
        "[[rules]]\ntext = 'a'\ntokens = [1]",
        "[[rules]]\ncount = [5, 5]",
        "[[rules]]\n[rules.fault]\ncode = 'no_such_code'",
        "not toml",
        "\xff",
    ],
)
def test_a_file_that_is_no_script_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "script.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(EngineFailed, match=r"script\.toml"):
        load(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"none\.toml"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(("do", "by"), [("crash", signal.SIGABRT), ("kill", signal.SIGKILL)])
def test_a_leg_takes_its_process_down_if_scripted_so(do: str, by: signal.Signals) -> None:
    program = f"""
import asyncio
from inferbus.workers.engine.interface import Leg
from inferbus.workers.engine.scripted import Fault, Rule, Script, ScriptedEngine

async def main():
    engine = ScriptedEngine(Script(rules=[Rule(fault=Fault(do={do!r}, at=2))]))
    async for delta in engine.generate(Leg(rid="0" * 32, index=0, token_ids=[7], sampling={{}})):
        print(*delta.token_ids, flush=True)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -by
    assert done.stdout.split() == ["8", "9"]
