"""`cacheblend` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import EvictorConformance


class TestCacheBlend(EvictorConformance):
    driver = "cacheblend"
