"""The rank that most likely holds the prompt's prefix.

The idea is that of SGLang's cache-aware router: follow the longest prefix while the ranks are about evenly loaded, and
the load where they are not. The rule here:

1. The load of each rank is that of `least_loaded`. Ranks whose load is at most `slack` (or `slack_ratio` of the least
   load, where that is more) above the least are candidates; so no rank is ever further ahead than that.
2. Of the candidates the one that holds the longest prefix takes the request, if that is at least `min_match` of the
   prompt; among equals the less loaded one.
3. Otherwise the least loaded rank takes it.

Where that leaves several, the one that holds the fewest blocks takes it, so that prompts which have nothing in common
spread over the caches.

What ranks hold is a guess: the prompts that were sent to each, by block, the least recently used forgotten first, as
many as fit into a rank's KV cache. Answers join a conversation's prefix when the next turn brings them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from engine_parallel.routers.load import load_of

if TYPE_CHECKING:
    from engine.interfaces.context import RouterContext
    from engine.interfaces.router import RankLoad
    from engine.types.request import EngineRequest
    from engine_parallel.routers.card import PrefixOptions


class PrefixIndex:
    """The blocks that one rank probably holds, by the hash of everything up to their end.

    Args:
        capacity: blocks; the least recently used are forgotten, of one prompt its end first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """How many blocks from the front are there."""
        blocks = self._blocks
        return next((i for i, name in enumerate(hashes) if name not in blocks), len(hashes))

    def insert(self, hashes: Sequence[int]) -> None:
        """These blocks are there now, and used last; of more than fit, the first."""
        blocks = self._blocks
        for name in reversed(hashes[: self._capacity]):
            blocks[name] = None
            blocks.move_to_end(name)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Nothing is there any more."""
        self._blocks.clear()


class PrefixAware:
    """See `engine.interfaces.router.Router` and the module."""

    def __init__(self, context: RouterContext) -> None:
        self._options = cast("PrefixOptions", context.options)
        self._block_size = context.block_size
        capacity = max(1, context.cached_tokens // context.block_size)
        self._held = [PrefixIndex(capacity) for _ in range(context.num_ranks)]

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        hashes = block_hashes(requests[0].prompt_token_ids, self._block_size, requests[0].cache_salt)
        chosen = self._choose(hashes, ranks)
        self._held[chosen].insert(hashes)
        return chosen

    def rank_died(self, rank: int) -> None:
        self._held[rank].clear()

    def cache_reset(self) -> None:
        for held in self._held:
            held.clear()

    def _choose(self, hashes: Sequence[int], ranks: Sequence[RankLoad]) -> int:
        options = self._options
        loads = {rank.rank: load_of(rank, options.kv_weight) for rank in ranks}
        least = min(loads.values())
        most = least + max(options.slack, options.slack_ratio * least)
        matched = {rank: self._held[rank].match(hashes) for rank, load in loads.items() if load <= most}
        best = min(matched, key=lambda rank: (-matched[rank], loads[rank], len(self._held[rank]), rank))
        if hashes and matched[best] >= options.min_match * len(hashes):
            return best
        return min(loads, key=lambda rank: (loads[rank], len(self._held[rank]), rank))


def block_hashes(tokens: Sequence[int], block_size: int, cache_salt: str | None) -> list[int]:
    """One hash for each full block, of everything up to its end; different salts have nothing in common."""
    count = len(tokens) // block_size
    parent = 0 if cache_salt is None else xxh3_64_intdigest(b"salt " + cache_salt.encode("utf-8", "surrogatepass"))
    data = np.array(tokens[: count * block_size], "<i4").tobytes()
    hashes: list[int] = []
    for offset in range(0, len(data), 4 * block_size):
        parent = xxh3_64_intdigest(data[offset : offset + 4 * block_size], seed=parent)
        hashes.append(parent)
    return hashes
