"""Grafana's dashboard of a fleet, as code: `python deploy/grafana/dashboard.py` writes `inferbus.json`.

Its rows are three questions: is it healthy, is it fast, what is it waiting for.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    VariableOption,
    VariableRefresh,
)

FILE: Final = Path(__file__).with_name("inferbus.json")

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${source}")
OF: Final = 'model=~"$model"'
EVERY: Final = "[$__rate_interval]"
FAILED: Final = 'status="error"'

Queries = dict[str, str]
"""Expressions by their legend."""


def quantile(share: float, metric: str, by: str, more: str = "") -> str:
    """A quantile of a histogram's observations of late."""
    labels = ", ".join(filter(None, (OF, more)))
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{{{labels}}}{EVERY})))"


def rate(metric: str, by: str, more: str = "") -> str:
    """What a counter grows by in a second."""
    labels = ", ".join(filter(None, (OF, more)))
    return f"sum by ({by}) (rate({metric}{{{labels}}}{EVERY}))"


def total(metric: str, by: str) -> str:
    """A gauge's sum."""
    return f"sum by ({by}) ({metric}{{{OF}}})"


def share(more: str, by: str = "") -> str:
    """The share of the requests that these labels choose."""
    chosen, every = f"inferbus_requests_total{{{OF}, {more}}}", f"inferbus_requests_total{{{OF}}}"
    return f"sum {by}(rate({chosen}{EVERY})) / scalar(sum(rate({every}{EVERY})))"


