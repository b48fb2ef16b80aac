"""The gateway's edges, against a real server and a worker that does what the test says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferbus.workers.config import ConfigError, GatewaySettings, resolve
from inferbus.workers.gateway import events as events_module
from inferbus.workers.gateway.events import EventStream
from inferbus.workers.gateway.keys import Keys
from inferbus.workers.gateway.server import Unserved, listener
from inferbus.workers.stack.processes import Children, spawn
from inferbus.workers.stack.server import NatsServer
from tests.support.answers import chat_answer
from tests.support.eventually import eventually
from tests.support.gateway import caller, events, gateway
from tests.support.responder import Responder, chunks_of, responder

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = CHAT | {"stream": True}
KEY = "sk-0123456789abcdef"


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with NatsServer(sync_interval=None) as found:
        yield found


@pytest.fixture
async def worker(server: NatsServer) -> AsyncIterator[Responder]:
    async with responder(server.url) as found:
        yield found


@pytest.fixture
async def http(server: NatsServer) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway(server.url, keep_alive=0.1) as url, caller(url) as found:
        yield found


async def test_a_stream_has_openais_chunks_and_nothing_of_the_contract(
    http: httpx.AsyncClient, worker: Responder
) -> None:
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=STREAM))
    request = await worker.request()
    assert json.loads(request.data) == STREAM | {"stream_options": {"include_usage": False}}
    await worker.answer(request.reply, "Par", "is")
    answer = await asking
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == request.headers["Infer-Job-Id"]
    chunks = events(answer.text)
    assert "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"]) == "Paris"
    assert not {"job", "attempt", "seq"} & {name for chunk in chunks for name in chunk}


async def test_a_whole_answer_is_the_workers_own(http: httpx.AsyncClient, worker: Responder) -> None:
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT | {"unknown": {"a": [1.50]}}))
    request = await worker.request()
    assert b'"unknown":{"a":[1.5]}' in request.data.replace(b" ", b"")
    sent = chat_answer("Paris") | {"system_fingerprint": None, "metadata": {"weight_version": "default"}}
    await worker.send(request.reply, sent)
    await worker.end(request.reply, 1)
    answer = (await asking).json()
    assert answer == {name: value for name, value in sent.items() if name not in ("job", "attempt")}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, 16),
        ({"max_tokens": None}, 16),
        ({"max_tokens": 5}, None),
        ({"max_new_tokens": 5}, None),
        ({"sampling_params": {"max_new_tokens": 5}}, None),
        ({"sampling_params": {"temperature": 0}}, 16),
    ],
    ids=str,
)
async def test_a_completion_has_openais_16_tokens_unless_it_says_otherwise(
    http: httpx.AsyncClient, worker: Responder, body: dict[str, Any], expected: int | None
) -> None:
    asking = asyncio.create_task(http.post("/v1/completions", json={"model": "m", "prompt": "a"} | body))
    request = await worker.request()
    assert json.loads(request.data).get("max_tokens", None if expected else 5) == (expected or 5)
    await worker.send(request.reply, chat_answer("b") | {"object": "text_completion"})
    await worker.end(request.reply, 1)
    assert (await asking).status_code == 200


async def test_silence_before_the_first_token_is_filled_with_comments_of_one_line(
    http: httpx.AsyncClient, worker: Responder
) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
        assert answer.status_code == 200
        parts = answer.aiter_text()
        assert await anext(parts) == ": keep-alive\n"
        await worker.answer((await worker.request()).reply, "Paris")
        text = "".join([part async for part in parts])
    assert ": keep-alive\n\n" not in text
    assert len(events(text)) == 4


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ({"code": "invalid_request", "message": "top_p", "param": "top_p"}, 400, "invalid_request_error"),
        ({"code": "context_length_exceeded", "message": "x"}, 400, "invalid_request_error"),
        ({"code": "deadline_exceeded", "message": "x"}, 408, "invalid_request_error"),
        ({"code": "payload_too_large", "message": "x"}, 413, "invalid_request_error"),
        ({"code": "not_supported", "message": "x"}, 422, "invalid_request_error"),
        ({"code": "engine_failed", "message": "x", "retryable": True}, 500, "server_error"),
        ({"code": "draining", "message": "x", "retryable": True}, 503, "server_error"),
        ({"code": "overloaded", "message": "x", "retryable": True}, 529, "server_error"),
    ],
    ids=lambda value: value.get("code") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "streamed"])
async def test_a_failure_before_the_first_byte_is_a_status_and_openais_error(
    http: httpx.AsyncClient,
    worker: Responder,
    body: dict[str, Any],
    error: dict[str, Any],
    status: int,
    kind: str,
) -> None:
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    reply = (await worker.request()).reply
    await worker.send(reply, {"error": error, "job": "j", "attempt": 1})
    await worker.end(reply, 1, "error")
    answer = await asking
    assert answer.status_code == status
    told = answer.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert (told["type"], told["code"], told["param"]) == (kind, error["code"], error.get("param"))
    retryable = error.get("retryable", False)
    assert answer.headers["x-should-retry"] == ("true" if retryable else "false")
    assert ("retry-after" in answer.headers) == retryable


async def test_a_failure_after_the_first_byte_is_an_event_and_then_done(
    http: httpx.AsyncClient, worker: Responder
) -> None:
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=STREAM))
    reply = (await worker.request()).reply
    error = {"code": "engine_failed", "message": "gone", "retryable": True}
    await worker.send(reply, *chunks_of("a")[:2], {"error": error, "job": "j", "attempt": 1})
    await worker.end(reply, 3, "error")
    answer = await asking
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"] == {
        "message": "gone",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "streamed"])
async def test_a_caller_that_leaves_cancels_its_request(
    server: NatsServer, worker: Responder, body: dict[str, Any]
) -> None:
    async with gateway(server.url) as url:
        async with caller(url) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
            request = await worker.request()
            if body is STREAM:
                await worker.send(request.reply, *chunks_of("a")[:2])
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            cancel = await worker.cancel()
        assert cancel.subject == f"infer.cancel.live.{request.headers['Infer-Job-Id']}"
        async with caller(url) as http:
            assert 'inferbus_gateway_cut_total{why="left"} 1.0' in (await http.get("/metrics")).text


async def test_a_reader_that_does_not_read_is_given_up_and_its_request_cancelled(
    server: NatsServer, worker: Responder
) -> None:
    async with gateway(server.url) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(STREAM).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        reply = (await worker.request()).reply
        large = chunks_of("x" * 500_000)[1]
        assert isinstance(large, dict)
        for seq in range(60):
            await worker.send(reply, large | {"seq": seq})
            if not worker.cancels.empty():
                break
        await worker.cancel()
        async with caller(url) as http:
            assert 'inferbus_gateway_cut_total{why="too_slow"} 1.0' in (await http.get("/metrics")).text
        writer.close()


async def test_an_answer_that_can_wait_waits_for_a_slow_reader() -> None:
    async def many() -> Any:
        for number in range(10):
            yield {"n": number}

    release = asyncio.Event()
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await release.wait()
            sent.append(message["body"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    stream = EventStream(many(), headers={}, keep_alive=5, waits=True, buffer=20)
    serving = asyncio.create_task(stream({"type": "http"}, receive, send))
    await eventually(lambda: stream._buffer.full)
    release.set()
    await serving
    assert [each["n"] for each in events(b"".join(sent).decode())] == list(range(10))


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "undecodable_body"),
        (b"[1]", {}, 400, "undecodable_body"),
        (b"\xff", {}, 400, "undecodable_body"),
        (b"[" * 100_000, {}, 400, "undecodable_body"),
        (b'{"messages": []}', {}, 400, "invalid_request"),
        (b'{"model": 1}', {}, 400, "invalid_request"),
        (b'{"model": "m", "stream": "yes"}', {}, 400, "invalid_request"),
        (json.dumps({"model": "m" * 1000}).encode(), {}, 400, "invalid_subject"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_content_type"),
        (b"x" * 2000, {}, 413, "payload_too_large"),
    ],
    ids=["cut", "array", "no-utf8", "deep", "no-model", "number", "stream", "long", "type", "large"],
)
async def test_a_body_that_cannot_be_used_is_refused(
    server: NatsServer, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async with (
        gateway(server.url, max_body=1500 if len(content) == 2000 else 10**6) as url,
        caller(url) as http,
    ):
        sent = {"content-type": "application/json"} | headers
        answer = await http.post("/v1/chat/completions", content=content, headers=sent)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_body_without_a_length_is_bounded_too(server: NatsServer) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async with gateway(server.url, max_body=1500) as url, caller(url) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post("/v1/chat/completions", content=endless(), headers=headers)
        assert answer.status_code == 413


async def test_what_is_not_served_is_openais_error_too(http: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, "unknown_url")


async def test_a_model_that_nobody_serves_is_not_found(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=CHAT | {"model": "nobody"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_without_keys_only_this_machine_is_served(http: httpx.AsyncClient) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        resolve({"gateway_listen": "0.0.0.0:80"}, {})
    assert resolve({"gateway_listen": "0.0.0.0:80"}, {"INFERBUS_GATEWAY_KEYS": f"{KEY}:acme"}).gateway.keys
    assert resolve({"gateway_listen": "0.0.0.0:80", "gateway_open": True}, {}).gateway.open
    rebound = await http.get("/v1/models", headers={"host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["param"]) == (400, "Host")


def test_no_event_waits_for_an_acknowledgement_of_the_one_before() -> None:
    """asyncio turns Nagle's algorithm off only for connections of a listener that names its protocol."""
    with listener(GatewaySettings(listen="127.0.0.1:0")) as found:
        assert found.proto == socket.IPPROTO_TCP


