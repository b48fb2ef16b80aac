"""A prefill engine writes KV caches as one batch, unless somebody says otherwise."""

from __future__ import annotations

import os

import pytest

from inferbus.workers.engine import cpu
from inferbus.workers.engine.sglang import options

PLUGIN = "SGLANG_DISAGGREGATION_NIXL_BACKEND"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator, and an environment that says nothing; what a test sets goes again."""
    monkeypatch.setattr(cpu, "cpu_only", lambda: False)
    for name in (options.BATCHED_COPY, PLUGIN):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_it_is_on_for_nixl_over_ucx() -> None:
    options.batch_copies("nixl")
    assert os.environ[options.BATCHED_COPY] == "1"


@pytest.mark.parametrize("own", ["0", "n", "1"])
def test_the_users_own_value_stays(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setenv(options.BATCHED_COPY, own)
    options.batch_copies("nixl")
    assert os.environ[options.BATCHED_COPY] == own


def test_other_ways_of_transfer_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options.batch_copies("mooncake")
    monkeypatch.setenv(PLUGIN, "LIBFABRIC")
    options.batch_copies("nixl")
    assert options.BATCHED_COPY not in os.environ


def test_a_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_only", lambda: True)
    options.batch_copies("nixl")
    assert options.BATCHED_COPY not in os.environ
