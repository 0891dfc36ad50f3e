"""From the model's layers to the pool's form: groups of equal layers, and how many tokens a page holds for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from engine.types.errors import ConfigError
from engine.types.kv import KVGroup, KVLayout, kv_heads_on_rank
from engine.types.model import KVSpec


def make_layout(
    kv_specs: Sequence[KVSpec],
    *,
    block_size: int,
    kv_itemsize: int,
    tokens_per_page: Mapping[str, int],
    size: int = 1,
) -> KVLayout:
    """Cut one pool for all layers.

    Layers with equal specs form a group. The group with the largest need fixes `page_bytes`; the other groups put as
    many tokens into a page as fit, in whole multiples of the hash unit.

    Args:
        kv_specs: one a layer, in order.
        block_size: tokens of the hash unit.
        kv_itemsize: bytes of one cached element.
        tokens_per_page: for each kind, what the attention driver's card answered: a multiple of `block_size`.
        size: ranks over which KV heads are divided (replicated where there are fewer heads than ranks).

    Raises:
        ConfigError: a size is not positive, or KV heads or tokens cannot be divided as asked.
    """
    if block_size < 1 or kv_itemsize < 1 or not kv_specs:
        raise ConfigError(
            f"a KV cache of {len(kv_specs)} layers with block_size={block_size}", "sizes must be positive"
        )
    layers_of: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(kv_specs):
        layers_of.setdefault(spec, []).append(layer)

    token_bytes = {  # of one token in one layer, K and V
        spec: 2 * kv_heads_on_rank(spec.num_kv_heads, size) * spec.head_size * kv_itemsize for spec in layers_of
    }
    wanted = {spec: _wanted_tokens(spec, block_size, tokens_per_page) for spec in layers_of}
    page_bytes = max(token_bytes[spec] * len(layers) * wanted[spec] for spec, layers in layers_of.items())
    groups = []
    for index, (spec, layers) in enumerate(layers_of.items()):
        fitting = page_bytes // (token_bytes[spec] * len(layers))
        tokens_per_block = fitting // wanted[spec] * wanted[spec]
        groups.append(
            KVGroup(
                index=index,
                kind=spec.kind,
                layers=tuple(layers),
                num_kv_heads=kv_heads_on_rank(spec.num_kv_heads, size),
                head_size=spec.head_size,
                sliding_window=spec.sliding_window,
                tokens_per_block=tokens_per_block,
                layer_bytes=tokens_per_block * token_bytes[spec],
            )
        )
    return KVLayout(block_size=block_size, page_bytes=page_bytes, groups=tuple(groups))


def match_unit(layout: KVLayout) -> int:
    """Tokens of the shortest prefix that ends a block in every group: cached prefixes are multiples of it."""
    return math.lcm(layout.block_size, *(group.tokens_per_block for group in layout.groups))


def _wanted_tokens(spec: KVSpec, block_size: int, tokens_per_page: Mapping[str, int]) -> int:
    wanted = tokens_per_page.get(spec.kind, block_size)
    if wanted < 1 or wanted % block_size:
        raise ConfigError(
            f"block_size={block_size}",
            f"the attention driver for {spec.kind} layers wants {wanted} tokens a page, not a multiple of it",
            f"use --block-size {wanted}" if wanted >= 1 else "choose another attention driver",
        )
    return wanted
