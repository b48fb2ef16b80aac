"""What holds for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support import engines as shared
from tests.support.remote_engine import RemoteEngine
from tests.support.sglang_server import SGLangServer

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

LANE: Final = "PYTEST_XDIST_WORKER" in os.environ
"""Whether this process runs a share of the tests (`pytest -n 2`), and another one the rest.

It cannot know which ones: what several tests share starts with the first that needs it."""

settings.register_profile("inferbus", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("inferbus")
# A busy machine fails no property: how long one example or its making takes is asserted nowhere.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Two lanes: the tests that share engines, and file by file the others."""
    from tests.support.lanes import Lanes

    return Lanes(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest piece begins first where there are lanes, so that none waits for it in the end."""
    if LANE:
        items.sort(key=lambda item: not item.nodeid.startswith("tests/engine/"))


@pytest.fixture(scope="session", autouse=True)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RemoteEngine]]:
    """Starting from the first test on, where a later one needs them: see `tests.support.engines`."""
    wanted = not LANE and shared.needed(request.session.items)
    started = shared.start(tmp_path_factory.mktemp("engines")) if wanted else {}
    yield started
    shared.stop(started)


@pytest.fixture(scope="session", autouse=True)
def starting_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer | None]:
    """SGLang's own server, likewise."""
    wanted = not LANE and shared.needed(request.session.items, "sglang_server")
    started = shared.start_server(tmp_path_factory.mktemp("sglang")) if wanted else None
    yield started
    if started is not None:
        shared.stop({"server": started})


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell has what it runs in the background ignore it, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_of_its_own() -> Iterator[None]:
    """Commands configure logging for their process; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
