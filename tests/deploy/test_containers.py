"""The NATS server as compose.yaml runs it, in a real container."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client

from tests.support.containers import image_missing, nats_container, nats_image

pytestmark = pytest.mark.skipif(
    image_missing(nats_image()) is not None, reason=f"needs Docker: {image_missing(nats_image())}"
)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with nats_container() as url:
        connection = await nats.connect(url)
        try:
            yield connection
        finally:
            with contextlib.suppress(nats.errors.Error):
                await connection.close()


async def test_a_job_is_stored_and_comes_back(client: Client) -> None:
    jetstream = client.jetstream()
    await jetstream.add_stream(name="JOBS", subjects=["jobs.>"])
    stored = await jetstream.publish("jobs.one", b"work", timeout=5)
    assert (stored.stream, stored.seq) == ("JOBS", 1)
    [job] = await (await jetstream.pull_subscribe("jobs.>", durable="worker")).fetch(1, timeout=5)
    assert job.data == b"work"
    await job.ack_sync(timeout=5)


async def test_the_server_is_new_enough_and_takes_large_messages(client: Client) -> None:
    assert client.connected_server_version.major == 2
    assert client.connected_server_version.minor >= 12
    assert client.max_payload == 8 * 1024 * 1024
