"""Operations and experts through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import ExpertsConformance, OpsConformance


class TestMoe(OpsConformance):
    driver = "moe"
    quick = r"card|known|body|rout|expert|gate"  # the others are operations of other drivers


class TestLocal(ExpertsConformance):
    driver = "local"
