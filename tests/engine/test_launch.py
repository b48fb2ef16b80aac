"""Starts that cannot work say why and leave nothing behind; flags pass through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.support.remote_engine import ENVIRONMENT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def told(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of every start, by case."""
    broken = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    script = [sys.executable, "-m", "tests.support.engine_starts", model, str(broken)]
    run = subprocess.run(
        script, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=800, check=False
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"case"')]
    assert run.returncode == 0, run.stderr[-4000:]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unknown flag", ["--no-such-flag"]),
        ("bad value", ["--tp", "many"]),
        ("no model", ["--model-path", "required"]),
        ("other mode", ["--disaggregation-mode", "decode"]),
        ("follower", ["--node-rank"]),
        ("other name", ["--served-model-name"]),
        ("port in use", ["bootstrap server", "in use"]),
        ("wrong path", ["--model-path: no such folder: /nonexistent/model"]),
        ("secret", ["--model-path: no such folder: /nonexistent/model"]),
        ("misspelt secret", ["there is no --api-keyy, --adminn-key"]),
        ("no hub", ["couldn't connect", "http://127.0.0.1:9"]),
        ("no weights", ["weights"]),
    ],
)
def test_a_start_that_cannot_work_says_why_in_a_line_and_leaves_nothing(
    told: dict[str, dict[str, Any]], case: str, words: list[str]
) -> None:
    reason: str = told[case]["reason"]
    assert all(word in reason for word in words), reason
    assert "\n" not in reason
    assert len(reason) < 700
    assert "sk-0815" not in reason
    assert told[case]["left"] == 0
    assert told[case]["logging"]
    assert told[case]["sigterm"]


def test_flags_pass_through_and_the_role_adds_its_own(told: dict[str, dict[str, Any]]) -> None:
    decode = told["decode"]
    assert decode["tp_size"] == 2
    assert decode["disaggregation_mode"] == "decode"
    assert decode["disaggregation_transfer_backend"] == "nixl"
    assert decode["incremental_streaming_output"] is True
    assert decode["served_model_name"] == "mine"
    assert decode["tool_call_parser"] == "auto"
    assert decode["bootstrap"] is None


def test_a_cpu_gets_defaults_that_flags_override(told: dict[str, dict[str, Any]]) -> None:
    if not told["environment"]["cpu"]:
        pytest.skip("an accelerator is here")
    decode, prefill = told["decode"], told["prefill"]
    assert decode["dtype"] == "bfloat16"
    assert prefill["dtype"] == "float32"
    assert prefill["device"] == decode["device"] == "cpu"
    assert prefill["attention_backend"] == "torch_native"
    assert prefill["max_total_tokens"] > 0


def test_the_bootstrap_server_listens_where_it_is_announced(told: dict[str, dict[str, Any]]) -> None:
    loopback, everywhere = told["prefill"], told["prefill everywhere"]
    assert loopback["host"] == "127.0.0.1"
    assert loopback["bootstrap"] == ["127.0.0.1", loopback["disaggregation_bootstrap_port"]]
    assert loopback["disaggregation_bootstrap_port"] > 0
    assert everywhere["host"] == "0.0.0.0"
    assert everywhere["bootstrap"][0] not in ("0.0.0.0", "")
    assert everywhere["bootstrap"][1] == 18123
    assert told["environment"]["host ip"] == "127.0.0.1"
