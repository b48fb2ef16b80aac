"""The parts of the SGLang adapter that need no SGLang."""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from inferbus.schemas.errors import ContextLengthExceeded, InvalidRequest, NotSupported, TransferFailed
from inferbus.schemas.fleet import Bootstrap
from inferbus.schemas.requests import ChatRequest, TokenRequest, parse
from inferbus.workers.engine import cpu
from inferbus.workers.engine.cpu import detect
from inferbus.workers.engine.sglang import LaunchFailed, bootstrap, options
from inferbus.workers.engine.sglang.bounds import Bounds
from inferbus.workers.engine.sglang.prompts import SGLangPrompt
from inferbus.workers.engine.sglang.redaction import (
    redacted_record,
    remember_secrets,
    safe,
    unquoted,
    without_secrets,
)
from inferbus.workers.engine.sglang.serving import THREADS, Serving, _parse
from inferbus.workers.engine.sglang.startup import collector_paused, installed_version
from inferbus.workers.engine.tokens import TokensAnswer
from tests.support.eventually import eventually

BOUNDS = Bounds(context_length=100, longest_prompt=90, longest_total=96, vocabulary=50)


def request(**fields: Any) -> Any:
    """A token request."""
    return parse("tokens", {"token_ids": [1]} | fields)


@asynccontextmanager
async def bootstrap_server(*answers: bytes) -> AsyncIterator[tuple[Bootstrap, list[bytes]]]:
    """Gives these answers one after the other, and nothing afterwards; what it was asked."""
    asked: list[bytes] = []
    left = list(answers)
    ended: list[asyncio.Future[None]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if left:
            writer.write(left.pop(0))
        else:
            await reader.read()
        writer.close()
        ended.append(asyncio.ensure_future(writer.wait_closed()))

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        yield Bootstrap(host=host, port=port), asked
        await eventually(lambda: len(ended) == len(asked))
        await asyncio.gather(*ended)


OK = b"HTTP/1.0 200 OK\r\n\r\n{}"
NOT_YET = b"HTTP/1.0 503 Service Unavailable\r\n\r\n"


async def test_a_bootstrap_server_that_answered_is_asked_again_only_after_a_leg_failed_there() -> None:
    async with bootstrap_server(OK, OK) as (address, asked):
        servers = bootstrap.KnownServers()
        await servers.check(address)
        await servers.check(address)
        assert len(asked) == 1
        assert asked[0].startswith(b"GET /route?")
        servers.forget(address)
        await servers.check(address)
        assert len(asked) == 2


@pytest.mark.parametrize(("answers", "reason"), [((NOT_YET,), "503"), ((), "no response"), ((b"",), "b''")])
async def test_a_bootstrap_server_that_does_not_answer_is_named(
    answers: tuple[bytes, ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ASK_SECONDS", 0.2)
    async with bootstrap_server(*answers) as (address, _):
        with pytest.raises(TransferFailed, match=rf"127.0.0.1:{address.port}: .*{reason}"):
            await bootstrap.KnownServers().check(address)


@pytest.mark.parametrize(("seconds", "decode", "prefill"), [(20.0, "19", "20"), (0.5, "1", "1")])
def test_decode_is_the_first_to_give_up_a_transfer(
    seconds: float, decode: str, prefill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    options.prepare_environment(seconds)
    assert os.environ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == decode
    assert os.environ["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == prefill


async def test_a_prefill_whose_announced_address_leads_nowhere_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "READY_SECONDS", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(LaunchFailed, match=f"does not answer at 127.0.0.1:{port}, as announced"):
            await bootstrap.wait_ready(
                SimpleNamespace(bootstrap_server=None), Bootstrap(host="127.0.0.1", port=port)
            )


@pytest.mark.parametrize("token_ids", [[-1], [50], [1, 2, 2**70], []])
def test_ids_outside_the_vocabulary_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        BOUNDS.check_ids(token_ids, "token_ids")
    assert caught.value.param == "token_ids"


def test_ids_at_the_edges_of_the_vocabulary_are_taken() -> None:
    BOUNDS.check_ids([0, 49], "token_ids")


def test_a_prompt_has_the_room_that_is_left() -> None:
    assert BOUNDS.new_tokens(request(), 10) == 86


def test_a_prompt_longer_than_the_cache_is_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        BOUNDS.new_tokens(request(), 91)


def test_prompt_and_answer_longer_than_the_context_are_refused() -> None:
    with pytest.raises(ContextLengthExceeded):
        BOUNDS.new_tokens(request(max_tokens=51), 50)


def test_an_answer_is_lowered_to_what_the_cache_holds_and_that_is_said() -> None:
    asked = request(max_tokens=50)
    assert BOUNDS.new_tokens(asked, 50) == 46
    assert BOUNDS.new_tokens(asked, 50) == 46
    assert len(asked.warnings) == 1


@pytest.mark.parametrize(
    ("seed", "index", "expected"), [(5, 0, 5), (5, 2, 7), (2**63 - 1, 1, -(2**63)), (-(2**63), 0, -(2**63))]
)
def test_seeds_of_choices_stay_in_64_bits(seed: int, index: int, expected: int) -> None:
    prompt = SGLangPrompt(
        [[1]],
        lengths=[1],
        sampling={"sampling_seed": seed},
        options={},
        choices=3,
        answer=lambda _: TokensAnswer(TokenRequest(token_ids=[1]), prompt_tokens=1, choices=3),
    )
    assert prompt.leg(index, rid="0" * 32).sampling["sampling_seed"] == expected


def test_messages_lose_what_is_quoted_in_them() -> None:
    assert unquoted("Tool 'my secret' is \"not\" there\nTraceback") == "Tool … is … there"
    assert len(unquoted("x" * 1000)) <= 300
    assert unquoted("") == "no reason given"


def test_a_message_that_repeats_the_request_is_not_used() -> None:
    messages = [{"role": "user", "content": "my secret"}]
    assert safe("Unexpected: my secret", messages) is None
    assert (
        safe("roles must alternate user and assistant", messages) == "roles must alternate user and assistant"
    )


@pytest.mark.parametrize("number", ["0.5.17", "0.5.18.post1", "0.5.23", "0.5.22rc0"])
def test_versions_in_the_range_are_taken(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: number)
    assert installed_version() == number


@pytest.mark.parametrize("number", ["0.5.16", "0.5.24", "0.6.0", "1.0", "0.0.0.dev1"])
def test_versions_outside_the_range_are_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: number)
    with pytest.raises(LaunchFailed, match=r"0\.5\.17 <= version < 0\.5\.24"):
        installed_version()


def test_a_missing_sglang_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(LaunchFailed, match="not installed"):
        installed_version()


@pytest.mark.parametrize("accelerator", ["cuda", "xpu", "npu", "mps"])
def test_the_cpu_platform_is_inert_beside_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    def device(available: bool) -> Any:
        return SimpleNamespace(is_available=lambda: available)

    torch = SimpleNamespace(
        cuda=device(False), **{} if accelerator == "cuda" else {accelerator: device(True)}
    )
    if accelerator == "cuda":
        torch.cuda = device(True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    detect.cpu_only.cache_clear()
    try:
        assert not cpu.cpu_only()
        assert cpu.activate() is None
        cpu.install_hooks()  # Would import SGLang otherwise.
    finally:
        detect.cpu_only.cache_clear()


def test_the_cpu_platform_is_there_where_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    )
    detect.cpu_only.cache_clear()
    try:
        assert cpu.activate() == "inferbus.workers.engine.cpu.platform.InferbusCpuPlatform"
    finally:
        detect.cpu_only.cache_clear()


def test_importing_the_adapter_imports_neither_sglang_nor_torch() -> None:
    code = (
        "import sys; from inferbus.workers.engine import cpu, interface, sglang;"
        "sys.exit(bool({'sglang', 'torch', 'nixl', 'psutil'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_of_prompts_that_come_at_once_the_first_are_converted_first_and_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []
    go_on = threading.Event()

    def convert(asked: Any, _raw: None) -> tuple[Any, Any]:
        begun.append(asked.messages[0]["content"])
        go_on.wait(10)
        return SimpleNamespace(input_ids=[1]), asked

    handler = SimpleNamespace(
        _validate_request=lambda asked: None,
        _convert_to_internal_request=convert,
        chat_encoding_spec=None,
        tool_call_parser="qwen25",
        template_manager=SimpleNamespace(chat_template_name=None),
    )

    class Handlers:
        def __new__(cls, *_: Any) -> Any:
            return handler

    class Request(SimpleNamespace):
        model_fields = ("messages", "stream")

    # What is imported of SGLang here, whose import takes ten seconds.
    for module, name, kind in (
        ("serving_completions", "OpenAIServingCompletion", lambda *_: None),
        ("protocol", "ChatCompletionRequest", Request),
    ):
        stand_in = SimpleNamespace(**{name: kind})
        monkeypatch.setitem(sys.modules, f"sglang.srt.entrypoints.openai.{module}", stand_in)
    manager = SimpleNamespace(tokenizer=None, serving_chat_class=Handlers, served_model_name="m")
    serving = Serving(SimpleNamespace(tokenizer_manager=manager, template_manager=None, server_args=None))

    names = [str(number) for number in range(50)]
    asked = [ChatRequest(messages=[{"role": "user", "content": name}]) for name in names]
    converted = [asyncio.create_task(serving.convert(each)) for each in asked]
    await eventually(lambda: len(begun) == THREADS)
    assert sorted(begun) == names[:THREADS]
    go_on.set()
    await asyncio.gather(*converted)
    assert sorted(begun) == sorted(names)


def test_a_field_that_this_sglang_does_not_know_is_refused_and_not_dropped() -> None:
    class Older(BaseModel):
        prompt: str

    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")

    with pytest.raises(NotSupported) as caught:
        _parse(Older, {"prompt": "a", "return_token_ids": True})
    assert caught.value.param == "return_token_ids"
    # SGLang's chats have no such field: it becomes `reasoning_effort`.
    assert _parse(Older, {"prompt": "a", "reasoning": {"effort": "low"}}).prompt == "a"
    # As the request of SGLang's tokenizer, which hands on what is not its own.
    assert _parse(Open, {"stream": False}).model_extra == {"stream": False}


def test_the_garbage_collector_goes_on_when_sglang_is_loaded_and_when_it_could_not_be() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize(
    "message",
    [
        "Hit invalid json_schema: key_string='%s', e=RuntimeError()",
        "Grammar accept_token failed for req 1 with token 0: Tokens not accepted: 0\nKey string: %s",
        "req 1: invalid stop_regex '%s' (bad); aborting the request",
    ],
)
def test_a_log_message_of_sglang_that_quotes_a_grammar_is_left_out(message: str) -> None:
    record = redacted_record("sglang", 40, "file", 1, message, ("my secret words",), None)
    assert "secret" not in record.getMessage()
    assert "grammar" in record.getMessage()


def test_a_message_of_the_grammar_compiler_names_no_place_in_its_source() -> None:
    told = "Failed to compile json grammar: [20:02:44] /project/cpp/json_schema.cc:4175: Type should be"
    assert unquoted(told) == "Failed to compile json grammar: Type should be"


def test_other_log_messages_of_sglang_stay_as_they_are() -> None:
    record = redacted_record("sglang", 40, "file", 1, "load took %d s", (5,), None)
    assert record.getMessage() == "load took 5 s"


def test_secrets_among_the_options_are_in_no_message_and_no_log_line() -> None:
    given = SimpleNamespace(
        api_key="sk-0815",
        admin_api_key="adm-4711",
        ssl_keyfile_password="pw-1234",
        ssl_keyfile="/tls/key.pem",
    )
    remember_secrets(given)
    shown = (
        f"ServerArgs(api_key='sk-0815', admin_api_key='adm-4711', pw='pw-1234', key='{given.ssl_keyfile}')"
    )
    record = redacted_record("sglang", logging.INFO, "engine.py", 1, "server_args=%s", (shown,), None)
    for text in (record.getMessage(), without_secrets(shown)):
        assert not any(secret in text for secret in ("sk-0815", "adm-4711", "pw-1234"))
        assert "/tls/key.pem" in text
    remember_secrets(None)
