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

    Layers with equal specs form a group; those of a draft model have theirs beside the target's, and those of kind
    "encoder", which keep nothing, none. The group with the largest need fixes `page_bytes`; the other groups put as
    many tokens into a page as fit, in whole multiples of the hash unit. Groups of kind "cross" come last.

    Args:
        kv_specs: one a layer, in order.
        block_size: tokens of the hash unit.
        kv_itemsize: bytes of one cached element.
        tokens_per_page: for each kind, what the attention driver's card answered: a multiple of `block_size`.
        size: ranks over which KV heads are divided (replicated where there are fewer heads than ranks).

    Raises:
        ConfigError: a size is not positive, a spec contradicts its kind, or KV heads, states or tokens cannot be
            divided as asked.
    """
    if block_size < 1 or kv_itemsize < 1 or not kv_specs:
        raise ConfigError(
            f"a KV cache of {len(kv_specs)} layers with block_size={block_size}", "sizes must be positive"
        )
    layers_of: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(kv_specs):
        if spec.kind != "encoder":
            layers_of.setdefault(spec, []).append(layer)
    if not layers_of:
        return KVLayout(block_size=block_size, page_bytes=0, groups=())

    for spec in layers_of:
        _check(spec)
    if all(spec.kind == "cross" for spec in layers_of):
        raise ConfigError("a KV cache of cross-attention alone", "no layer keeps anything of the decoder's own tokens")
    layers_of = dict(sorted(layers_of.items(), key=lambda item: item[0].kind == "cross"))
    wanted = {spec: _wanted_tokens(spec, block_size, tokens_per_page) for spec in layers_of}
    page_bytes = max(
        _layer_bytes(spec, wanted[spec], kv_itemsize, size) * len(layers) for spec, layers in layers_of.items()
    )
    tokens = {
        spec: page_bytes // (_layer_bytes(spec, wanted[spec], kv_itemsize, size) * len(layers)) * wanted[spec]
        for spec, layers in layers_of.items()
        if spec.kind != "state"
    }
    # A state takes the same room after any number of tokens: its blocks are as long as the longest of the others, so
    # that it makes the match unit no longer.
    longest = max((n for spec, n in tokens.items() if spec.kind != "cross"), default=0)
    groups = []
    for index, (spec, layers) in enumerate(layers_of.items()):
        tokens_per_block = tokens.get(spec) or max(longest, wanted[spec])
        groups.append(
            KVGroup(
                index=index,
                kind=spec.kind,
                layers=tuple(layers),
                num_kv_heads=kv_heads_on_rank(spec.num_kv_heads, size) if spec.kind != "state" else 0,
                head_size=spec.head_size,
                sliding_window=spec.sliding_window,
                tokens_per_block=tokens_per_block,
                layer_bytes=_layer_bytes(spec, tokens_per_block, kv_itemsize, size),
                draft=spec.draft,
                rope_size=spec.rope_size,
            )
        )
    return KVLayout(block_size=block_size, page_bytes=page_bytes, groups=tuple(groups))


def match_unit(layout: KVLayout) -> int:
    """Tokens of the shortest prefix that ends a block in every group that grows with it: cached prefixes are multiples
    of it."""
    growing = layout.groups[: layout.num_growing]
    return math.lcm(layout.block_size, *(group.tokens_per_block for group in growing))


def _check(spec: KVSpec) -> None:
    """Raise ConfigError where a spec contradicts its kind."""
    attends = spec.num_kv_heads > 0 and spec.head_size > 0
    fits = {
        "full": attends and spec.sliding_window is None,
        "sliding": attends and spec.sliding_window is not None and spec.sliding_window > 0,
        "mla": spec.num_kv_heads == 1 and 0 <= spec.rope_size < spec.head_size and spec.sliding_window is None,
        "cross": attends and spec.sliding_window is None,
        "state": spec.num_kv_heads == spec.head_size == 0 and spec.sliding_window is None,
    }
    foreign = (spec.state_bytes > 0) != (spec.kind == "state") or (spec.rope_size != 0 and spec.kind != "mla")
    if foreign or not fits.get(spec.kind):
        raise ConfigError(f"a KV cache for {spec}", f"that is no form of kind {spec.kind!r}", "tell the model's author")


def _layer_bytes(spec: KVSpec, num_tokens: int, itemsize: int, size: int) -> int:
    """Bytes of one layer of a rank in a page with so many tokens."""
    if spec.kind == "state":
        if spec.state_bytes % size:
            raise ConfigError(
                f"divide a state of {spec.state_bytes} bytes over {size} ranks", "it cannot be divided evenly"
            )
        return spec.state_bytes // size
    vectors = 1 if spec.kind == "mla" else 2 * kv_heads_on_rank(spec.num_kv_heads, size)
    return vectors * spec.head_size * itemsize * num_tokens


def _wanted_tokens(spec: KVSpec, block_size: int, tokens_per_page: Mapping[str, int]) -> int:
    wanted = tokens_per_page.get(spec.kind, block_size)
    if wanted < 1 or wanted % block_size:
        raise ConfigError(
            f"block_size={block_size}",
            f"the attention driver for {spec.kind} layers wants {wanted} tokens a page, not a multiple of it",
            f"use --block-size {wanted}" if wanted >= 1 else "choose another attention driver",
        )
    return wanted
