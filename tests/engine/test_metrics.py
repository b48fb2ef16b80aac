"""A pair of workers with real engines, from one request to what Prometheus gets to see of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.handoffs import Logs, token_bytes
from inferbus.workers.client import Client
from inferbus.workers.stack.local import LocalStack
from tests.engine.conftest import START_SECONDS
from tests.support.engines import FLAGS
from tests.support.prometheus import scrape
from tests.support.remote_engine import ENVIRONMENT

PROMPT = list(range(100, 175))
PORTS = {"INFERBUS_METRICS_PORT": "0", "INFERBUS_METRICS_HOST": "127.0.0.1"}


def events(log: Path, name: str) -> list[dict[str, Any]]:
    """What a worker logged under one event name."""
    lines = (line for line in log.read_text().splitlines() if line.startswith("{"))
    return [event for event in map(json.loads, lines) if event.get("event") == name]


@pytest.mark.engine
@pytest.mark.timeout(START_SECONDS)
async def test_one_port_of_a_prefill_worker_has_the_transfer_of_a_request_and_sglang_s_own_metrics(
    model: str, tmp_path: Path
) -> None:
    async with (
        LocalStack(
            model,
            model="tiny",
            flags=[*FLAGS, "--enable-metrics"],
            env=ENVIRONMENT | PORTS,
            directory=tmp_path,
        ) as stack,
        Client.connect(stack.url) as client,
    ):
        logs = {name.partition("-")[0]: tmp_path / f"{name}.log" for name in stack.workers}
        reader = Logs({"prefill": logs["prefill"]})
        [signature] = [info.signature for info in await client.workers() if info.role == "prefill"]
        token = token_bytes(signature)
        assert token
        async for _ in client.tokens("tiny", PROMPT, max_tokens=4, ignore_eos=True):
            pass
        [done] = events(logs["prefill"], "handoff.done")
        assert done["seconds"] > done["transfer_seconds"] > 0
        assert done["transfer_bytes"] == len(PROMPT) * token
        read = reader.handoffs(len(PROMPT), token)
        assert read.transfer_seconds is not None
        assert read.transfer_gbytes is not None
        assert read.transfer_gbytes["p50"] > 0
        ports = {role: events(log, "metrics.serving")[0]["port"] for role, log in logs.items()}
        prefill, decode = await scrape(ports["prefill"]), await scrape(ports["decode"])
        assert prefill("inferbus_kv_transfer_seconds_count", role="prefill", model="tiny") == 1
        assert prefill("inferbus_kv_transfer_seconds_sum") == pytest.approx(done["transfer_seconds"])
        assert prefill("inferbus_kv_transfer_bytes_sum") == done["transfer_bytes"]
        assert prefill("inferbus_handoffs_total", status="ok") == 1
        assert prefill("inferbus_nats_connected") == 1
        assert decode("inferbus_requests_total", kind="tokens", status="ok") == 1
        # SGLang counts tokens in the worker's process, and the rest in the scheduler's: this transfer, too.
        assert prefill("sglang:kv_transfer_latency_ms_sum") == pytest.approx(done["transfer_seconds"] * 1e3)
        for told in (prefill, decode):
            assert told("sglang:prompt_tokens_total") >= len(PROMPT)
            assert told("sglang:max_total_num_tokens") == 8192
