"""The one form in which every library is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_flashattn.plan import FlashPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """Attention of one layer in one step, of real tokens alone.

    Args:
        q: [T, num_q_heads, head_size]; the last dimension contiguous, as that of all others.
        k, v: pages [num_pages, tokens_per_block, num_kv_heads, head_size]; of an encoder the step's own
            [T, num_kv_heads, head_size].
        out: like q; to be written in full.
        plan: the step's.
        encoder: each query sees its whole row, or `window` keys to each side, and k and v are no pages. Otherwise it
            sees its own key and those before.
        scale: scores are q . k * scale.
        window: keys before its own that a query sees; -1 for all.
        soft_cap: 0.0 for none.
        alibi_slopes: float32 [num_q_heads].
        num_splits: into how many pieces a row's keys are divided at most; 0 leaves it to the library.
        opens: it is the first of the step's calls that are given this plan.
        want_sums: whether the logarithms of the sums are needed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    plan: FlashPlan
    encoder: bool
    scale: float
    window: int
    soft_cap: float
    alibi_slopes: torch.Tensor | None
    num_splits: int
    opens: bool
    want_sums: bool


Attend = Callable[[KernelCall], torch.Tensor | None]
"""Writes `out`; where they are wanted, the answer is the natural logarithms of the sums of exponentials of the scores,
float32 [num_q_heads, T]."""
