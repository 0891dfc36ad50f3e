"""The operations through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import OpsConformance


class TestMoe(OpsConformance):
    driver = "moe"
    quick = r"card|known|body"  # what it defines is tested beside: the others are operations of other drivers
