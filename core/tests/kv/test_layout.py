"""How layers become groups and pages."""

import pytest

from engine.kv.layout import make_layout, match_unit
from engine.types.errors import ConfigError
from engine.types.model import KVSpec

FULL = KVSpec(kind="full", num_kv_heads=4, head_size=8)
SLIDING = KVSpec(kind="sliding", num_kv_heads=2, head_size=8, sliding_window=32)
UNIT = {"full": 16, "sliding": 16}


def test_equal_layers_form_one_group() -> None:
    layout = make_layout([FULL] * 3, block_size=16, kv_itemsize=2, tokens_per_page=UNIT)
    (group,) = layout.groups
    assert group.layers == (0, 1, 2) and group.tokens_per_block == 16
    assert group.layer_bytes == 2 * 4 * 8 * 2 * 16
    assert layout.page_bytes == 3 * group.layer_bytes


def test_a_smaller_group_fits_a_whole_multiple_of_the_unit() -> None:
    layout = make_layout([FULL, SLIDING, FULL, SLIDING], block_size=16, kv_itemsize=4, tokens_per_page=UNIT)
    full, sliding = layout.groups
    assert (full.index, sliding.index) == (0, 1)
    assert full.layers == (0, 2) and sliding.layers == (1, 3)
    assert (full.tokens_per_block, sliding.tokens_per_block) == (16, 32)
    assert layout.page_bytes == len(full.layers) * full.layer_bytes == len(sliding.layers) * sliding.layer_bytes
    assert match_unit(layout) == 32


def test_what_does_not_fit_evenly_is_left_unused() -> None:
    layout = make_layout([FULL, FULL, FULL, SLIDING, SLIDING], block_size=8, kv_itemsize=4, tokens_per_page={})
    full, sliding = layout.groups
    assert sliding.tokens_per_block == 24  # 3 * 4 heads over 2 * 2 heads
    layout = make_layout([FULL, FULL, FULL, *[SLIDING] * 4], block_size=8, kv_itemsize=4, tokens_per_page={})
    full, sliding = layout.groups
    assert sliding.tokens_per_block == 8 and 4 * sliding.layer_bytes < layout.page_bytes == 3 * full.layer_bytes


def test_a_kernel_may_want_longer_pages() -> None:
    layout = make_layout([FULL], block_size=16, kv_itemsize=2, tokens_per_page={"full": 64})
    assert layout.groups[0].tokens_per_block == 64 and layout.block_size == 16
    with pytest.raises(ConfigError, match="24 tokens a page"):
        make_layout([FULL], block_size=16, kv_itemsize=2, tokens_per_page={"full": 24})


def test_heads_are_divided_over_ranks_or_replicated() -> None:
    def heads(size: int) -> int:
        return make_layout([FULL], block_size=16, kv_itemsize=2, tokens_per_page=UNIT, size=size).groups[0].num_kv_heads

    assert (heads(1), heads(2), heads(4), heads(8)) == (4, 2, 1, 1)
    for size in (3, 6):  # neither divided nor copied evenly
        with pytest.raises(ConfigError, match=f"over {size} ranks"):
            heads(size)


def test_no_layers_and_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError):
        make_layout([], block_size=16, kv_itemsize=2, tokens_per_page=UNIT)
    with pytest.raises(ConfigError):
        make_layout([FULL], block_size=0, kv_itemsize=2, tokens_per_page=UNIT)


MLA = KVSpec(kind="mla", num_kv_heads=1, head_size=24)
STATE = KVSpec(kind="state", num_kv_heads=0, head_size=0, state_bytes=5000)


def test_a_latent_vector_is_kept_once_and_by_every_rank() -> None:
    for size in (1, 2, 4):
        layout = make_layout([MLA] * 3, block_size=16, kv_itemsize=2, tokens_per_page={}, size=size)
        (group,) = layout.groups
        assert group.layer_bytes == 24 * 2 * 16 and layout.page_bytes == 3 * group.layer_bytes
        assert (group.num_kv_heads, group.window) == (1, None)