async def test_an_address_in_use_is_named(server: NatsServer, http: httpx.AsyncClient) -> None:
    taken = f"127.0.0.1:{http.base_url.port}"
    with pytest.raises(Unserved, match=f"cannot listen on {taken}"):
        async with gateway(server.url, listen=taken):
            pass


async def test_keys_are_asked_for_and_say_whose_a_job_is(
    server: NatsServer, worker: Responder, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"sk-second-key-of-beta").hexdigest()
    file.write_text(f'[one]\nkey = "{KEY}"\nowner = "acme"\n[two]\nsha256 = "{digest}"\nowner = "beta"\n')
    async with gateway(server.url, keys_file=file) as url, caller(url) as http:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}):
            for path in ("/v1/models", "/metrics", "/status"):
                answer = await http.get(path, headers=header)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("/livez", "/readyz", "/"):
            assert (await http.get(path)).status_code == 200
        for key in (KEY, "sk-second-key-of-beta"):
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200


async def test_a_changed_file_of_keys_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[one]\nkey = "{KEY}"\nowner = "acme"\nconcurrency = 1\n')
    keys = Keys(GatewaySettings(keys_file=file))
    first = keys.find(f"Bearer {KEY}")
    file.write_text(
        f'[one]\nkey = "{KEY}"\nowner = "acme"\nconcurrency = 1\n[two]\nkey = "{KEY}2"\nowner = "b"\n'
    )
    keys.refresh()
    assert keys.find(f"Bearer {KEY}") is first
    assert keys.find(f"Bearer {KEY}2").owner == "b"
    file.write_text("nonsense")
    keys.refresh()
    assert keys.find(f"bearer {KEY}2").owner == "b"
    file.write_text("")
    keys.refresh()
    with pytest.raises(Exception, match="not known"):
        keys.find(f"Bearer {KEY}")


