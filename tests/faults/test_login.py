"""A worker whose login is refused while it works."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from inferbus.workers.stack.server import NatsServer
from tests.support.asking import Answer, result
from tests.support.eventually import eventually
from tests.support.fleet import Fleet, fleet

pytestmark = pytest.mark.faults

IMPATIENT = (
    "from inferbus.workers.bus.connection import bus, dial\nbus.REFUSED_FOR, dial.RECONNECT_LAST = 1.0, 0.1\n"
)
SETTLED = 25
"""Chunks after which a job has run for more than a second: the server has its delivery on disk by then."""
SLOW = "[[rules]]\nlength = 100\ndelay = 0.05\n"


class Logins:
    """A server with a user that its clients are without asking, and one for a worker."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "users.conf"
        self._write("right")
        self.server = NatsServer(
            folder / "nats", sync_interval=None, extra="no_auth_user: anybody\ninclude ../users.conf"
        )

    def refuse(self) -> None:
        """Has the server refuse the worker's login from now on."""
        self._write("other")
        self.server.child.send_signal(signal.SIGHUP)

    def accept(self) -> None:
        """Has the server accept it again."""
        self._write("right")
        self.server.child.send_signal(signal.SIGHUP)

    def _write(self, password: str) -> None:
        users = f"[{{user: anybody, password: any}}, {{user: worker, password: {password}}}]"
        self._file.write_text(f"authorization {{ users: {users} }}\n")


@pytest.fixture
async def logins(tmp_path: Path) -> AsyncIterator[Logins]:
    found = Logins(tmp_path)
    async with found.server:
        yield found


@pytest.fixture
async def workers(logins: Logins, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet(logins.server, tmp_path) as found:
        yield found


@pytest.fixture
async def nc(logins: Logins) -> AsyncIterator[Client]:
    client = await nats.connect(logins.server.url)
    yield client
    await client.close()


async def test_a_worker_whose_login_stays_refused_drains_and_its_job_goes_on_elsewhere(
    logins: Logins, workers: Fleet, nc: Client
) -> None:
    worker = await workers.start(
        "both", SLOW, before=IMPATIENT, grace=1, nats_user="worker", nats_password="right"
    )
    stream = await Answer.on(nc, "infer.stream.acme.j1")
    await nc.jetstream().publish(
        "infer.jobs.scripted.batch.acme.tokens", b'{"token_ids":[1]}', headers={"Nats-Msg-Id": "j1"}
    )
    await eventually(lambda: len(stream.chunks) > SETTLED)
    logins.refuse()
    assert await worker.wait() == 3
    assert [each["busy"] for each in workers.events(worker, "worker.draining")] == [1]
    await workers.start("both", "[[rules]]\nlength = 3\n")
    found = await result(nc, "j1")
    assert (found.headers["Infer-Status"], found.headers["Infer-Attempt"]) == ("ok", "2")


async def test_a_login_that_is_accepted_while_its_worker_drains_lets_it_finish(
    logins: Logins, workers: Fleet, nc: Client
) -> None:
    worker = await workers.start(
        "both", SLOW, before=IMPATIENT, grace=60, ack_wait=30, nats_user="worker", nats_password="right"
    )
    live = await Answer.on(nc, nc.new_inbox())
    await nc.publish("infer.request.scripted.tokens", b'{"token_ids":[1]}', reply=live.subject)
    await nc.jetstream().publish(
        "infer.jobs.scripted.batch.acme.tokens", b'{"token_ids":[1]}', headers={"Nats-Msg-Id": "j1"}
    )
    await eventually(lambda: len(live.chunks) > SETTLED)
    logins.refuse()
    await eventually(lambda: workers.events(worker, "worker.draining"))
    logins.accept()
    assert await live.ended() == "ok"
    assert len(live.chunks) == 100
    assert await worker.wait() == 3
    found = await result(nc, "j1")
    assert (found.headers["Infer-Status"], found.headers["Infer-Attempt"]) == ("ok", "1")
