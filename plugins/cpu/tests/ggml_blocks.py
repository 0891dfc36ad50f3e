"""Random weights in ggml's blocks, and what they stand for by ggml's own package."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has its float16s."""
TYPES = tuple(_HALVES)


def random_blocks(
    kind: str, outputs: int, inputs: int, seed: int = 0, fill: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(uint8 [O, blocks, bytes], float64 [O, I]). fill: of all bytes but the scales' float16s; None: random ones."""
    rng = np.random.default_rng([seed, outputs, inputs])
    each, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (outputs, inputs // each, width), dtype=np.uint8)
    if fill is not None:
        blocks[:] = fill
    for at in _HALVES[kind]:
        scales = (rng.normal(size=(outputs, inputs // each)) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks, gguf.dequantize(blocks.reshape(outputs, -1), Kind[kind]).astype(np.float64)
