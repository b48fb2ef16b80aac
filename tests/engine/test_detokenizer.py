"""Text equals the decoding of its tokens, in whatever steps they come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from inferbus.schemas.requests import parse
from inferbus.workers.engine.interface import Leg
from inferbus.workers.stack import models
from tests.engine.test_pair import paired
from tests.support.engine_suite import ids, rid
from tests.support.remote_engine import ENVIRONMENT, RemoteEngine

CHINESE = (
    "人工智能是计算机科学的一个分支、它企图了解智能的实质、并生产"
    "出一种新的能以人类智能相似的方式做出反应的智能机器。"
)


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_text_of_a_stream_equals_its_tokens_decoded_at_once(name: Any) -> None:
    command = [sys.executable, "-m", "tests.support.detokenize", str(models.ensure(name))]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | ENVIRONMENT)
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["streams"] > 5000
    assert result["wrong"] == 0


async def leg_of(engine: RemoteEngine, interval: int, seed: int) -> Leg:
    """A leg that has to say the text, in steps of so many tokens; the seed chooses the tokens."""
    body = {"prompt": "x", "regex": CHINESE, "max_tokens": 300, "temperature": 1, "seed": seed}
    prompt = await engine.prepare(parse("completions", body))
    leg = prompt.leg(0, rid=rid())
    return msgspec.structs.replace(leg, sampling=leg.sampling | {"stream_interval": interval})


@pytest.mark.parametrize("interval", [1, 3, 4, 30, 32])
@pytest.mark.parametrize("seed", range(2))
async def test_characters_of_several_tokens_come_once(engine: RemoteEngine, interval: int, seed: int) -> None:
    deltas = [delta async for delta in engine.generate(await leg_of(engine, interval, seed))]
    assert "".join(delta.text for delta in deltas) == CHINESE
    assert len(ids(deltas)) > len(CHINESE)


@pytest.mark.parametrize("interval", [1, 4, 32])
async def test_characters_of_several_tokens_come_once_from_a_pair(
    prefill: RemoteEngine, decode: RemoteEngine, interval: int
) -> None:
    _, deltas = await paired(prefill, decode, await leg_of(decode, interval, 5))
    assert "".join(delta.text for delta in deltas) == CHINESE
