"""What blocks stand for, beside ggml's own package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf_maker import BLOCK_TYPES, random_blocks

from engine_gguf.dequantize import dequantize
from engine_kit.ggml_blocks import TYPES


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks(kind: str) -> None:
    """The same bits in float32, and near it in float64 and bfloat16."""
    blocks = random_blocks(kind, 5, 768, seed=3)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    stored = torch.from_numpy(blocks).view(5, -1, TYPES[kind].bytes)
    assert torch.equal(dequantize(stored, kind), expected)
    assert torch.allclose(dequantize(stored, kind, torch.float64), expected.double(), rtol=1e-5, atol=1e-7)
    assert torch.equal(dequantize(stored, kind, torch.bfloat16), expected.bfloat16())


def test_the_table_is_ggmls() -> None:
    for name, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType[name]
        assert (kind.number, (kind.inputs, kind.bytes)) == (int(theirs), tuple(gguf.GGML_QUANT_SIZES[theirs]))


def test_plain_types_and_experts() -> None:
    plain = torch.randn(3, 8)
    assert torch.equal(dequantize(plain.half(), "F16"), plain.half().float())
    blocks = np.stack([random_blocks("Q4_0", 4, 64, seed=i) for i in range(3)])
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0))
    assert torch.equal(dequantize(torch.from_numpy(blocks).view(3, 4, 2, 18), "Q4_0"), expected)
