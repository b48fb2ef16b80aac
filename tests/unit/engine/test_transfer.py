"""The prefill scheduler's hook: what it adds to SGLang's requests, and that it harms none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from inferbus.schemas.handoff import Transfer
from inferbus.workers.engine.sglang import transfer
from inferbus.workers.engine.sglang.transfer import KEY


class FINISH_ABORT:
    """As SGLang names it; the hook goes by the name, so that it need not import SGLang."""


def request(metric: Any = None, *, finished: bool = True, reason: Any = "length", **more: Any) -> Any:
    """As much of SGLang's `Req` as the hook looks at."""
    sender = SimpleNamespace(get_transfer_metric=lambda: metric)
    fields = {"output_ids": [5], "customized_info": None, "disagg_kv_sender": sender} | more
    return SimpleNamespace(finished=lambda: finished, finished_reason=reason, **fields)


def metric(seconds: float | None = 0.25, size: int | None = 640) -> Any:
    """As much of SGLang's `KVTransferMetric`."""
    return SimpleNamespace(transfer_latency_s=seconds, transfer_total_bytes=size)


def streamed(req: Any, *, at: int = 0) -> dict[str, Any]:
    """What SGLang's streamer and tokenizer manager make of it for tokens from `at` on."""
    return {
        key: list(values[at : len(req.output_ids)]) for key, values in (req.customized_info or {}).items()
    }


@pytest.fixture
def record() -> Any:
    return transfer._Recorder()


def test_a_transfer_that_succeeded_comes_out_of_the_meta_data(record: Any) -> None:
    req = request(metric())
    record(None, [req], False, None)
    meta = {"prompt_tokens": 3} | streamed(req)
    assert transfer.take(meta) == Transfer(seconds=0.25, bytes=640)
    assert meta == {"prompt_tokens": 3}


def test_what_others_put_beside_the_output_stays(record: Any) -> None:
    req = request(metric(), customized_info={"theirs": ["x"]})
    record(None, reqs=[req], return_logprob=False)
    assert streamed(req)["theirs"] == ["x"]
    assert transfer.take(streamed(req)) is not None


@pytest.mark.parametrize(
    "req",
    [
        request(metric(), finished=False),
        request(metric(), reason=FINISH_ABORT()),
        request(metric(seconds=None)),
        request(metric(size=None)),
        request(disagg_kv_sender=None),
    ],
    ids=["still running", "aborted", "no time", "no size", "nothing sent"],
)
def test_a_request_without_a_transfer_has_no_figures(record: Any, req: Any) -> None:
    record(None, [req])
    assert req.customized_info is None


@pytest.mark.parametrize(
    "meta", [{}, {KEY: None}, {KEY: []}, {KEY: [None]}, {KEY: [["a", 1]]}, {KEY: [[0.1]]}]
)
def test_meta_data_without_figures_give_none(meta: dict[str, Any]) -> None:
    assert transfer.take(meta) is None
    assert meta == {}


def test_a_defect_costs_the_figure_alone_and_is_logged_once(record: Any) -> None:
    other = SimpleNamespace()
    other.disagg_kv_sender = SimpleNamespace()  # An SGLang that has renamed everything.
    with capture_logs() as events:
        for _ in range(3):
            assert record(None, [other]) is None
        assert record(None, 5) is None
    assert [event["event"] for event in events] == ["transfer.unmeasured"]


@pytest.mark.parametrize(
    "arguments", [None, SimpleNamespace(disaggregation_mode="decode"), SimpleNamespace()]
)
def test_only_a_prefill_engine_is_hooked(monkeypatch: pytest.MonkeyPatch, arguments: Any) -> None:
    monkeypatch.setattr(transfer, "_Recorder", None)  # Would be called.
    transfer.register(arguments)
