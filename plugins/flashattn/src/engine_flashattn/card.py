"""The card of attention driver `flash`."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.attention import AttentionCard, AttentionNeed
from engine_flashattn.installed import facts
from engine_flashattn.table import IMPLEMENTATIONS, KINDS, TORCH, choose, common_reasons, machine_reasons

LIBRARY_PRIORITY, TORCH_PRIORITY = 40, 3
"""With a FlashAttention library, ahead of engine-flashinfer and of the Triton kernels of engine-cuda; with torch's own
alone, which divides no long row over the GPU, behind both."""


class FlashAttentionOptions(BaseModel):
    """Options of `flash`.

    Attributes:
        implementation: the library to compute with: FlashAttention 2, 3 or 4, or torch's own `varlen_attn`; "auto"
            takes the first of fa3, fa4, fa2 and torch that serves the layer on this GPU. One that is named and cannot
            stops the start.
        num_splits: into how many pieces a row's keys are divided at most to fill the GPU where rows are few; 0 leaves
            it to the library, 1 makes a row's result independent of what stands beside it. torch's own never divides.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    implementation: Literal["auto", "fa2", "fa3", "fa4", "torch"] = "auto"
    num_splits: int = Field(default=0, ge=0, le=128)


class FlashAttention(AttentionCard):
    """Attention by whichever FlashAttention is installed: 3, 4, 2, or torch's own."""

    priority = LIBRARY_PRIORITY if set(facts().versions) - {TORCH.name} else TORCH_PRIORITY
    framework = "torch"
    kinds = KINDS
    Options = FlashAttentionOptions
    body = "engine_flashattn.body:FlashAttentionBody"

    @classmethod
    def tokens_per_page(cls, need: AttentionNeed) -> int:
        """The block size, rounded up to what the implementation's pages must be a multiple of."""
        chosen = choose(need, facts())
        return need.block_size if chosen is None else math.lcm(need.block_size, chosen.page_multiple)

    @classmethod
    def unsupported(cls, need: AttentionNeed) -> list[str]:
        found = common_reasons(need)
        if any(reason.startswith("it needs an NVIDIA GPU") for reason in found):
            return found
        machine = machine_reasons(facts())
        if machine:
            return [*found, *machine]
        if not found and choose(need, facts()) is None:
            found = [
                f"{one.title}: {reason}" for one in IMPLEMENTATIONS.values() for reason in one.reasons(need, facts())
            ]
        return found

    @classmethod
    def remarks(cls, need: AttentionNeed) -> list[str]:
        chosen = choose(need, facts())
        if chosen is None:
            return []
        tokens = cls.tokens_per_page(need)
        found = [
            f"it computes with {chosen.title} ({facts().versions[chosen.name]}) here",
            "it was tested against doubles of the libraries alone, and never run on a GPU",
        ]
        if need.kind != "encoder" and tokens != need.block_size:
            found.append(f"pages hold {tokens} tokens, since {chosen.title} reads whole multiples of 256 alone")
        if chosen is TORCH:
            found.append("torch's own divides no long row over the GPU: a library is faster where rows are few")
        return found
