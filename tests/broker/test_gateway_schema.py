"""Bodies that the schema of the gateway's API allows, and bodies that it does not, made by schemathesis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import schemathesis
from schemathesis import GenerationMode, checks
from schemathesis.core.result import Ok

from inferbus.workers.stack.server import NatsServer
from tests.support.fleet import fleet
from tests.support.gateway import gateway
from tests.support.openai_schema import document

TALKER, VECTORS = "talker", "vectors"
SCRIPTS = {TALKER: 'context_length = 4096\n[[rules]]\ntext = "Paris."', VECTORS: "embedding = 4"}
SCHEMA = schemathesis.openapi.from_dict(document(TALKER, VECTORS))
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations() if isinstance(each, Ok)}
# Without a body there is none that could be wrong.
ASKED = [
    (label, mode)
    for label, operation in OPERATIONS.items()
    for mode in GenerationMode
    if mode.is_positive or operation.body
]
EXAMPLES = 10

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("schema")
    async with (
        NatsServer(folder / "nats", sync_interval=None) as server,
        fleet(server, Path(folder), model=TALKER) as talker,
        fleet(server, Path(folder), model=VECTORS) as vectors,
    ):
        await talker.start("both", SCRIPTS[TALKER], served_model=TALKER)
        await vectors.start("both", SCRIPTS[VECTORS], served_model=VECTORS)
        async with gateway(server.url) as found:
            yield found


@pytest.mark.parametrize(("label", "mode"), ASKED)
async def test_every_body_is_answered_or_refused_as_the_schema_says(
    url: str, label: str, mode: GenerationMode
) -> None:
    operation = OPERATIONS[label]
    cases = operation.as_strategy(generation_mode=mode)
    wanted = [checks.not_a_server_error, checks.status_code_conformance, checks.response_schema_conformance]
    if mode.is_positive:
        wanted.append(checks.positive_data_acceptance)

    @hypothesis.settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def ask(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=url, checks=wanted)

    await asyncio.to_thread(ask)
