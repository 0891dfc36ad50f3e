"""The reference drivers through the suites of engine-sdk, as a stranger's are."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import (
    AttentionConformance,
    AttentionThorough,
    CommunicatorConformance,
    CommunicatorThorough,
    OpsConformance,
    OpsThorough,
    QuantizationConformance,
)


class TestTorchAttention(AttentionConformance):
    driver = "torch"


class TestTorchLatentAttention(AttentionConformance):
    driver = "torch_mla"


class TestTorchOps(OpsConformance):
    driver = "torch"


@pytest.mark.xdist_group("communicators")
class TestGloo(CommunicatorConformance):
    driver = "gloo"
    quick = r"^(?!test_figure|.*\b2\])"  # three ranks go every way of two


class TestAbsmax(QuantizationConformance):
    driver = "absmax"


class TestAbsmaxOf4Bits(QuantizationConformance):
    driver, options = "absmax", {"bits": 4, "group_size": 32}


@pytest.mark.slow
class TestTorchAttentionThoroughly(AttentionThorough, AttentionConformance):
    driver = "torch"


@pytest.mark.slow
class TestTorchLatentAttentionThoroughly(AttentionThorough, AttentionConformance):
    driver = "torch_mla"


@pytest.mark.slow
class TestTorchOpsThoroughly(OpsThorough, OpsConformance):
    driver = "torch"


@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
class TestGlooThoroughly(CommunicatorThorough, CommunicatorConformance):
    driver = "gloo"
