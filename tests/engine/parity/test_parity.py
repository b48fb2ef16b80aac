"""What comes over NATS is what SGLang's own server answers, but for the differences in `wanted.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import pytest
import pytest_asyncio
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from tests.engine.parity.asking import ask_bus, ask_http, ask_job
from tests.engine.parity.cases import CASES, Case
from tests.engine.parity.conftest import Sides
from tests.engine.parity.told import Told, assembled, differences
from tests.engine.parity.types import problems_of
from tests.engine.parity.wanted import WANTED, Wanted, wanted_by

pytestmark = pytest.mark.asyncio(loop_scope="package")

AT_ONCE: Final = 4
"""Cases that are asked at the same time."""

FORMS: Final = ("whole", "stream")
Answers = dict[tuple[str, str, str], tuple[Told, Told]]
"""What SGLang's server told and what inferbus did, by case, layout and form."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def answers(sides: Sides) -> Answers:
    """Asks everybody everything."""
    found: Answers = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(case: Case) -> None:
        async with places:
            for form in FORMS:
                stream = form == "stream"
                asked = [ask_http(sides.http, case, stream=stream), ask_bus(sides.both, case, stream=stream)]
                if case.pair:
                    asked.append(ask_bus(sides.pair, case, stream=stream))
                http, *told = await asyncio.gather(*asked)
                for layout, bus in zip(("both", "pair"), told, strict=False):
                    found[case.name, layout, form] = http, bus
            if case.durable:
                for form, bus in (await ask_job(sides.both, case)).items():
                    found[case.name, "job", form] = found[case.name, "both", form][0], bus

    await asyncio.gather(*map(ask, CASES))
    return found


def _layouts(case: Case) -> Iterable[str]:
    return ("both", *(("pair",) if case.pair else ()), *(("job",) if case.durable else ()))


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(case, layout, id=f"{layout}-{case.name}") for case in CASES for layout in _layouts(case)],
)
async def test_an_answer_is_sglangs_own_but_for_what_is_wanted(
    answers: Answers, case: Case, layout: str
) -> None:
    unwanted = [
        (form, difference)
        for form in FORMS
        for difference in differences(*answers[case.name, layout, form])
        if wanted_by(case.name, difference) is None
    ]
    assert unwanted == []


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.what)
async def test_a_difference_that_is_wanted_is_there(answers: Answers, wanted: Wanted) -> None:
    seen = {
        name
        for (name, _, _), (http, bus) in answers.items()
        if any(wanted_by(name, difference) is wanted for difference in differences(http, bus))
    }
    assert seen
    assert set(wanted.cases) <= seen


@pytest.mark.parametrize("layout", ["both", "pair", "job"])
async def test_every_message_has_the_types_of_the_openai_package(answers: Answers, layout: str) -> None:
    problems = [
        (name, form, problem)
        for (name, where, form), (_, bus) in answers.items()
        if where == layout
        for problem in problems_of(bus)
    ]
    assert problems == []


@pytest.mark.parametrize("layout", ["both", "pair", "job"])
async def test_the_openai_packages_stream_helper_puts_every_chat_together(
    answers: Answers, layout: str
) -> None:
    streams = [
        bus.chunks
        for (name, where, form), (_, bus) in answers.items()
        if where == layout and form == "stream" and name.startswith("chat") and bus.chunks is not None
    ]
    assert streams
    for chunks in streams:
        state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        told = assembled(chunks)["choices"]
        read = state.current_completion_snapshot.choices
        assert [choice.message.content or "" for choice in read] == [each.get("content", "") for each in told]
        assert [choice.finish_reason for choice in read] == [each["finish_reason"] for each in told]