def test_keys_that_cannot_be_used_are_named_without_being_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f"""
        [short]
        key = "sk-short"
        owner = "a"
        [none]
        owner = "a"
        [live]
        key = "{KEY}"
        owner = "live"
        [one]
        key = "{KEY}"
        owner = "a"
        [same]
        key = "{KEY}"
        owner = "b"
        [extra]
        owner = "a"
        limit = 1
        """
    )
    with pytest.raises(ConfigError) as told:
        Keys(GatewaySettings(keys_file=file))
    assert len(told.value.problems) == 5
    for name in ("short", "none", "live", "same", "extra"):
        assert any(name in problem for problem in told.value.problems), name
    assert "sk-" not in str(told.value)
    assert KEY not in repr(GatewaySettings(keys={KEY: "acme"}))


async def test_a_key_has_its_requests_a_minute_and_at_a_time(server: NatsServer, worker: Responder) -> None:
    async with gateway(server.url, requests_per_minute=3) as url, caller(url) as http:
        for _ in range(3):
            assert (await http.get("/v1/models")).status_code == 200
        answer = await http.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert 0 < int(answer.headers["retry-after"]) <= 20
    async with gateway(server.url, concurrency=1) as url, caller(url) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
        reply = (await worker.request()).reply
        assert (await http.get("/v1/models")).status_code == 429
        assert (await http.get("/metrics")).status_code == (await http.get("/status")).status_code == 200
        await worker.send(reply, chat_answer("a"))
        await worker.end(reply, 1)
        assert (await asking).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200


async def test_it_is_ready_while_nats_is_there(http: httpx.AsyncClient, server: NatsServer) -> None:
    assert (await http.get("/livez")).status_code == (await http.get("/readyz")).status_code == 200
    await server.stop()

    async def unready() -> bool:
        return (await http.get("/readyz")).status_code == 503

    await eventually(unready)
    assert (await http.get("/livez")).status_code == 200
    await server.start()


async def test_requests_are_counted_by_route_and_status(http: httpx.AsyncClient) -> None:
    await http.get("/v1/models")
    await http.post("/v1/completions", content=b"")
    text = (await http.get("/metrics")).text
    assert 'inferbus_gateway_requests_total{route="/v1/models",status="200"} 1.0' in text
    assert 'inferbus_gateway_requests_total{route="/v1/completions",status="415"} 1.0' in text
    assert 'inferbus_gateway_first_byte_seconds_count{route="/v1/models"} 1.0' in text


async def test_a_defect_is_an_answer_and_in_the_log(
    http: httpx.AsyncClient, worker: Responder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "_event", lambda body: 1 // 0)
    asking = asyncio.create_task(http.post("/v1/chat/completions", json=STREAM))
    await worker.answer((await worker.request()).reply, "Paris")
    assert (await asking).status_code == 500


async def test_the_command_says_where_it_listens_and_ends_by_a_signal(
    server: NatsServer, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "inferbus.workers.cli", "gateway", "--gateway-listen", "127.0.0.1:0"]
    async with Children(grace=5) as children:
        env = {"INFERBUS_NATS_URL": server.url}
        child = children.add(await spawn("gateway", command, log=tmp_path / "gateway.log", env=env))

        def said() -> str | None:
            found = re.search(r"^listening on (\S+)$", child.log.read_text(), re.MULTILINE)
            return found and found[1]

        url = await eventually(said, within=30)
        async with caller(url) as http:
            assert (await http.get("/readyz")).json() == {"ready": True, "draining": False}
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_the_page_loads_nothing_from_elsewhere_and_shows_what_the_gateway_knows(
    http: httpx.AsyncClient,
) -> None:
    page = await http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://", page.text)
    assert (await http.get("/status")).json() == {"workers": [], "queues": None}
