"""Real workers with scripted engines, and what Prometheus gets from them over HTTP."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from inferbus.workers.client import Client
from inferbus.workers.stack.processes import Child
from inferbus.workers.stack.server import NatsServer
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet, stop
from tests.support.forwarder import Forwarder
from tests.support.probes import probe
from tests.support.prometheus import Scrape, scrape

PREFILL = """
[[rules]]
transfer = { seconds = 0.004, bytes = 163840 }
"""
REQUEST = "infer.request.scripted.tokens"
BODY = json.dumps({"token_ids": [1, 2], "max_tokens": 4, "stream": True}).encode()


def port(found: Fleet, worker: Child) -> int:
    """Where a worker that was to take a free port serves its metrics."""
    [event] = found.events(worker, "metrics.serving")
    number: int = event["port"]
    return number


async def test_both_workers_of_a_pair_count_a_request_that_went_through_them(
    server: NatsServer, tmp_path: Path
) -> None:
    async with fleet(server, tmp_path) as found:
        prefill = await found.start("prefill", PREFILL, metrics_port=0, metrics_host="127.0.0.1")
        decode = await found.start("decode", metrics_port=0, metrics_host="127.0.0.1")
        inbox = found.bus.inbox(lambda message: None)
        found.bus.send(REQUEST, BODY, reply=inbox.subject)

        async def counted() -> Scrape | None:
            told = await scrape(port(found, decode))
            return told if told("inferbus_requests_total") else None

        told = await eventually(counted, what="the decode worker counts the request")
        of = {"role": "decode", "model": "scripted", "kind": "tokens", "cls": "live"}
        assert told("inferbus_requests_total", **of, status="ok", code="") == 1
        assert told("inferbus_request_seconds_count", **of) == 1
        assert told("inferbus_first_chunk_seconds_count", **of) == 1
        assert told("inferbus_chunks_total", **of) == 4
        assert told("inferbus_slots") == 8
        assert told("inferbus_nats_connected") == 1
        assert told("inferbus_messages_sent_total") >= 4
        assert told("inferbus_stream_max_bytes", stream="INFER_RESULTS") == 1024**3
        assert "process_resident_memory_bytes" in told.names
        told = await scrape(port(found, prefill))
        assert told("inferbus_handoffs_total", role="prefill", status="ok") == 1
        assert told("inferbus_kv_transfer_seconds_count") == 1
        assert told("inferbus_kv_transfer_seconds_sum") == pytest.approx(0.004)
        assert told("inferbus_kv_transfer_bytes_sum") == 163_840
        assert await stop(decode) == await stop(prefill) == 0


async def test_a_worker_s_probes_follow_its_connection_and_its_drain(
    server: NatsServer, tmp_path: Path
) -> None:
    endless = "[[rules]]\nlength = 1000\ndelay = 0.05"
    forwarder = Forwarder("127.0.0.2", server.port)
    await forwarder.lead_to("127.0.0.1")
    url = f"nats://{forwarder.host}:{forwarder.port}"
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        worker = await found.start(
            "both", endless, metrics_port=0, metrics_host="127.0.0.1", nats_url=url, grace=60
        )
        number = port(found, worker)

        async def answers(path: str, wanted: tuple[int, str]) -> None:
            async def same() -> bool:
                return await probe(number, path) == wanted

            await eventually(same, what=f"{path} answers {wanted}")

        await answers("/readyz", (200, "ok"))
        assert await probe(number, "/livez") == (200, "ok")
        await forwarder.close()
        await answers("/readyz", (503, "NATS is not connected"))
        assert await probe(number, "/livez") == (200, "ok")
        await forwarder.lead_to("127.0.0.1")
        await answers("/readyz", (200, "ok"))
        answer = client.tokens("scripted", [1, 2], max_tokens=1000)
        await anext(aiter(answer))
        worker.send_signal(signal.SIGTERM)
        await answers("/readyz", (503, "draining"))
        assert await probe(number, "/livez") == (200, "ok")
        await answer.cancel()
        assert await worker.wait() == 0
        await forwarder.close()


async def test_a_worker_serves_no_metrics_unless_it_is_asked_to(server: NatsServer, tmp_path: Path) -> None:
    async with fleet(server, tmp_path) as found:
        worker = await found.start("both")
        assert found.events(worker, "metrics.serving") == []
        assert await stop(worker, number=signal.SIGTERM) == 0


async def test_a_worker_whose_metrics_port_is_taken_ends_with_a_line_that_names_the_setting(
    server: NatsServer, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = taken.getsockname()[1]
        async with fleet(server, tmp_path) as found:
            worker = await found.start(ready=False, metrics_port=busy, metrics_host="127.0.0.1")
            assert await worker.wait() == 1
            [event] = found.events(worker, "worker.failed")
            assert event["reason"].startswith(f"--metrics-port: cannot listen on 127.0.0.1:{busy}: ")
            assert "exception" not in event
            assert "Traceback" not in worker.log.read_text()
