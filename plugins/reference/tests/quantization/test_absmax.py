"""The reference driver's rounding, against its definition, one number at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.quantization import QuantizationNeed
from engine_reference.quantization_absmax.absmax import AbsmaxBody, dequantize, quantize
from engine_reference.quantization_absmax.card import AbsmaxOptions, AbsmaxQuantization
from engine_sdk.conformance.quantization import whole_layer


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.integers(1, 4), inputs=st.integers(1, 40), bits=st.sampled_from([4, 8]), group=st.integers(0, 9),
    seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1.0, 300.0]),
)  # fmt: skip
def test_every_code_is_the_nearest(outputs: int, inputs: int, bits: int, group: int, seed: int, scale: float) -> None:
    """Of all codes, none is nearer to the weight; the farthest weight of a group is exact but for the scale's own."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * scale
    weight[0, : inputs // 2] = 0
    codes, scales = quantize(weight, bits, group)
    assert scales.dtype == (torch.float16 if group else torch.float32)
    size, half = group or inputs, 2 ** (bits - 1)
    assert codes.shape == (outputs, -(-inputs // size) * size)
    back = dequantize(codes, scales.double(), inputs, bits, group)
    levels = torch.arange(-half, half, dtype=torch.float64)
    for o in range(outputs):
        for start in range(0, inputs, size):
            part = weight[o, start : start + size]
            farthest = max(part.tolist(), key=lambda w: (abs(w), w))
            step = scales[o, start // size]
            assert step == (torch.tensor(farthest) / -half).to(scales.dtype)
            nearest = (part.double().unsqueeze(1) - levels * step.double()).abs().amin(dim=1)
            found = (back[o, start : start + size] - part.double()).abs()
            assert (found <= nearest + 1e-6 * abs(farthest)).all()


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (8, 32), (4, 32), (4, 7), (4, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_that_of_the_rounded_weights(bits: int, group: int, bias: bool) -> None:
    body = AbsmaxBody(SimpleNamespace(options=AbsmaxOptions(bits=bits, group_size=group)))  # type: ignore[arg-type]
    weight = torch.randn(11, 45, generator=torch.Generator().manual_seed(1)).bfloat16()
    added = torch.arange(11.0, dtype=torch.float64) if bias else None
    x = torch.randn(3, 45, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    packed = body.pack(*whole_layer("linear", weight, added))
    codes, scales = quantize(weight, bits, group)
    expected = x @ dequantize(codes, scales.double(), 45, bits, group).T + (0 if added is None else added)
    kept = added.clone() if added is not None else None
    weight.zero_()  # nothing of it is kept
    if added is not None:
        added.zero_()
    torch.testing.assert_close(body.linear(x, packed), expected, rtol=1e-12, atol=1e-12)
    assert body.linear(x.bfloat16(), packed._replace(bias=None)).dtype == torch.bfloat16
    per_byte = 8 // bits
    assert body.packed_bytes(packed) == -(-codes.numel() // 11 // per_byte) * 11 + scales.nbytes + (
        0 if kept is None else kept.nbytes
    )


def test_what_it_cannot_round() -> None:
    need = QuantizationNeed(kind="linear", dtype="bfloat16", stored_dtype="float8_e4m3fn", device="cpu")
    (reason,) = AbsmaxQuantization.unsupported(need)
    assert "float8_e4m3fn" in reason
