"""The operations through the suite of engine-sdk, which has their definitions, token by token."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import OpsConformance


class TestStates(OpsConformance):
    driver = "states"
    quick = r"card|known|body|states|gate|join"  # the others are operations of other drivers
