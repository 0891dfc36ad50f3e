"""How the KV cache is cut, who holds its pages, and what happens to its prefixes.

One pool of equal pages is shared by groups of layers.
The pool is `[num_pages, page_bytes]`. A page holds `tokens_per_block` tokens of *all layers of one group*; layer i of
the group owns bytes `[i * layer_bytes, (i + 1) * layer_bytes)` of it. Page 0 is never given out: padding rows write
there.
"""

from __future__ import annotations

import msgspec

from engine.types.errors import ConfigError
from engine.types.model import KVKind

NULL_PAGE = 0
"""The page that nobody owns."""
MOST_HOLDERS = 255
"""What more holders than these are told as: a page has one byte."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose cache has one form, and therefore one block table for each request.

    Args:
        index: its place in `KVLayout.groups`.
        kind: see `engine.types.model.KVKind`.
        layers: indices of the model's layers, in order.
        num_kv_heads, head_size: on this rank.
        sliding_window: None but for "sliding".
        tokens_per_block: tokens in one page of this group; a whole multiple of `KVLayout.block_size`. A page of a
            "state" group holds one state: after the last token of its block, or after the last token computed. Those
            of a "cross" group are the encoder's tokens.
        layer_bytes: bytes of one layer in one page.
        draft: the layers are a draft model's.
        rope_size: of "mla", see `engine.types.model.KVSpec`.
    """

    index: int
    kind: KVKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    tokens_per_block: int
    layer_bytes: int
    draft: bool = False
    rope_size: int = 0

    @property
    def window(self) -> int | None:
        """Tokens whose blocks a query at position p needs, p - window + 1 .. p; None for all. After a "state" it is
        two: the state after token p - 1 is read, that after token p is written."""
        return 2 if self.kind == "state" else self.sliding_window


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's form, equal on every rank.

    Args:
        block_size: tokens of the hash unit: prefixes are matched in whole multiples of it.
        page_bytes: bytes of one page: what the largest group needs for `block_size` tokens.
        groups: in a fixed order, those of kind "cross" last; block tables and plans are indexed by it.
    """

    block_size: int
    page_bytes: int
    groups: tuple[KVGroup, ...]

    @property
    def num_growing(self) -> int:
        """The first groups, whose blocks hold a sequence's own tokens; the others hold those of its encoder input."""
        return sum(group.kind != "cross" for group in self.groups)


def kv_heads_on_rank(num_kv_heads: int, size: int) -> int:
    """How many KV heads each of `size` ranks holds: equally many, or one of which several ranks have a copy.

    Raises:
        ConfigError: the heads can be neither divided nor copied evenly.
    """
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"divide {num_kv_heads} KV heads over {size} ranks",
            "they can be neither divided nor copied evenly",
            f"use a number of ranks that divides {num_kv_heads}, or a multiple of it",
        )
    return max(1, num_kv_heads // size)


class PageMap(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds the pages of one engine core's KV cache. The null page, which is never given out, is left out.

    Args:
        holders: uint8 [pages]; the page's reference count: how many sequences' block tables name it, `MOST_HOLDERS` at
            most. With prefix caching, requests that begin alike hold the same pages.
        cached: uint8 [pages]; 1 where the prefix cache can find the page's content, held or not.
    """

    holders: bytes
    cached: bytes


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Blocks that follow one another have got cached content; whoever asks for it from the next plan on finds it.

    Args:
        block_hashes: one a block, in order; each covers the block and all before it (`engine.kv.hashing`).
        parent_block_hash: of the block before the first; None at a sequence's start.
        token_ids: `block_size` for each block.
        block_size: tokens of one block of this group.
        group: the KV group's index.
        lora_id: the adapter that computed them; None for the model alone.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    group: int = 0
    lora_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """The content of these blocks was given up.

    Args:
        block_hashes: in no order.
        group: the KV group's index.
    """

    block_hashes: list[bytes]
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="AllBlocksCleared"):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""What happens to the prefix cache, for those who keep track of it: routers, caches outside, dashboards.

The events and their fields are those of vLLM's KV events; `group` tells the KV groups of a model with several apart.
Only full blocks are told: the partly filled last block of a sequence is nobody else's to find by its hash.
"""
