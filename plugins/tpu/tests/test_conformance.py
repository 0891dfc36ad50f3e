"""The platform through the suite of engine-sdk, as far as a platform with its own worker can be asked."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import PlatformConformance


class TestTpu(PlatformConformance):
    """The card; what the body of another platform does is the worker's own."""

    driver = "tpu"
    options = {"device": "cpu"}  # noqa: RUF012
