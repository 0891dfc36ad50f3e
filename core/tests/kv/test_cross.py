"""The encoder's blocks are found whole or not at all, and a prefix counts only beside them."""

from __future__ import annotations

import numpy as np
import pytest
from cores import CROSS, FULL, layout_of, sliding
from evictors import lru
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.hashing import extend_hashes, root_hash
from engine.kv.manager import KVManager
from engine.kv.matching import Sequence
from engine.kv.reservation import Reservation
from engine.types.kv import KVLayout
from engine.types.model import KVSpec
from engine.types.request import EncoderInput

TOKENS = np.arange(13, dtype=np.int32)
ENCODER = EncoderInput(hash=b"sound", num_tokens=10)
NARROW = KVSpec(kind="cross", num_kv_heads=1, head_size=4)
LAYOUTS = [layout_of(FULL, CROSS), layout_of(sliding(5), CROSS, NARROW, CROSS), layout_of(FULL, CROSS, sliding(6))]


def manager(layout: KVLayout) -> KVManager:
    return KVManager(layout, num_pages=40, max_num_seqs=2, max_model_len=16, evictor=lru(40), max_encoder_len=12)


def sequence(kv: KVManager, encoder: EncoderInput | None = ENCODER) -> Sequence:
    return Sequence([], kv.root_hash(None, encoder=encoder), TOKENS, encoder=encoder)


def enter(kv: KVManager, slot: int, asks: Sequence) -> tuple[int, bool, list[int]]:
    """Tokens found, whether the encoder's blocks are filled, and their pages."""
    step = Reservation(kv)
    hit = step.match(asks, TOKENS.size - 1)
    before = step.num_available
    wanted = kv.pages_for_prompt(TOKENS.size, TOKENS.size, hit)
    assert step.fit_chunk(-1, hit.num_tokens, TOKENS.size - hit.num_tokens, hit) == TOKENS.size - hit.num_tokens
    step.enter(slot, asks, hit)
    step.chunk(slot, hit.num_tokens, TOKENS.size - hit.num_tokens, asks.hashes)
    assert before - step.num_available <= wanted
    step.allocate(1, [asks, asks], np.stack([TOKENS, TOKENS]))
    kv.check_slot(slot, TOKENS.size, asks.encoder)
    return hit.num_tokens, hit.fills_encoder, [page for table in kv.cross.tables for page in table.live(slot).tolist()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_request_filled_the_next_shares(layout: KVLayout) -> None:
    kv = manager(layout)
    first = sequence(kv)
    found, fills, pages = enter(kv, 0, first)
    assert (found, fills, len(pages)) == (0, True, kv.cross.pages(ENCODER)) and 0 not in pages
    found, fills, shared = enter(kv, 1, sequence(kv))  # while the first still runs
    assert not fills and shared == pages
    assert (kv.pool.refs[pages] == 2).all()
    for slot in (0, 1):
        kv.free_slot(slot, 1, TOKENS.size, [first, first], np.stack([TOKENS, TOKENS]))
    kv.step_done(1)
    kv.check_integrity()
    assert kv.pool.num_held == 0
    found, fills, again = enter(kv, 0, sequence(kv))
    assert found == TOKENS.size - 1 and not fills and again == pages


@pytest.mark.parametrize(
    "other", [None, EncoderInput(hash=b"noise", num_tokens=10), EncoderInput(hash=b"sound", num_tokens=9)]
)
def test_another_encoder_input_finds_nothing(other: EncoderInput | None) -> None:
    kv = manager(LAYOUTS[0])
    first = sequence(kv)
    _, _, pages = enter(kv, 0, first)
    kv.free_slot(0, 0, TOKENS.size, [first, None], np.stack([TOKENS, TOKENS]))
    found, fills, mine = enter(kv, 0, sequence(kv, other))
    assert found == 0 and fills == (other is not None) and not set(mine) & set(pages)
    assert len(mine) == (0 if other is None else 3)


@given(layout=st.sampled_from(LAYOUTS), data=st.data())
@settings(max_examples=80, deadline=None)
def test_all_blocks_of_the_encoder_or_none(layout: KVLayout, data: st.DataObject) -> None:
    kv = manager(layout)
    asks = sequence(kv)
    extend_hashes(asks.hashes, asks.root, TOKENS, kv.block_size)
    keys = [
        *(kv.index.keys(asks.hashes[:3], table.index) for table in kv.growing),
        *(kv.cross.keys(asks, table) for table in kv.cross.tables),
    ]
    of_encoder = [key for of_table in keys[len(kv.growing) :] for key in of_table]
    missing = data.draw(st.sets(st.sampled_from(of_encoder), max_size=2))
    for table, of_table in enumerate(keys):
        there = [key for key in of_table if key not in missing]
        counts = [len(there) if t == table else 0 for t in range(len(kv.tables))]
        for key, page in zip(there, kv.pool.take(counts)[table].tolist(), strict=True):
            kv.index.add([key], [page])
            kv.pool.commit(np.array([page]), np.array([0]))
    hit = kv.match(asks, 12)
    cross = hit.tables[len(kv.growing) :]
    assert hit.fills_encoder == bool(missing)
    assert hit.num_tokens == (0 if missing else 12)
    for of_table, wanted in zip(cross, keys[len(kv.growing) :], strict=True):
        assert of_table.keys == wanted
        assert of_table.pages.tolist() == ([] if missing else [kv.index.page_of(key) for key in wanted])


def test_roots_tell_encoder_inputs_apart() -> None:
    roots = [
        root_hash(salt, encoder=encoder)
        for salt in (None, "a")
        for encoder in (
            None,
            ENCODER,
            EncoderInput(hash=b"soun", num_tokens=10),
            EncoderInput(hash=b"sound", num_tokens=1),
        )
    ]
    assert len(set(roots)) == len(roots)
