"""What happens to the prefix cache, for those who keep track of it: routers, caches outside, dashboards.

The events and their fields are those of vLLM's KV events; `group` tells the KV groups of a model with several apart.
Only full blocks are told: the partly filled last block of a sequence is nobody else's to find by its hash.
"""

from __future__ import annotations

import msgspec


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