PANELS: Final[dict[str, list[tuple[str, str, str, Queries]]]] = {
    "Is it healthy?": [
        (
            "Workers",
            "short",
            "Connected to NATS, by role.",
            {"{{model}} {{role}}": f"sum by (model, role) (inferbus_nats_connected{{{OF}}})"},
        ),
        (
            "Failed requests",
            "percentunit",
            "Share of the requests that ended in an error: all, and by the codes that occurred.",
            {"all": share(FAILED), "{{code}}": share(FAILED, by="by (code) ") + " > 0"},
        ),
        (
            "Retries, refusals and dead letters",
            "ops",
            "Dead letters need an operator: inferbus dead ls. A full prefill worker refuses.",
            {
                "dead {{model}}": rate("inferbus_jobs_total", "model", 'outcome="dead"'),
                "retried {{model}}": rate("inferbus_jobs_total", "model", 'outcome="retried"'),
                "taken again {{model}}": rate("inferbus_redeliveries_total", "model"),
                "refused by prefill {{model}}": rate("inferbus_handoffs_total", "model", 'status="refused"'),
            },
        ),
        (
            "How full streams are",
            "percentunit",
            "At its limit a stream refuses jobs or results.",
            {
                "{{stream}}": f"max by (stream) (inferbus_stream_bytes{{{OF}}}) "
                f"/ max by (stream) (inferbus_stream_max_bytes{{{OF}}})"
            },
        ),
        (
            "Connections to NATS",
            "ops",
            "Reconnects, and messages that were dropped since NATS was away for too long.",
            {
                "reconnects {{role}}": rate("inferbus_nats_reconnects_total", "role"),
                "dropped {{role}}": rate("inferbus_messages_dropped_total", "role"),
            },
        ),
        (
            "Defects",
            "ops",
            "Unexpected exceptions that were caught, by their event in the log.",
            {"{{event}}": f"sum by (event) (rate(inferbus_defects_total{EVERY}))"},
        ),
        (
            "Clocks",
            "s",
            "The largest difference from the server's clock. Deadlines and the wait in a queue go by it.",
            {"{{role}}": f"max by (role) (abs(inferbus_clock_skew_seconds{{{OF}}}))"},
        ),
    ],
    "Is it fast?": [
        (
            "First chunk",
            "s",
            "From taking a request to the first chunk of a streamed answer.",
            {
                "p50 {{class}}": quantile(0.5, "inferbus_first_chunk_seconds", "class"),
                "p99 {{class}}": quantile(0.99, "inferbus_first_chunk_seconds", "class"),
            },
        ),
        (
            "Whole answer",
            "s",
            "From taking a request to the end of its answer.",
            {
                "p50 {{class}}": quantile(0.5, "inferbus_request_seconds", "class"),
                "p99 {{class}}": quantile(0.99, "inferbus_request_seconds", "class"),
            },
        ),
        (
            "Requests",
            "reqps",
            "That ended; each attempt at a job is one.",
            {"{{model}} {{class}}": rate("inferbus_requests_total", "model, class")},
        ),
        (
            "Chunks",
            "cps",
            "Of streamed answers, counted when an answer ends.",
            {"{{model}} {{class}}": rate("inferbus_chunks_total", "model, class")},
        ),
        (
            "KV transfer",
            "s",
            "From the first piece sent to the last received.",
            {
                "p50 {{model}}": quantile(0.5, "inferbus_kv_transfer_seconds", "model"),
                "p99 {{model}}": quantile(0.99, "inferbus_kv_transfer_seconds", "model"),
            },
        ),
        (
            "KV bytes sent",
            "Bps",
            "By prefill workers, of one rank each.",
            {"{{model}}": rate("inferbus_kv_transfer_bytes_sum", "model")},
        ),
    ],
    "What is it waiting for?": [
        (
            "Jobs: a worker",
            "s",
            "From the submission of a job to its attempt.",
            {
                "p50 {{class}}": quantile(0.5, "inferbus_queue_wait_seconds", "class"),
                "p99 {{class}}": quantile(0.99, "inferbus_queue_wait_seconds", "class"),
            },
        ),
        (
            "Requests: the engine",
            "s",
            "From an attempt's beginning until the engine had room for it.",
            {
                "p50 {{class}}": quantile(0.5, "inferbus_admission_wait_seconds", "class"),
                "p99 {{class}}": quantile(0.99, "inferbus_admission_wait_seconds", "class"),
            },
        ),
        (
            "Decode: prefill",
            "s",
            "A hand-off's wait, computation and transfer.",
            {
                "p50 {{model}}": quantile(0.5, "inferbus_handoff_seconds", "model"),
                "p99 {{model}}": quantile(0.99, "inferbus_handoff_seconds", "model"),
            },
        ),
        (
            "Slots in use",
            "percentunit",
            "A full worker takes nothing more.",
            {
                "{{model}} {{role}}": f"{total('inferbus_slots_busy', 'model, role')} "
                f"/ {total('inferbus_slots', 'model, role')}"
            },
        ),
        (
            "KV cache",
            "percentunit",
            "In use, and what the admitted requests will need at most.",
            {
                "used {{model}} {{role}}": f"{total('inferbus_engine_kv_used_tokens', 'model, role')} "
                f"/ {total('inferbus_engine_kv_tokens', 'model, role')}",
                "forecast {{model}} {{role}}": f"{total('inferbus_kv_forecast_tokens', 'model, role')} "
                f"/ {total('inferbus_engine_kv_tokens', 'model, role')}",
            },
        ),
        (
            "Requests held back",
            "short",
            "Before the engine, queued in it, and running.",
            {
                "held {{role}}": total("inferbus_admission_queued_requests", "role"),
                "queued {{role}}": total("inferbus_engine_waiting_requests", "role"),
                "running {{role}}": total("inferbus_engine_running_requests", "role"),
            },
        ),
    ],
}
"""By row: title, unit, description and queries of each panel."""


def panel(title: str, unit: str, description: str, queries: Queries) -> timeseries.Panel:
    """Lines over time, a third of the width."""
    built = timeseries.Panel().title(title).description(description).unit(unit).datasource(SOURCE)
    built = built.span(8).height(7).min(0).fill_opacity(8)
    built = built.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI)).legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
    )
    for number, (legend, query) in enumerate(queries.items()):
        built = built.with_target(
            prometheus.Dataquery().expr(query).legend_format(legend).ref_id(chr(ord("A") + number)).range()
        )
    return built


def build() -> str:
    """The dashboard as Grafana imports it."""
    built = (
        dashboard.Dashboard("inferbus")
        .uid("inferbus")
        .tags(["inferbus", "llm"])
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(SOURCE)
            .query("label_values(inferbus_worker_info, model)")
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(VariableOption(selected=True, text="All", value="$__all"))
            # Models come and go.
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )
    # Grafana tells panels apart by their numbers.
    numbers = itertools.count(1)
    for question, panels in PANELS.items():
        built = built.with_row(dashboard.Row(question).id(next(numbers)))
        for title, unit, description, queries in panels:
            built = built.with_panel(panel(title, unit, description, queries).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


if __name__ == "__main__":
    FILE.write_text(build())
