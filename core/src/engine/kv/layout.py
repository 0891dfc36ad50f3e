"""From the model's layers to the pool's form: tables of layers that live equally long, and groups of equal layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from engine.types.errors import ConfigError
from engine.types.kv import ALIGNMENT, KVGroup, KVLayout, KVTable, kv_heads_on_rank
from engine.types.model import KVKind, KVSpec, StateTensor

_COST_OF_A_TABLE = 0.015
"""What a table more has to save, as a share of the pool: it costs the host work in every step."""
_BESIDE = ("encoder", "cross")
"""Kinds of layer that have no pages in the pool: they keep nothing, or what the encoder of a request left them."""
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}


class _Lifetime(NamedTuple):
    """Layers whose pages live equally long.

    Args:
        kind, window: as in `KVTable`.
        sites: places in the specs, the layers with the most bytes first.
        sizes: bytes of each layer in a page.
    """

    kind: KVKind
    window: int | None
    sites: list[int]
    sizes: list[int]

    def largest(self, count: int) -> int:
        """Bytes of the largest of `count` tables to which layers are dealt in turn: of that which gets the first."""
        return sum(self.sizes[::count])


def make_layout(
    sites: Sequence[KVSpec],
    *,
    block_size: int,
    kv_itemsize: int,
    tokens_per_page: Mapping[str, int],
    scale_bytes: Mapping[str, int] | None = None,
    size: int = 1,
) -> KVLayout:
    """Cut one pool for all layers.

    Layers that live equally long share tables whatever their heads, those of draft models with the target's. Where one
    lifetime has more layers than another, they are dealt in turn to several tables of about equal bytes, so that blocks
    of the same tokens fill the pages of all tables, and a prefix ends a block in all of them at once. A block has the
    tokens that the drivers want; beside states, which take the same room after any number of tokens, as many as make a
    layer's keys and values as large as a state. Layers of kinds "encoder" and "cross" are in groups, but in no table.

    Args:
        sites: `ModelDescription.sites`, and those of draft models behind them.
        block_size: tokens of a block, at least.
        kv_itemsize: bytes of one cached element.
        tokens_per_page, scale_bytes: for each kind, what the attention driver's card answered; the first is a multiple
            of `block_size`.
        size: ranks over which heads are divided (KV heads are replicated where there are fewer of them than ranks).

    Raises:
        ConfigError: a size is not positive, a spec contradicts its kind, or heads, states or tokens cannot be divided
            as asked.
    """
    if block_size < 1 or kv_itemsize < 1 or not sites:
        raise ConfigError(f"a KV cache of {len(sites)} layers with block_size={block_size}", "sizes must be positive")
    for spec in dict.fromkeys(sites):
        _check(spec)
    kinds = dict.fromkeys(spec.kind for spec in sites)
    tokens = math.lcm(block_size, *(_wanted_tokens(kind, block_size, tokens_per_page) for kind in kinds))
    items = {kind: (kv_itemsize, (scale_bytes or {}).get(kind, 0)) for kind in kinds}
    layer_bytes = [_layer_bytes(spec, tokens, *items[spec.kind], size) for spec in sites]
    states = [used for spec, used in zip(sites, layer_bytes, strict=True) if spec.kind == "state"]
    others = [used for spec, used in zip(sites, layer_bytes, strict=True) if spec.kind not in ("state", *_BESIDE)]
    if states and others:
        tokens *= max(1, max(states) // max(others))
        layer_bytes = [_layer_bytes(spec, tokens, *items[spec.kind], size) for spec in sites]
    lifetimes = _lifetimes(sites, layer_bytes)
    page_bytes, num_tables = _cut(lifetimes)
    tables: list[KVTable] = []
    groups: list[KVGroup] = []
    for lifetime, count in zip(lifetimes, num_tables, strict=True):
        for first in range(count):
            table = KVTable(index=len(tables), kind=lifetime.kind, window=lifetime.window, tokens_per_block=tokens)
            groups += _groups(sites, lifetime.sites[first::count], len(tables), tokens, size, len(groups), layer_bytes)
            tables.append(table)
    beside = [site for site, spec in enumerate(sites) if spec.kind in _BESIDE]
    groups += _groups(sites, beside, None, tokens, size, len(groups), layer_bytes)
    return KVLayout(block_size=tokens, page_bytes=page_bytes, tables=tuple(tables), groups=tuple(groups))


def _lifetimes(sites: Sequence[KVSpec], layer_bytes: Sequence[int]) -> list[_Lifetime]:
    """In the order of their first layers."""
    found: dict[tuple[KVKind, int | None], list[int]] = {}
    for site, spec in enumerate(sites):
        if spec.kind not in _BESIDE:
            kind: KVKind = "full" if spec.kind == "mla" else spec.kind
            found.setdefault((kind, 2 if kind == "state" else spec.sliding_window), []).append(site)
    lifetimes = []
    for (kind, window), members in found.items():
        members.sort(key=lambda site: (-layer_bytes[site], sites[site].model))
        lifetimes.append(_Lifetime(kind, window, members, [layer_bytes[site] for site in members]))
    return lifetimes


def _cut(lifetimes: list[_Lifetime]) -> tuple[int, list[int]]:
    """Bytes of a page, and how many tables each lifetime gets: what costs the least room and work."""
    used = sum(sum(lifetime.sizes) for lifetime in lifetimes)
    least = max((lifetime.sizes[0] for lifetime in lifetimes), default=0)
    cuts: list[tuple[float, int, list[int]]] = []
    for size in {lifetime.largest(n) for lifetime in lifetimes for n in range(1, len(lifetime.sites) + 1)}:
        if size >= least:
            counts = [next(n for n in range(1, len(each.sites) + 1) if each.largest(n) <= size) for each in lifetimes]
            cuts.append((sum(counts) * (size / used + _COST_OF_A_TABLE), size, counts))
    _, size, counts = min(cuts, default=(0.0, 0, []))
    return -(-size // ALIGNMENT) * ALIGNMENT, counts


def _groups(
    sites: Sequence[KVSpec],
    members: list[int],
    table: int | None,
    tokens: int,
    size: int,
    first: int,
    layer_bytes: Sequence[int],
) -> list[KVGroup]:
    """The groups of a table's layers, one for each form, numbered from `first`."""
    forms: dict[KVSpec, list[int]] = {}
    for site in members:
        forms.setdefault(msgspec.structs.replace(sites[site], layer=None), []).append(site)
    groups: list[KVGroup] = []
    offset = 0
    for spec, of_form in forms.items():
        ranks = size if spec.divided else 1
        groups.append(
            KVGroup(
                index=first + len(groups),
                kind=spec.kind,
                sites=tuple(sorted(of_form)),
                num_kv_heads=kv_heads_on_rank(spec.num_kv_heads, ranks) if spec.kind != "state" else 0,
                head_size=spec.head_size,
                sliding_window=spec.sliding_window,
                tokens_per_block=tokens,
                layer_bytes=layer_bytes[of_form[0]],
                table=table,
                offset=offset,
                model=spec.model,
                num_q_heads=spec.num_q_heads // ranks,
                rope_size=spec.rope_size,
            )
        )
        offset += layer_bytes[of_form[0]] * len(of_form)
    return groups


