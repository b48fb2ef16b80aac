"""Examines a whole set-up, and says how to mend what is wrong: `inferbus doctor`."""

from __future__ import annotations

from inferbus.workers.doctor.examination import examine
from inferbus.workers.doctor.findings import Finding

__all__ = ["Finding", "examine"]
