"""Traces of real workers with scripted engines, as a collector gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from inferbus.schemas.errors import InferbusError
from inferbus.workers.client import Client
from inferbus.workers.config import BusSettings
from inferbus.workers.stack.server import NatsServer
from tests.support.collector import Received, TraceCollector, collecting
from tests.support.eventually import eventually
from tests.support.fleet import MODEL, Fleet, fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL = """
[[rules]]
user = "bad"
[rules.fault]
do = "fail"
code = "engine_failed"
[[rules]]
transfer = { seconds = 0.25, bytes = 163840 }
"""
ROOT = f"tokens {MODEL}"


class Traced:
    """A pair of workers that export traces, and a client."""

    def __init__(self, collector: TraceCollector, client: Client, found: Fleet) -> None:
        self.collector = collector
        self.client = client
        self.fleet = found

    async def root(self, job: str, *names: str) -> Received:
        """The span of the attempt at a job, once it and spans of these names below it have arrived."""

        def arrived() -> Received | None:
            for span in self.collector.named(ROOT):
                if span.attributes["inferbus.job"] == job and set(names) <= set(self.collector.below(span)):
                    return span
            return None

        found: Received | None = await eventually(arrived, what=f"the spans of {job}")
        assert found is not None
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    directory = tmp_path_factory.mktemp("traces")
    with collecting() as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        async with (
            NatsServer(directory / "nats", sync_interval=None) as server,
            fleet(server, directory) as found,
            Client.connect(BusSettings(urls=(server.url,))) as client,
        ):
            await found.start("prefill", PREFILL, env=env, tracing="true", max_attempts=1)
            await found.start("decode", env=env, tracing="true", max_attempts=1)
            yield Traced(collector, client, found)


@contextmanager
def own_span() -> Iterator[str]:
    """A span of the application's, as its id."""
    with TracerProvider().get_tracer("application").start_as_current_span("ask") as span:
        yield trace.format_span_id(span.get_span_context().span_id)


async def test_one_trace_leads_from_a_live_caller_through_both_workers(traced: Traced) -> None:
    with own_span() as caller:
        await traced.client.tokens(MODEL, [1, 2], max_tokens=4, job_id="live").answer()
    root = await traced.root("live", "prepare", "admission", "prefill", "decode", "publish")
    below = traced.collector.below
    assert (root.service, root.parent, root.links) == ("inferbus-decode", caller, [])
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert root.attributes["inferbus.status"] == "ok"
    assert 0 < root.attributes["gen_ai.latency.time_to_first_token"] <= root.attributes["gen_ai.latency.e2e"]

    def at_prefill() -> Received | None:
        found = below(below(root)["prefill"]).get("prefill")
        return found if found and {"admission", "compute", "transfer"} <= set(below(found)) else None

    prefill = await eventually(at_prefill, what="the prefill worker's spans")
    assert prefill.service == "inferbus-prefill"
    assert below(prefill)["transfer"].seconds == pytest.approx(0.25, abs=0.001)
    assert below(prefill)["transfer"].attributes["inferbus.bytes"] == 163_840
    assert {each.trace for each in below(prefill).values()} == {root.trace}
    assert below(root)["decode"].begun >= below(root)["prefill"].begun


async def test_a_job_s_trace_is_its_own_with_a_link_to_its_submitter(traced: Traced) -> None:
    with own_span() as submitter:
        job = await traced.client.submit("tokens", MODEL, {"token_ids": [1, 2], "max_tokens": 2}, job_id="j1")
    await traced.client.result(job)
    root = await traced.root("j1", "queue", "prefill", "decode", "publish")
    assert (root.parent, root.links) == ("", [submitter])
    assert root.begun <= traced.collector.below(root)["queue"].begun + 0.001
    assert root.attributes["inferbus.class"] == "batch"


async def test_a_request_that_fails_is_marked_with_its_code_and_not_its_message(traced: Traced) -> None:
    with pytest.raises(InferbusError):
        await traced.client.tokens(MODEL, [1], user="bad", job_id="bad").answer()
    root = await traced.root("bad", "prefill")
    assert root.error == root.attributes["error.type"] == "prefill_failed"
    assert not any(" " in str(value) for value in root.attributes.values())


@pytest.mark.parametrize("name", ["traceparent", "Traceparent"])
async def test_any_nats_client_may_name_its_span_in_a_header(traced: Traced, name: str) -> None:
    bus = traced.fleet.bus
    inbox = bus.inbox(lambda message: None)
    given = {name: f"00-{'ab' * 16}-{'cd' * 8}-01", "Infer-Job-Id": name}
    bus.send(f"infer.request.{MODEL}.tokens", b'{"token_ids":[1],"max_tokens":1}', given, reply=inbox.subject)
    root = await traced.root(name)
    assert (root.trace, root.parent) == ("ab" * 16, "cd" * 8)


async def test_a_header_that_is_no_trace_context_begins_a_trace(traced: Traced) -> None:
    await traced.client.tokens(MODEL, [1], max_tokens=1, job_id="odd", traceparent="00-x").answer()
    assert (await traced.root("odd")).parent == ""


async def test_a_worker_ends_in_time_where_no_collector_answers(server: NatsServer, tmp_path: Path) -> None:
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
        worker = await found.start("both", env=env, tracing="true")
        await client.tokens(MODEL, [1], max_tokens=1).answer()
        worker.send_signal(15)
        assert await worker.wait() == 0


async def test_a_worker_needs_no_opentelemetry_where_tracing_is_off(
    server: NatsServer, tmp_path: Path
) -> None:
    absent = "import sys\nsys.modules['opentelemetry'] = None\n"
    async with fleet(server, tmp_path) as found, Client.connect(server.url) as client:
        await found.start("prefill", PREFILL, before=absent)
        await found.start("decode", before=absent)
        context = f"00-{'ab' * 16}-{'cd' * 8}-01"
        await client.tokens(MODEL, [1], max_tokens=2, traceparent=context).answer()
