"""Quantization `fp8` through the suite of engine-sdk: interpreted on the processor, and on a GPU where there is one."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")
pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")

from scaled import needs_scales_of_rows

from engine_sdk.conformance import QuantizationConformance


@needs_scales_of_rows
class TestFp8Interpreted(QuantizationConformance):
    driver, stand_in, operations = "fp8", "interpreted", "triton"
    quick = r"^(?!test_very_wide_layers)"  # 4096 inputs take the interpreter seconds


@pytest.mark.gpu
class TestFp8(QuantizationConformance):
    driver, device, operations = "fp8", "cuda", "triton"
