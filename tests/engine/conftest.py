"""Real engines for the tests of this folder: started once, all at the same time, each in its own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.fleet import Role
from tests.support.remote_engine import RemoteEngine
from workers.stack import models

# Starting takes minutes where others use the machine too, and pytest counts it as the first test's time.
START_SECONDS = 900

FLAGS = ("--max-total-tokens", "8192", "--max-running-requests", "32", "--random-seed", "1")
ROLES: dict[str, Role] = {"both": "both", "prefill": "prefill", "decode": "decode", "bare": "both"}


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
def fleet(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RemoteEngine]]:
    """`both`, a pair of `prefill` and `decode`, and `bare`: one without a tokenizer.

    `INFERBUS_TEST_ENGINES=FOLDER` leaves them running for the next test run, which finds them there:
    for work on the tests themselves.
    """
    kept = os.environ.get("INFERBUS_TEST_ENGINES")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("engines")
    engines: dict[str, RemoteEngine] = {}
    try:
        for name, role in ROLES.items():
            more = ("--skip-tokenizer-init",) if name == "bare" else ()
            engines[name] = RemoteEngine(role, folder / name, ["--model-path", model, *FLAGS, *more])
        for engine in engines.values():
            engine.wait_ready()
        yield engines
    finally:
        for engine in engines.values() if not kept else ():
            engine.stop()


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
def tokens_only(fleet: dict[str, RemoteEngine]) -> RemoteEngine:
    """An engine without a tokenizer."""
    return fleet["bare"]
