"""The card of the block-sparse attention."""

from __future__ import annotations

from importlib.util import find_spec

from pydantic import Field

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_cuda.attention_reasons import FP8, wrong_capability
from engine_cuda.attention_triton.card import DTYPES as WITH_KERNELS
from engine_cuda.attention_triton.card import LARGEST_HEAD, TritonAttentionOptions
from engine_cuda.interpreter import wrong_device
from engine_cuda.seen import RAN

DTYPES = {**WITH_KERNELS, "float64": 8}
"""With the bytes of an element; the last in plain torch alone."""
FEATURES = frozenset({"kv_index", "lse"})


class BlockSparseOptions(TritonAttentionOptions):
    """Options of `block_sparse`. A query in block b of its row sees of each block c <= b the keys up to its own.

    Attributes:
        block: tokens of a block of the pattern, by their places in the row; pages may have any other size.
        local: a query sees so many blocks up to its own: c > b - local.
        stride: of all blocks before, every such one: c + 1 is a multiple of it; 0 none.
        sinks: the first blocks, which every query sees: c < sinks.
        homo_head: all heads see the same blocks; if not, head h has its strided blocks h * max(1, stride // heads)
            blocks earlier, so that the heads together see all.
        plain: compute in plain torch where there are kernels too: slow, for comparisons.
    """

    block: int = Field(default=64, ge=1)
    local: int = Field(default=16, ge=1)
    stride: int = Field(default=8, ge=0)
    sinks: int = Field(default=1, ge=0)
    homo_head: bool = True
    plain: bool = False


class BlockSparseAttention(AttentionCard):
    """Attention to the blocks of a fixed pattern alone: local ones, every n-th, the first. Approximate; by name."""

    priority = -20
    by_name = True
    framework = "torch"
    kinds = frozenset({"full"})
    Options = BlockSparseOptions
    body = "engine_cuda.attention_block_sparse.body:BlockSparseBody"

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        reasons: list[str] = []
        dtypes = DTYPES
        if not wrong_device(need.device):
            dtypes = WITH_KERNELS
            reasons.extend(wrong_capability(need))
            if find_spec("triton") is None:
                reasons.append("Triton is not installed (pip install triton)")
            if need.head_size > LARGEST_HEAD:
                reasons.append(f"heads of {need.head_size} elements are not served, only up to {LARGEST_HEAD}")
        if need.kind not in cls.kinds:
            reasons.append(f"layers of kind '{need.kind}' are not served, only full")
        if need.sliding_window is not None:
            reasons.append("a sliding window beside the pattern is not served")
        if need.soft_cap is not None:
            reasons.append("a soft cap of scores is not served")
        if need.dtype not in dtypes:
            reasons.append(f"dtype {need.dtype} is not one of {', '.join(dtypes)}")
        if need.kv_dtype not in (*dtypes, FP8):
            reasons.append(f"a cache of {need.kv_dtype} is not served, only of {', '.join((*dtypes, FP8))}")
        elif need.kv_dtype != need.dtype and dtypes.get(need.kv_dtype, 1) >= dtypes.get(need.dtype, 0):
            reasons.append(f"a cache of {need.kv_dtype} under queries of {need.dtype} saves no memory")
        reasons.extend(f"feature '{feature}' is not served" for feature in sorted(need.features - FEATURES))
        return reasons

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        said = ["it leaves out most keys of long rows: a model that was trained to see all of them answers otherwise"]
        if not wrong_device(need.device):
            said.append(RAN)
        return said
