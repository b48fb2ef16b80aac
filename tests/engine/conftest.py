"""Real engines for the tests of this folder: started with the session, see `tests.support.engines`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferbus.workers.stack import models
from tests.support.engines import start, start_server, stop
from tests.support.remote_engine import RemoteEngine
from tests.support.sglang_server import SGLangServer

# Starting takes minutes where others use the machine too, and pytest counts it as the first test's time.
START_SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "fleet" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(START_SECONDS))


@pytest.fixture(scope="session")
def model() -> str:
    """A two-layer random Llama with a real tokenizer."""
    return str(models.ensure("tiny"))


@pytest.fixture(scope="package")
def fleet(
    engines: dict[str, RemoteEngine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RemoteEngine]]:
    """The engines, ready; they end with the last test of this folder."""
    engines = engines or start(tmp_path_factory.mktemp("engines"))
    try:
        for engine in engines.values():
            engine.wait_ready()
        yield engines
    finally:
        stop(engines)


@pytest.fixture(scope="package")
def sglang_server(
    starting_server: SGLangServer | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer]:
    """SGLang's own server, ready; it ends with the last test of this folder."""
    starting_server = starting_server or start_server(tmp_path_factory.mktemp("sglang"))
    try:
        starting_server.wait_ready()
        yield starting_server
    finally:
        stop({"server": starting_server})


@pytest.fixture
def engine(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """One aggregated engine."""
    return fleet["both"]


@pytest.fixture
def prefill(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """The prefill engine of the pair."""
    return fleet["prefill"]


@pytest.fixture
def decode(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """The decode engine of the pair."""
    return fleet["decode"]


@pytest.fixture
def embeds(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """An embedding engine."""
    return fleet["embeds"]


@pytest.fixture
def tokens_only(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """An engine without a tokenizer."""
    return fleet["bare"]
