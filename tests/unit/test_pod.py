"""A worker's own pod, against an HTTPS server that stands where Kubernetes's API server would."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from inferbus.workers.roles import pod
from inferbus.workers.roles.pod import ANNOTATION, Pod
from tests.support.eventually import eventually

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


class ApiServer(HTTPServer):
    """Keeps what it is sent; `status` is its answer."""

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate / "ca.crt", certificate / "key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.received: list[tuple[str, str | None, str | None, Any]] = []
        self.status = 200

    @property
    def env(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.server_port)}

    @property
    def costs(self) -> list[str]:
        return [body["metadata"]["annotations"][ANNOTATION] for *_, body in self.received]


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = self.headers
        self.server.received.append((self.path, headers["Authorization"], headers["Content-Type"], body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Kubernetes mounts in a container."""
    folder = tmp_path_factory.mktemp("serviceaccount")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    names = ["-keyout", "key", "-out", "ca.crt", "-subj", "/CN=kubernetes", "-addext"]
    subprocess.run(
        [*command, *names, "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True, capture_output=True
    )
    (folder / "namespace").write_text("llm")
    (folder / "token").write_text("first\n")
    return folder


@pytest.fixture
def server(account: Path) -> Iterator[ApiServer]:
    running = ApiServer(account)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def test_the_cost_is_an_annotation_of_the_workers_own_pod(account: Path, server: ApiServer) -> None:
    own = Pod("decode-7f-x2x", account=account, env=server.env)
    own.write(3)
    # Kubernetes replaces the token before it expires.
    (account / "token").write_text("second\n")
    own.write(4)
    path, kind = "/api/v1/namespaces/llm/pods/decode-7f-x2x", "application/merge-patch+json"
    assert server.received == [
        (path, "Bearer first", kind, {"metadata": {"annotations": {ANNOTATION: "3"}}}),
        (path, "Bearer second", kind, {"metadata": {"annotations": {ANNOTATION: "4"}}}),
    ]


async def test_the_api_server_is_asked_only_when_the_number_of_busy_slots_has_changed(
    account: Path, server: ApiServer
) -> None:
    looks = iter([0, 0, 5, 5, 5, 2])
    last = asyncio.Event()

    def busy() -> int:
        if (value := next(looks, None)) is None:
            last.set()
            return 2
        return value

    following = asyncio.create_task(Pod("d", account=account, env=server.env).follow(busy, interval=0))
    await last.wait()
    following.cancel()
    assert server.costs == ["0", "5", "2"]


async def test_a_refusal_is_logged_once_and_tried_again(account: Path, server: ApiServer) -> None:
    server.status = 403
    with capture_logs() as logs:
        own = Pod("d", account=account, env=server.env)
        following = asyncio.create_task(own.follow(lambda: 1, interval=0))
        await eventually(lambda: len(server.received) >= 3)
        server.status = 200
        await eventually(lambda: server.costs and len(logs) == 1)
        following.cancel()
    [line] = logs
    assert (line["event"], line["pod"]) == ("pod.cost_not_written", "d")
    assert "403" in line["reason"]


async def test_a_worker_outside_of_kubernetes_says_why_it_cannot_write(account: Path) -> None:
    with capture_logs() as logs:
        following = asyncio.create_task(Pod("d", account=account, env={}).follow(lambda: 1, interval=0))
        await eventually(lambda: logs)
        following.cancel()
    assert "KUBERNETES_SERVICE_HOST" in logs[0]["reason"]


async def test_nothing_is_done_for_a_worker_that_was_told_of_no_pod() -> None:
    async with pod.marked(None, lambda: pytest.fail("looked at the slots")):
        pass


async def test_a_worker_goes_on_where_its_pod_cannot_be_marked(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with pod.marked("no-service-account-here", lambda: 1):
            await eventually(lambda: logs)
    assert logs[0]["event"] == "pod.cost_not_written"
