"""The groups of layers that attention is planned for: those of the KV layout, and those that keep no cache."""

from __future__ import annotations

from engine.types.kv import KVGroup, KVLayout, kv_heads_on_rank
from engine.types.model import ModelDescription


def attention_groups(layout: KVLayout, model: ModelDescription, size: int = 1) -> tuple[KVGroup, ...]:
    """The layout's groups, then one for each form of layer that keeps nothing: its pages hold no byte.

    size: ranks over which heads are divided.
    """
    uncached: dict[tuple[int, int], list[int]] = {}
    for layer, spec in enumerate(model.kv_specs):
        if spec.kind == "encoder":
            uncached.setdefault((spec.num_kv_heads, spec.head_size), []).append(layer)
    return layout.groups + tuple(
        KVGroup(
            index=len(layout.groups) + index,
            kind="encoder",
            layers=tuple(layers),
            num_kv_heads=kv_heads_on_rank(num_kv_heads, size),
            head_size=head_size,
            sliding_window=None,
            tokens_per_block=layout.block_size,
            layer_bytes=0,
        )
        for index, ((num_kv_heads, head_size), layers) in enumerate(uncached.items())
    )
