"""How the KV cache is cut, who holds its pages, and what happens to its prefixes.

One pool of equal pages, `[num_pages, page_bytes]`, is shared by all layers. Layers whose keys and values live equally
long share a *table*: a page holds the same tokens of all of them, and a request has one block table for them together.
Of a table's layers those of one form are a *group*, for which attention is planned. Layer i of a group owns bytes
`[offset + i * layer_bytes, offset + (i + 1) * layer_bytes)` of the table's pages. Page 0 is never given out: padding
rows write there.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from engine.types.errors import ConfigError
from engine.types.model import KVKind

NULL_PAGE = 0
"""The page that nobody owns."""
ALIGNMENT = 16
"""Bytes: pages, and the states in them, begin at multiples of it."""
MARK_BYTES = 32
"""Of a page's mark, where it has one."""
MOST_HOLDERS = 255
"""What more holders than these are told as: a page has one byte."""


class KVTable(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose pages live equally long, and that therefore share one block table for each request.

    Args:
        index: its place in `KVLayout.tables`.
        kind: of its layers; "full" also of those of kind "mla", whose pages live as long.
        window: tokens whose blocks a query at position p needs, p - window + 1 .. p; None for all. After a "state" it
            is two: the state after token p - 1 is read, that after token p is written.
        tokens_per_block: tokens of a block, `KVLayout.block_size`, on all ranks that share sequences together. A page
            of a "state" table holds one state of each layer: after the last token of its block, or after the last
            token computed.
    """

    index: int
    kind: KVKind
    window: int | None
    tokens_per_block: int


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one table whose cache and attention have one form.

    Args:
        index: its place in `KVLayout.groups`.
        kind: see `engine.types.model.KVKind`.
        sites: which these are: places in `WorkerStart.sites`, in order.
        num_kv_heads, head_size: on this rank.
        sliding_window: None but for "sliding" and "encoder"; in tokens that are on this rank.
        tokens_per_block: in one page of its table: of a block those on this rank.
        layer_bytes: bytes of one layer in one page.
        table: whose pages; None for kind "encoder", which keeps nothing, and "cross", whose pages are no table's.
        offset: bytes from a page's beginning to its first layer.
        model: 0 for the model itself, 1 and more for draft models.
        num_q_heads: on this rank; 0 for kind "state".
        rope_size: of "mla", see `engine.types.model.KVSpec`.
        page_format: how the layers' bytes lie, see `engine.interfaces.attention.AttentionCard.page_format`; "" where
            nobody says.
    """

    index: int
    kind: KVKind
    sites: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    tokens_per_block: int
    layer_bytes: int
    table: int | None = 0
    offset: int = 0
    model: int = 0
    num_q_heads: int = 0
    rope_size: int = 0
    page_format: str = ""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's form, equal on every rank that shares layers.

    Args:
        block_size: tokens of a block of every table; prefixes are found in whole multiples of it, and beyond them by
            copying a page of each table.
        page_bytes: bytes of one page: what the largest table needs.
        tables: in a fixed order; block tables and new pages are indexed by it.
        groups: in the order of their tables, those of none last; plans of attention are indexed by it.
        mark_bytes: at each page's end, among `page_bytes`: no layer's, but a mark of what the page holds (--kv-canary).
    """

    block_size: int
    page_bytes: int
    tables: tuple[KVTable, ...]
    groups: tuple[KVGroup, ...]
    mark_bytes: int = 0

    def marked(self) -> KVLayout:
        """The same, with marks."""
        return replace(self, page_bytes=self.page_bytes + MARK_BYTES, mark_bytes=MARK_BYTES)

    def shared(self, ranks: int) -> KVLayout:
        """The layout of ranks that share sequences: a block has a page of each of them."""
        tables = [replace(table, tokens_per_block=table.tokens_per_block * ranks) for table in self.tables]
        groups = [
            replace(group, sliding_window=group.sliding_window and group.sliding_window // ranks)
            for group in self.groups
        ]
        return replace(self, block_size=self.block_size * ranks, tables=tuple(tables), groups=tuple(groups))

    def on_stage(self, sites: Collection[int]) -> KVLayout:
        """The layout of a rank that has only these of the layers: the same tables and blocks in smaller pages. Groups
        of which no layer is left are left out."""
        ends = [0] * len(self.tables)
        groups: list[KVGroup] = []
        for group in self.groups:
            kept = tuple(site for site in group.sites if site in sites)
            if not kept:
                continue
            offset = group.offset
            if group.table is not None:
                offset = ends[group.table]
                ends[group.table] += len(kept) * group.layer_bytes
            groups.append(replace(group, index=len(groups), sites=kept, offset=offset))
        page_bytes = -(-max(ends, default=0) // ALIGNMENT) * ALIGNMENT
        page_bytes += self.mark_bytes if page_bytes else 0
        return replace(self, page_bytes=page_bytes, groups=tuple(groups))


def kv_heads_on_rank(num_kv_heads: int, size: int) -> int:
    """How many KV heads each of `size` ranks holds: equally many, or one of which several ranks have a copy.

    Raises ConfigError: the heads can be neither divided nor copied evenly.
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
        retained: uint8 [pages]; 1 where requests asked that it be kept (`kv_retention`).
    """

    holders: bytes
    cached: bytes
    retained: bytes


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Blocks that follow one another have got cached content; whoever asks for it from the next plan on finds it.

    Args:
        block_hashes: one a block, in order; each covers the block and all before it (`engine.kv.hashing`).
        parent_block_hash: of the block before the first; None at a sequence's start.
        token_ids: `block_size` for each block.
        block_size: tokens of one block.
        table: the KV table's index.
        lora_id: the adapter that computed them; None for the model alone.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    table: int = 0
    lora_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """The content of these blocks of a KV table, in no order, was given up."""

    block_hashes: list[bytes]
    table: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="AllBlocksCleared"):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""What happens to the prefix cache, for those who keep track of it: routers, caches outside, dashboards.

The events and their fields are those of vLLM's KV events; `table` tells the KV tables of a model with several apart.
Only full blocks are told: the partly filled last block of a sequence is nobody else's to find by its hash.
"""
