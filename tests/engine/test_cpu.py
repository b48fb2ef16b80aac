"""What the CPU platform changes in NIXL; no engine is needed for that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from inferbus.workers.engine.cpu import hooks

nixl = pytest.importorskip("nixl._api", reason="NIXL is not installed")


@pytest.fixture(autouse=True)
def plain_binding() -> Iterator[None]:
    plain = nixl.nixlBind.nixlAgentConfig
    yield
    nixl.nixlBind.nixlAgentConfig = plain


def test_an_agents_progress_thread_pauses_where_nixl_would_let_it_spin() -> None:
    hooks.calm_progress_thread()
    config = nixl.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == hooks.PAUSE_MICROSECONDS
    config.pthrDelay = 7
    assert config.pthrDelay == 7


def test_calming_twice_is_calming_once() -> None:
    hooks.calm_progress_thread()
    once = nixl.nixlBind.nixlAgentConfig
    hooks.calm_progress_thread()
    assert nixl.nixlBind.nixlAgentConfig is once


def test_an_agent_can_be_made_of_it() -> None:
    hooks.calm_progress_thread()
    agent = nixl.nixl_agent("test", nixl.nixl_agent_config(backends=[]))
    assert "UCX" in agent.get_plugin_list()


def test_kv_memory_is_declared_as_what_it_is() -> None:
    args = SimpleNamespace(kv_data_ptrs=[1, 2, 3])
    hooks.prepare_manager(None, args)
    assert args.kv_data_mem_kinds == ["DRAM"] * 3
