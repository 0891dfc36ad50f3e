"""The body of driver `flash` over the doubles of its libraries."""

from __future__ import annotations

import torch
from flash_cards import HOPPER
from flash_libraries import double_of

from engine.interfaces.attention import AttentionLayer, LayerCache
from engine_flashattn.body import FlashAttentionBody
from engine_flashattn.call import Attend
from engine_flashattn.installed import Facts
from engine_flashattn.plan import FlashPlan
from engine_flashattn.table import Implementation


class KernelBody(FlashAttentionBody):
    """Doubles in the libraries' place; writes by the kernel, in Triton's interpreter."""

    def facts(self) -> Facts:
        return HOPPER

    def load(self, implementation: Implementation) -> Attend:
        return double_of(implementation)


class DoubleBody(KernelBody):
    """The same with writes as `write_reference` has them, which takes a hundredth of the interpreter's time."""

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: FlashPlan
    ) -> None:
        write_reference(k, v, cache.k, cache.v, plan.slot_mapping)


def write_reference(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """What `engine_flashattn.write.write_pages` does, in torch."""
    per_block = k_pages.shape[1]
    finite = v.isfinite()
    keys = torch.where(finite.all(dim=-1, keepdim=True), k, torch.nan)
    page, place = slots // per_block, slots % per_block
    v_pages.index_put_((page[place == 0],), torch.zeros((), dtype=v_pages.dtype))
    k_pages[page, place] = keys.to(k_pages.dtype)
    v_pages[page, place] = torch.where(finite, v, 0).to(v_pages.dtype)
