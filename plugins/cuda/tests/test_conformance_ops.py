"""The operations through the suite of engine-sdk: in Triton's interpreter, and on a GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from engine_sdk.conformance import OpsConformance


class TestOps(OpsConformance):
    driver = "triton"
