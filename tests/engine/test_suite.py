"""SGLang does what every engine must."""

from __future__ import annotations

from tests.support.engine_suite import EngineSuite


class TestSGLang(EngineSuite):
    """Against the aggregated engine."""
