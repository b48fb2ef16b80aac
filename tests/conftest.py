"""What holds for every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import structlog

from tests.support import engines as shared
from tests.support.remote_engine import RemoteEngine
from tests.support.sglang_server import SGLangServer


@pytest.fixture(scope="session", autouse=True)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RemoteEngine]]:
    """Starting from the first test on, where a later one needs them: see `tests.support.engines`."""
    started = shared.start(tmp_path_factory.mktemp("engines")) if shared.needed(request.session.items) else {}
    yield started
    shared.stop(started)


@pytest.fixture(scope="session", autouse=True)
def starting_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangServer | None]:
    """SGLang's own server, likewise."""
    wanted = shared.needed(request.session.items, "sglang_server")
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
