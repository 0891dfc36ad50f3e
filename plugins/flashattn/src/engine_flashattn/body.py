"""The body of attention driver `flash`: pages, plans and writes are its own, the attention a library's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer, AttentionNeed, CaptureLevel, LayerCache
from engine.types.errors import ConfigError
from engine.types.kv import KVGroup
from engine_flashattn.call import Attend, KernelCall
from engine_flashattn.installed import Facts, facts
from engine_flashattn.plan import FlashPlan
from engine_flashattn.sinks import apply_sinks
from engine_flashattn.table import IMPLEMENTATIONS, NO_BLOCK_TABLE, Implementation, choose
from engine_flashattn.write import write_pages

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.types.start import WorkerStart
    from engine_flashattn.card import FlashAttentionOptions

ALIGNMENT = 16
"""Bytes that the libraries load at once: pages and rows of heads must begin at multiples of it."""


class Bound(NamedTuple):
    """An implementation, imported."""

    implementation: Implementation
    attend: Attend


class FlashAttentionBody:
    """Attention over pages [tokens_per_block, num_kv_heads, head_size] of K, then of V."""

    plans_by_launches = True
    """What the host works out of rows of one token is the same in all steps of so many."""
    capture_level: CaptureLevel = "uniform"
    """What is launched for rows of equally many queries follows from shapes alone: libraries are told the longest row
    that a block table can hold, and read lengths and tables on the device. Where rows differ, the most queries of one
    count too. FlashAttention 3 takes a bound for them and leaves alone what comes after the last row (vLLM captures its
    steps with prompts, too): where it serves all layers this is "any"."""

    def __init__(self, context: WorkerContext) -> None:
        self._options = cast("FlashAttentionOptions", context.options)
        self._bound: dict[AttentionNeed, Bound] = {}
        self._of_group: dict[int, Implementation] = {}
        self._attends: dict[str, Attend] = {}
        self._facts = self.facts()
        asked = IMPLEMENTATIONS.get(self._options.implementation)
        if asked is not None and asked.name not in self._facts.versions:
            raise ConfigError(
                f"attention.implementation {asked.name}",
                f"{asked.title} is not installed" if asked.pip else NO_BLOCK_TABLE,
                asked.pip or "use a torch whose varlen_attn does, 2.12 or later",
            )
        if asked is not None:  # one that cannot be used is known before weights are loaded
            if reasons := asked.gpu_reasons(self._facts):
                raise ConfigError(
                    f"attention.implementation {asked.name}",
                    f"{asked.title} cannot serve this GPU: {'; '.join(reasons)}",
                    "leave it to auto, or choose another attention driver",
                )
            self._attends[asked.name] = self.load(asked)
        third = IMPLEMENTATIONS["fa3"]
        best = asked is None and third.name in self._facts.versions and not third.gpu_reasons(self._facts)
        if asked is third or (best and all(choose(need, self._facts) is third for need in _needs(context.start))):
            self.capture_level = "any"

    def cache(self, need: AttentionNeed, group: KVGroup, pages: torch.Tensor) -> LayerCache:
        """Views [num_pages, tokens_per_block, num_kv_heads, head_size] of uint8 pages [num_pages, layer_bytes].

        Raises ConfigError where the implementation cannot read such pages.
        """
        chosen = self._of(need).implementation
        if group.tokens_per_block % chosen.page_multiple:
            raise ConfigError(
                f"attention.implementation {chosen.name}",
                f"{chosen.title} reads pages of a multiple of {chosen.page_multiple} tokens, "
                f"and these hold {group.tokens_per_block}",
                f"use --block-size {chosen.page_multiple}",
            )
        dtype: torch.dtype = getattr(torch, need.kv_dtype)
        shape = (2, group.tokens_per_block, group.num_kv_heads, group.head_size)
        elements = shape[0] * shape[1] * shape[2] * shape[3]
        if pages.stride(0) % ALIGNMENT or pages.data_ptr() % ALIGNMENT:
            raise ConfigError(
                f"attention.implementation {chosen.name}",
                f"pages lie {pages.stride(0)} bytes apart, not a multiple of {ALIGNMENT}",
                "choose another attention driver",
            )
        both = pages[:, : elements * dtype.itemsize].view(dtype).unflatten(1, shape)
        self._of_group[group.index] = chosen
        return LayerCache(both[:, 0], both[:, 1])

    def plan(self, batch: AttentionBatch, group: KVGroup, out: FlashPlan | None = None) -> FlashPlan:
        """The arrays that the libraries read; see `FlashPlan`."""
        if out is not None:
            out.fill(batch, group)
            return out
        chosen = self._of_group.get(group.index)
        own_pages = group.sliding_window is not None or chosen is None or chosen.reads_past_end
        return FlashPlan.of(batch, group, own_pages)

    def write(
        self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, cache: LayerCache, plan: FlashPlan
    ) -> None:
        """Store k, v [T, num_kv_heads, head_size]."""
        del layer
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        write_pages(k, v, cache.k, cache.v, plan.slot_mapping)

    def read(self, group: KVGroup, cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `engine.interfaces.attention.AttentionBackend.read`."""
        where = (slots // group.tokens_per_block, slots % group.tokens_per_block)
        return cache.k[where], cache.v[where]

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: LayerCache,
        plan: FlashPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """See `engine.interfaces.attention.AttentionBackend.forward`."""
        encoder = layer.group.kind == "encoder"
        real, window = plan.num_tokens, layer.group.sliding_window
        if plan.first is None:
            plan.first = layer.index
        keys, values = (k[:real], v[:real]) if encoder else (cache.k, cache.v)
        if encoder and window is not None:
            keys, values = _seen_by_some(keys, values)
        call = KernelCall(
            q=_rows(q[:real]),
            k=_rows(keys),
            v=_rows(values),
            out=out[:real],
            plan=plan,
            encoder=encoder,
            scale=layer.scale,
            window=-1 if window is None else window - 1,
            soft_cap=layer.need.soft_cap or 0.0,
            alibi_slopes=layer.alibi_slopes,
            num_splits=self._options.num_splits,
            opens=plan.first == layer.index,
            want_sums=lse is not None or layer.sinks is not None,
        )
        sums = self._of(layer.need).attend(call)
        if layer.sinks is not None and sums is not None:
            apply_sinks(call.out, sums, layer.sinks, None if lse is None else lse[:real])
        elif lse is not None and sums is not None:
            lse[:real].copy_(sums.transpose(0, 1))
        if plan.padding is not None:
            out.masked_fill_(plan.padding, 0)
            if lse is not None:
                lse.masked_fill_(plan.padding[:, :, 0], 0)
        elif real < len(q):
            out[real:].zero_()
            if lse is not None:
                lse[real:].zero_()

    def facts(self) -> Facts:
        """What this machine has; of its GPUs, the one that is computed on."""
        found = facts()
        return found._replace(capabilities=(torch.cuda.get_device_capability(),)) if found.capabilities else found

    def load(self, implementation: Implementation) -> Attend:
        """Import a library. Raises ConfigError where that fails, though it is installed."""
        try:
            attend: Attend = importlib.import_module(implementation.module).load()
        except (ImportError, OSError, AttributeError) as error:
            raise ConfigError(
                f"attention.implementation {implementation.name}",
                f"{implementation.title} is installed and cannot be imported: {error}",
                "install a build for this torch, CUDA and GPU, or name another implementation",
            ) from error
        return attend

    def _of(self, need: AttentionNeed) -> Bound:
        """The implementation that serves a kind of layer."""
        found = self._bound.get(need)
        if found is None:
            chosen = self._choose(need)
            if chosen.name not in self._attends:
                self._attends[chosen.name] = self.load(chosen)
            found = self._bound[need] = Bound(chosen, self._attends[chosen.name])
        return found

    def _choose(self, need: AttentionNeed) -> Implementation:
        asked = self._options.implementation
        if asked == "auto":
            chosen = choose(need, self._facts)
            if chosen is None:
                major, minor = max(self._facts.capabilities)
                raise ConfigError(
                    "attention flash",
                    f"nothing installed serves the GPU that is computed on (compute capability {major}.{minor})",
                    "let CUDA_VISIBLE_DEVICES name another GPU, or choose another attention driver",
                )
            return chosen
        reasons = IMPLEMENTATIONS[asked].reasons(need, self._facts)
        if reasons:
            raise ConfigError(
                f"attention.implementation {asked}",
                f"{IMPLEMENTATIONS[asked].title} cannot serve layers of kind '{need.kind}': {'; '.join(reasons)}",
                "leave it to auto, or choose another attention driver",
            )
        return IMPLEMENTATIONS[asked]


def _needs(start: WorkerStart) -> list[AttentionNeed]:
    """What is asked of attention for each group of layers: which library serves it decides what can be captured, and
    that is asked before the layers' caches are."""
    sites, models = start.sites, (start.model, *(draft.model for draft in start.drafts))
    return [
        AttentionNeed.of(
            sites[group.sites[0]],
            size=start.parallel.tp,
            dtype=start.dtype,
            kv_dtype=start.kv_cache_dtype or start.dtype,
            device=start.device,
            block_size=start.layout.block_size,
            features=frozenset(models[group.model].attention_features),
            batch_invariant=start.batch_invariant,
        )
        for group in start.layout.groups
    ]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _seen_by_some(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that not every query of their row sees, as they can be multiplied by 0: values that are not
    finite are zeros, their keys NaN."""
    broken = ~v.isfinite().all(dim=-1, keepdim=True)
    return k.masked_fill(broken, torch.nan), v.masked_fill(broken, 0)
