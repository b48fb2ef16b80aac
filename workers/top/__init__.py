"""A fleet at a glance: workers, queues, rates, batches, errors; `inferbus top`."""

from __future__ import annotations

from inferbus.workers.top.collector import Collector
from inferbus.workers.top.snapshot import Snapshot

__all__ = ["Collector", "Snapshot"]