def test_a_state_takes_the_same_room_after_any_number_of_tokens() -> None:
    layout = make_layout([FULL, STATE, FULL, STATE], block_size=16, kv_itemsize=2, tokens_per_page={})
    full, state = layout.groups
    assert layout.page_bytes == 2 * 5000 == 2 * state.layer_bytes
    assert full.tokens_per_block == 10000 // (2 * 4 * 8 * 2 * 2) // 16 * 16 == 32 and full.layers == (0, 2)
    small = KVSpec(kind="state", num_kv_heads=0, head_size=0, state_bytes=64)
    layout = make_layout([FULL, small, SLIDING], block_size=16, kv_itemsize=2, tokens_per_page={})
    assert [group.tokens_per_block for group in layout.groups] == [16, 32, 32] and match_unit(layout) == 32
    (alone,) = make_layout([STATE], block_size=16, kv_itemsize=2, tokens_per_page={}, size=2).groups
    assert (alone.tokens_per_block, alone.layer_bytes, alone.window) == (16, 2500, 2)
    with pytest.raises(ConfigError, match="state of 5000 bytes over 3 ranks"):
        make_layout([STATE], block_size=16, kv_itemsize=2, tokens_per_page={}, size=3)


def test_a_draft_models_layers_have_a_group_of_their_own() -> None:
    draft = KVSpec(kind="full", num_kv_heads=4, head_size=8, draft=True)
    layout = make_layout([FULL, FULL, draft], block_size=16, kv_itemsize=2, tokens_per_page=UNIT)
    target, drafts = layout.groups
    assert (target.layers, target.draft) == ((0, 1), False) and (drafts.layers, drafts.draft) == ((2,), True)
    assert drafts.tokens_per_block == 32


def test_the_encoders_tokens_have_a_group_behind_the_others_which_bounds_no_match() -> None:
    cross = KVSpec(kind="cross", num_kv_heads=1, head_size=8)
    layout = make_layout([cross, FULL, cross, FULL, STATE], block_size=16, kv_itemsize=2, tokens_per_page=UNIT)
    full, state, last = layout.groups
    assert [group.layers for group in layout.groups] == [(1, 3), (4,), (0, 2)]
    assert [group.index for group in layout.groups] == [0, 1, 2] and layout.num_growing == 2
    assert last.tokens_per_block == layout.page_bytes // (2 * 2 * 8 * 2) // 16 * 16 > full.tokens_per_block
    assert match_unit(layout) == full.tokens_per_block == state.tokens_per_block
    with pytest.raises(ConfigError, match="cross-attention alone"):
        make_layout([cross], block_size=16, kv_itemsize=2, tokens_per_page=UNIT)


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec(kind="full", num_kv_heads=0, head_size=8),
        KVSpec(kind="full", num_kv_heads=1, head_size=8, sliding_window=4),
        KVSpec(kind="sliding", num_kv_heads=1, head_size=8),
        KVSpec(kind="mla", num_kv_heads=2, head_size=8),
        KVSpec(kind="mla", num_kv_heads=1, head_size=8, rope_size=8),
        KVSpec(kind="full", num_kv_heads=2, head_size=8, rope_size=4),
        KVSpec(kind="state", num_kv_heads=0, head_size=0),
        KVSpec(kind="full", num_kv_heads=1, head_size=8, state_bytes=8),
        KVSpec(kind="cross", num_kv_heads=1, head_size=8, sliding_window=4),
        KVSpec(kind="tree", num_kv_heads=1, head_size=8),  # type: ignore[arg-type]
    ],
)
def test_a_spec_that_contradicts_its_kind_is_refused(spec: KVSpec) -> None:
    with pytest.raises(ConfigError, match="no form of kind"):
        make_layout([spec], block_size=16, kv_itemsize=2, tokens_per_page={})