def _check(spec: KVSpec) -> None:
    """Raise ConfigError where a spec contradicts its kind."""
    attends = spec.num_kv_heads > 0 and spec.head_size > 0
    window = spec.sliding_window
    fits = {
        "full": attends,
        "sliding": attends and window is not None and window > 0,
        "mla": spec.num_kv_heads == 1 and 0 <= spec.rope_size < spec.head_size,
        "encoder": attends and (window is None or window > 0),
        "cross": attends,
        "state": spec.num_kv_heads == spec.head_size == 0 and len(spec.states) > 0,
    }
    foreign = (
        (window is not None and spec.kind not in ("sliding", "encoder"))
        or (spec.states and spec.kind != "state")
        or (spec.rope_size and spec.kind != "mla")
        or any(state.dtype not in ITEM_BYTES for state in spec.states)
    )
    if foreign or not fits.get(spec.kind):
        raise ConfigError(f"a KV cache for {spec}", f"that is no form of kind {spec.kind!r}", "tell the model's author")


def _layer_bytes(spec: KVSpec, num_tokens: int, itemsize: int, scale: int, size: int) -> int:
    """Bytes of one layer of a rank in a page with so many tokens."""
    size = size if spec.divided else 1
    if spec.kind == "encoder":
        return 0
    if spec.kind == "state":
        return sum(-(-_state_bytes(state, size) // ALIGNMENT) * ALIGNMENT for state in spec.states)
    vectors = 1 if spec.kind == "mla" else 2 * kv_heads_on_rank(spec.num_kv_heads, size)
    return vectors * (spec.head_size * itemsize + scale) * num_tokens


def _state_bytes(state: StateTensor, size: int) -> int:
    divided = 1 if state.divided_dim is None else size
    if state.divided_dim is not None and state.shape[state.divided_dim] % size:
        raise ConfigError(
            f"divide the state '{state.name}' {list(state.shape)} over {size} ranks",
            f"its dimension {state.divided_dim} cannot be divided evenly",
            f"use a number of ranks that divides {state.shape[state.divided_dim]}",
        )
    return math.prod(state.shape) // divided * ITEM_BYTES[state.dtype]


def _wanted_tokens(kind: str, block_size: int, tokens_per_page: Mapping[str, int]) -> int:
    wanted = tokens_per_page.get(kind, block_size)
    if wanted < 1 or wanted % block_size:
        raise ConfigError(
            f"block_size={block_size}",
            f"the attention driver for {kind} layers wants {wanted} tokens a page, not a multiple of it",
            f"use --block-size {wanted}" if wanted >= 1 else "choose another attention driver",
        )
    return wanted
