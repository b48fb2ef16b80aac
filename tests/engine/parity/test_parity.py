"""What comes over NATS is what SGLang's own server answers, but for the differences in `wanted.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import pytest
import pytest_asyncio

from tests.engine.parity.asking import ask_bus, ask_http, ask_job
from tests.engine.parity.cases import CASES, Case
from tests.engine.parity.conftest import Sides
from tests.engine.parity.told import Difference, differences
from tests.engine.parity.wanted import WANTED, Wanted, wanted_by

pytestmark = pytest.mark.asyncio(loop_scope="package")

AT_ONCE: Final = 4
"""Cases that are asked at the same time."""

FORMS: Final = ("whole", "stream")
Found = dict[tuple[str, str, str], list[Difference]]
"""The differences by case, layout and form."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def found(sides: Sides) -> Found:
    """Asks everybody everything."""
    answers: Found = {}
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(case: Case) -> None:
        async with places:
            for form in FORMS:
                stream = form == "stream"
                http, both = await asyncio.gather(
                    ask_http(sides.http, case, stream=stream), ask_bus(sides.both, case, stream=stream)
                )
                answers[case.name, "both", form] = differences(http, both)
                if case.pair:
                    pair = await ask_bus(sides.pair, case, stream=stream)
                    answers[case.name, "pair", form] = differences(http, pair)
            if case.durable:
                chunks, result = await ask_job(sides.both, case)
                http = await ask_http(sides.http, case, stream=True)
                answers[case.name, "job", "stream"] = differences(http, chunks)
                http = await ask_http(sides.http, case, stream=False)
                answers[case.name, "job", "whole"] = differences(http, result)

    await asyncio.gather(*map(ask, CASES))
    return answers


def _layouts(case: Case) -> Iterable[str]:
    return ("both", *(("pair",) if case.pair else ()), *(("job",) if case.durable else ()))


@pytest.mark.parametrize(
    ("case", "layout"),
    [pytest.param(case, layout, id=f"{layout}-{case.name}") for case in CASES for layout in _layouts(case)],
)
async def test_an_answer_is_sglangs_own_but_for_what_is_wanted(found: Found, case: Case, layout: str) -> None:
    unwanted = [
        (form, difference)
        for form in FORMS
        for difference in found[case.name, layout, form]
        if wanted_by(case.name, difference) is None
    ]
    assert unwanted == []


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: wanted.what)
async def test_a_difference_that_is_wanted_is_there(found: Found, wanted: Wanted) -> None:
    seen = {
        name
        for (name, _, _), differing in found.items()
        for difference in differing
        if wanted_by(name, difference) is wanted
    }
    assert seen
    assert set(wanted.cases) <= seen
