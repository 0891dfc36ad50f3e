"""What counts as cached: full tables need the whole prefix, sliding ones the last window, and all must agree."""

from __future__ import annotations

import numpy as np
from cores import FULL, layout_of, sliding
from evictors import lru
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.hashing import extend_hashes, root_hash
from engine.kv.manager import KVManager
from engine.kv.matching import Sequence
from engine.kv.tables import BlockTable
from engine.types.kv import KVLayout

TOKENS = np.arange(48, dtype=np.int32)


def manager(layout: KVLayout, num_pages: int = 64) -> KVManager:
    return KVManager(layout, num_pages=num_pages, max_num_seqs=2, max_model_len=64, evictor=lru(num_pages))


def cached(kv: KVManager, present: list[list[bool]]) -> list[bytes]:
    """Put the blocks of TOKENS that `present[table]` names into the index."""
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(None), TOKENS, kv.block_size)
    for t in range(len(kv.tables)):
        keys = kv.index.keys(hashes, t)
        wanted = [key for key, there in zip(keys, present[t], strict=False) if there]
        counts = [0] * len(kv.tables)
        counts[t] = len(wanted)
        for key, page in zip(wanted, kv.pool.take(counts)[t].tolist(), strict=True):
            kv.index.add([key], [page])
            kv.pool.commit(np.array([page]), np.array([0]))
    return hashes


def by_definition(kv: KVManager, present: list[list[bool]], max_tokens: int) -> int:
    """The longest length at which every table has all the blocks that the next query sees."""

    def agreed(table: BlockTable, there: list[bool], length: int) -> bool:
        first = 0 if table.window is None else max(0, length - table.window + 1) // table.tokens_per_block
        last = length // table.tokens_per_block
        return length % table.tokens_per_block == 0 and all(there[first:last]) and len(there) >= last

    lengths = range(min(max_tokens, TOKENS.size) + 1)
    return max(n for n in lengths if all(agreed(t, p, n) for t, p in zip(kv.tables, present, strict=True)))


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_longest_agreed_length_is_found(data: st.DataObject) -> None:
    layout = data.draw(
        st.sampled_from(
            [
                layout_of(FULL),
                layout_of(sliding(6)),
                layout_of(FULL, sliding(6)),
                layout_of(FULL, sliding(1)),
                layout_of(FULL, sliding(9, heads=1), sliding(14), block_size=2),
                layout_of(FULL, FULL, *[sliding(9, heads=4)] * 3, block_size=2),
            ]
        )
    )
    kv = manager(layout, 128)
    present = []
    for table in kv.tables:
        n = TOKENS.size // table.tokens_per_block
        missing = data.draw(st.sets(st.integers(0, n - 1), max_size=3))
        present.append([block not in missing for block in range(n)])
    hashes = cached(kv, present)
    max_tokens = data.draw(st.integers(0, TOKENS.size))
    hit = kv.match(Sequence(hashes, root_hash(None), TOKENS), max_tokens).whole_blocks()
    expected = by_definition(kv, present, max_tokens)
    assert hit.num_tokens == expected
    for table, found in zip(kv.tables, hit.tables, strict=True):
        if expected:
            assert found.first_block == table.first_needed(expected)
            assert found.first_block + found.pages.size == expected // table.tokens_per_block
        assert (found.pages > 0).all() and found.pages.size == len(found.keys)


def test_a_prompt_is_never_matched_whole() -> None:
    kv = manager(layout_of(FULL))
    hashes = cached(kv, [[True] * 12])
    assert kv.match(Sequence(hashes[:4], root_hash(None), TOKENS[:16]), 16).num_tokens == 16
    assert (
        kv.match(Sequence(hashes[:4], root_hash(None), TOKENS[:16]), 15).num_tokens == 12
    )  # the scheduler asks for one token less than there are
