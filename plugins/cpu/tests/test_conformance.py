"""The drivers of this package through the suites of engine-sdk; the operations at every level of processor features."""

from typing import Any, ClassVar

import pytest
import torch
from ggml_blocks import random_blocks

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")

from engine_sdk.conformance import (
    AttentionConformance,
    AttentionThorough,
    CommunicatorConformance,
    CommunicatorThorough,
    OpsConformance,
    OpsThorough,
    PlatformConformance,
    QuantizationConformance,
)


class TestPlatform(PlatformConformance):
    driver = "cpu"


class TestAttention(AttentionConformance):
    driver = "cpu"


class TestAttentionScalar(AttentionConformance):
    driver, options = "cpu", {"level": "scalar"}


@pytest.mark.slow
class TestAttentionAvx2(AttentionConformance):
    driver, options = "cpu", {"level": "avx2"}


@pytest.mark.slow
class TestAttentionAvx512(AttentionConformance):
    driver, options = "cpu", {"level": "avx512"}


@pytest.mark.slow
class TestAttentionAvx512Bf16(AttentionConformance):
    driver, options = "cpu", {"level": "avx512_bf16"}


@pytest.mark.slow
class TestAttentionNeon(AttentionConformance):
    driver, options = "cpu", {"level": "neon"}


@pytest.mark.slow
class TestAttentionNeonBf16(AttentionConformance):
    driver, options = "cpu", {"level": "neon_bf16"}


class TestOps(OpsConformance):
    driver = "cpu"


class TestOpsScalar(OpsConformance):
    driver, options = "cpu", {"level": "scalar"}
    quick = r"^(?!test_invariant_linear)"  # the longest ones


@pytest.mark.slow
class TestOpsAvx2(OpsConformance):
    driver, options = "cpu", {"level": "avx2"}


@pytest.mark.slow
class TestOpsAvx512(OpsConformance):
    driver, options = "cpu", {"level": "avx512"}


@pytest.mark.slow
class TestOpsAvx512Bf16(OpsConformance):
    driver, options = "cpu", {"level": "avx512_bf16"}


@pytest.mark.slow
class TestOpsAvx512Amx(OpsConformance):
    driver, options = "cpu", {"level": "avx512_amx"}


@pytest.mark.slow
class TestOpsNeon(OpsConformance):
    driver, options = "cpu", {"level": "neon"}


@pytest.mark.slow
class TestOpsNeonBf16(OpsConformance):
    driver, options = "cpu", {"level": "neon_bf16"}


@pytest.mark.xdist_group("communicators")
class TestShm(CommunicatorConformance):
    driver = "shm"


class TestInt8(QuantizationConformance):
    driver = "int8"


@pytest.mark.slow
class TestInt8Scalar(QuantizationConformance):
    driver, options = "int8", {"level": "scalar"}


class TestInt4(QuantizationConformance):
    driver = "int4"


@pytest.mark.slow
class TestInt4Small(QuantizationConformance):
    driver, options = "int4", {"group_size": 128, "head_bits": 4}


@pytest.mark.slow
class TestInt4Scalar(QuantizationConformance):
    driver, options = "int4", {"level": "scalar"}


class TestGGUF(QuantizationConformance):
    driver, inputs = "gguf_cpu", 512
    kind: ClassVar[str] = "Q4_K"
    stored: ClassVar[dict[str, Any]] = {
        "quant_method": "gguf",
        "types": dict.fromkeys(["layer", "layer.0", "layer.1", "layer.2"], "Q4_K"),
    }

    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        blocks, meant = random_blocks(cls.kind, *weight.shape, seed=len(name))
        stands_for = torch.from_numpy(meant).float()
        return {f"{name}.weight": torch.from_numpy(blocks), f"{name}.bias": bias}, stands_for


class TestGGUFOf6Bits(TestGGUF):
    kind = "Q6_K"
    stored: ClassVar[dict[str, Any]] = {
        "quant_method": "gguf",
        "types": dict.fromkeys(["layer", "layer.0", "layer.1", "layer.2"], "Q6_K"),
    }


@pytest.mark.slow
class TestAttentionThoroughly(AttentionThorough, AttentionConformance):
    driver = "cpu"


@pytest.mark.slow
class TestOpsThoroughly(OpsThorough, OpsConformance):
    driver = "cpu"


@pytest.mark.slow
@pytest.mark.xdist_group("communicators")
class TestShmThoroughly(CommunicatorThorough, CommunicatorConformance):
    driver = "shm"
