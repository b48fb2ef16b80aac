"""What `/livez` and `/readyz` answer from a worker's start to its end."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from inferbus.workers.config import WorkerSettings
from inferbus.workers.observe.endpoint import Endpoint, serving
from inferbus.workers.observe.health import Health
from tests.support.probes import probe


def fresh(stalled: float = 60.0) -> Health:
    return Health(lambda: "loading weights", stalled=stalled)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_worker_that_loads_is_alive_and_says_what_it_does() -> None:
    health = fresh()
    assert health.dead() is None
    assert health.unready() == "starting: loading weights"


async def test_a_worker_is_ready_while_it_serves_and_nats_is_connected() -> None:
    health, connected = fresh(), True
    async with health.watched():
        assert health.unready() == "starting: loading weights"
        health.serving(lambda: connected)
        assert health.unready() is None
        connected = False
        assert health.unready() == "NATS is not connected"
        connected = True
        health.draining()
        assert health.unready() == "draining"
        assert health.dead() is None
    assert health.unready() == "draining"


async def test_an_engine_that_answers_late_is_not_ready_and_one_that_is_lost_is_dead() -> None:
    health = fresh()
    async with health.watched():
        health.serving(lambda: True)
        health.engine_answered(False)
        assert (health.dead(), health.unready()) == (None, "the engine does not answer")
        health.engine_answered(True)
        assert health.unready() is None
        health.engine_lost()
        assert health.dead() == health.unready() == "the engine is lost"


async def test_an_event_loop_that_stands_still_is_reported_from_another_thread() -> None:
    health, told = fresh(stalled=0.05), []

    def ask() -> None:
        while (reason := health.dead()) is None:
            time.sleep(0.01)
        told.append(reason)

    async with health.watched():
        health.serving(lambda: True)
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(30)  # The loop does nothing else meanwhile.
        assert told
        assert told[0].startswith("the event loop has stood still for ")


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "0.0.0.0", "localhost"])
async def test_the_probes_answer_over_http_before_there_are_metrics(
    host: str,
) -> None:
    health, port = fresh(), free_port()
    settings = WorkerSettings(metrics_port=port, metrics_host=host)
    async with serving(settings, health) as endpoint:
        assert isinstance(endpoint, Endpoint)
        assert await probe(port, "/livez") == (200, "ok")
        assert await probe(port, "/readyz") == (503, "starting: loading weights")
        assert await probe(port, "/metrics") == (503, "starting: loading weights")
        async with health.watched():
            health.serving(lambda: True)
            assert await probe(port, "/readyz") == (200, "ok")
