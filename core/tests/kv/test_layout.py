"""How layers become tables, groups and pages."""

from __future__ import annotations

import pytest

from engine.kv.layout import make_layout
from engine.types.errors import ConfigError
from engine.types.kv import KVLayout
from engine.types.model import KVSpec, ModelDescription, StateTensor

FULL = KVSpec(kind="full", num_kv_heads=4, head_size=8)
SLIDING = KVSpec(kind="sliding", num_kv_heads=2, head_size=8, sliding_window=32)
MLA = KVSpec(kind="mla", num_kv_heads=1, head_size=24)


def state(*tensors: tuple[tuple[int, ...], str], divided: int | None = 0) -> KVSpec:
    states = (
        StateTensor(name=str(i), shape=shape, dtype=dtype, divided_dim=divided)
        for i, (shape, dtype) in enumerate(tensors)
    )
    return KVSpec(kind="state", num_kv_heads=0, head_size=0, states=tuple(states))


STATE = state(((1250,), "float32"))


def layout_of(
    *sites: KVSpec, block_size: int = 16, size: int = 1, tokens_per_page: dict[str, int] | None = None
) -> KVLayout:
    return make_layout(sites, block_size=block_size, kv_itemsize=2, tokens_per_page=tokens_per_page or {}, size=size)


def tables_of(layout: KVLayout) -> list[tuple[str, tuple[int, ...]]]:
    """The kind of each table, and its layers."""
    sites: list[list[int]] = [[] for _ in layout.tables]
    for group in layout.groups:
        if group.table is not None:
            sites[group.table] += group.sites
    return [(table.kind, tuple(sorted(own))) for table, own in zip(layout.tables, sites, strict=True)]


def check(layout: KVLayout) -> None:
    """Layers of a table lie beside one another in its pages, and no page has room for more than the fullest needs."""
    assert [table.index for table in layout.tables] == list(range(len(layout.tables)))
    assert [group.index for group in layout.groups] == list(range(len(layout.groups)))
    ends = [0] * len(layout.tables)
    for group in layout.groups:
        if group.table is not None:
            table = layout.tables[group.table]
            assert group.offset == ends[group.table] and group.tokens_per_block == table.tokens_per_block
            ends[group.table] += group.layer_bytes * len(group.sites)
    assert all(table.tokens_per_block == layout.block_size for table in layout.tables)
    assert layout.page_bytes == -(-max(ends, default=0) // 16) * 16


def test_equal_layers_form_one_group() -> None:
    layout = layout_of(FULL, FULL, FULL)
    (table,), (group,) = layout.tables, layout.groups
    assert group.sites == (0, 1, 2) and table.tokens_per_block == group.tokens_per_block == 16
    assert group.layer_bytes == 2 * 4 * 8 * 2 * 16
    assert layout.page_bytes == 3 * group.layer_bytes


def test_layers_that_live_equally_long_share_a_table_whatever_their_form() -> None:
    other = KVSpec(kind="full", num_kv_heads=2, head_size=8)
    draft = KVSpec(kind="full", num_kv_heads=4, head_size=8, model=1)
    layout = layout_of(FULL, other, FULL, MLA, draft)
    assert tables_of(layout) == [("full", (0, 1, 2, 3, 4))] and layout.tables[0].window is None
    assert {(group.kind, group.model, group.sites) for group in layout.groups} == {
        ("full", 0, (0, 2)), ("full", 0, (1,)), ("mla", 0, (3,)), ("full", 1, (4,)),
    }  # fmt: skip
    check(layout)


def test_more_layers_of_one_lifetime_are_dealt_to_several_tables() -> None:
    narrow = KVSpec(kind="full", num_kv_heads=2, head_size=8)
    layout = layout_of(narrow, *[SLIDING] * 3, narrow, *[SLIDING] * 3)
    assert tables_of(layout) == [("full", (0, 4)), *(("sliding", (n, n + 4)) for n in (1, 2, 3))]
    assert layout.page_bytes == 2 * layout.groups[0].layer_bytes and layout.block_size == 16
    check(layout)


def test_layers_with_other_heads_fill_pages_too() -> None:
    """The full layers have twice the bytes: two tables of one stand beside one of two."""
    layout = layout_of(FULL, SLIDING, FULL, SLIDING)
    assert tables_of(layout) == [("full", (0,)), ("full", (2,)), ("sliding", (1, 3))]
    assert layout.page_bytes == layout.groups[0].layer_bytes == 2 * layout.groups[2].layer_bytes
    check(layout)


def test_a_kernel_may_want_longer_pages() -> None:
    layout = layout_of(FULL, SLIDING, tokens_per_page={"full": 64})
    assert layout.block_size == 64
    check(layout)
    with pytest.raises(ConfigError, match="24 tokens a page"):
        layout_of(FULL, tokens_per_page={"full": 24})


def test_heads_are_divided_over_ranks_or_replicated() -> None:
    def heads(size: int) -> int:
        return layout_of(FULL, size=size).groups[0].num_kv_heads

    assert (heads(1), heads(2), heads(4), heads(8)) == (4, 2, 1, 1)
    for size in (3, 6):  # neither divided nor copied evenly
        with pytest.raises(ConfigError, match=f"over {size} ranks"):
            heads(size)


def test_no_layers_and_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError):
        layout_of()
    with pytest.raises(ConfigError):
        layout_of(FULL, block_size=0)


def test_a_latent_vector_is_kept_once_and_by_every_rank() -> None:
    for size in (1, 2, 4):
        layout = layout_of(MLA, MLA, MLA, size=size)
        (group,) = layout.groups
        assert group.layer_bytes == 24 * 2 * 16 and layout.page_bytes == 3 * group.layer_bytes
        assert group.num_kv_heads == 1


def test_blocks_are_as_long_as_keys_and_values_are_as_large_as_a_state() -> None:
    layout = layout_of(FULL, *[STATE] * 3, FULL, STATE, STATE, STATE)
    assert layout.block_size == 5008 // (2 * 4 * 8 * 2) // 16 * 16 == 32
    assert tables_of(layout)[0] == ("full", (0, 4)) and [t.window for t in layout.tables] == [None, 2, 2, 2]
    check(layout)
    small = state(((16,), "float32"))
    assert layout_of(FULL, small, SLIDING).block_size == 16
    alone = layout_of(STATE, size=2)
    assert (alone.block_size, alone.groups[0].layer_bytes, alone.tables[0].window) == (16, 2512, 2)
    assert layout_of(state(((1250,), "float32"), divided=None), size=3).groups[0].layer_bytes == 5008
    with pytest.raises(ConfigError, match="its dimension 0 cannot be divided evenly"):
        layout_of(STATE, size=3)


def test_an_encoders_layers_have_groups_without_a_table() -> None:
    encoder = KVSpec(kind="encoder", num_kv_heads=4, head_size=8, num_q_heads=4)
    layout = layout_of(encoder, encoder, size=2)
    (group,) = layout.groups
    assert (group.table, group.sites, group.layer_bytes, group.num_q_heads) == (None, (0, 1), 0, 2)
    assert (layout.tables, layout.page_bytes, layout.block_size) == ((), 0, 16)


def test_a_stage_has_the_same_tables_in_smaller_pages() -> None:
    draft = KVSpec(kind="full", num_kv_heads=1, head_size=8, model=1)
    whole = layout_of(*[FULL, *[SLIDING] * 5] * 4, draft)
    stages = [whole.on_stage(range(10)), whole.on_stage(range(10, 25)), whole.on_stage([])]
    for layout in stages:
        assert layout.tables == whole.tables and layout.block_size == whole.block_size
        check(layout)
    for group in whole.groups:
        form = (group.kind, group.table, group.model)
        kept = [g.sites for stage in stages for g in stage.groups if (g.kind, g.table, g.model) == form]
        assert sum(kept, ()) == group.sites
    assert max(stage.page_bytes for stage in stages) < whole.page_bytes and stages[2].page_bytes == 0
    assert whole.on_stage(range(25)) == whole


def test_a_spec_leaves_to_the_description_what_it_does_not_say() -> None:
    specs = (FULL, KVSpec(kind="full", num_kv_heads=4, head_size=8, num_q_heads=4, soft_cap=5.0, layer=0), STATE)
    model = ModelDescription(
        architecture="A", dtype="float32", vocab_size=1, hidden_size=1, num_layers=2, num_q_heads=8, max_model_len=1,
        kv_specs=specs, soft_cap=30.0,
    )  # fmt: skip
    assert [(s.layer, s.num_q_heads, s.soft_cap) for s in model.sites] == [(0, 8, 30.0), (0, 4, 5.0), (2, 0, 30.0)]
    full, other = layout_of(*model.sites[:2], size=2).groups
    assert (full.num_q_heads, other.num_q_heads, full.table, other.table) == (4, 2, 0, 0)


def full(layers: int, heads: int, size: int = 128, model: int = 0) -> list[KVSpec]:
    return [KVSpec(kind="full", num_kv_heads=heads, head_size=size, model=model)] * layers


LATENT = KVSpec(kind="mla", num_kv_heads=1, head_size=576, rope_size=64)
LATENT_DRAFT = KVSpec(kind="mla", num_kv_heads=1, head_size=576, rope_size=64, model=1)
WINDOW = KVSpec(kind="sliding", num_kv_heads=16, head_size=128, sliding_window=1024)
PUBLISHED = {
    "Llama-8B and EAGLE": ([*full(32, 8), *full(1, 8, model=1)], 16, 2.16, 1),
    "Llama-70B and EAGLE-3": ([*full(80, 8), *full(1, 8, model=1)], 16, 5.31, 1),
    "DeepSeek-V3 and MTP": ([*[LATENT] * 61, LATENT_DRAFT], 16, 1.14, 1),
    "Llama-8B and Llama-1B": ([*full(32, 8), *full(16, 8, 64, model=1)], 16, 2.62, 1),
    "Gemma-3-27B": ([*full(10, 16), *[WINDOW] * 52], 16, 1.70, 5),
    "Qwen3-Next": ([*full(12, 2, 256), *[state(((32, 128, 128), "float32"), ((8192, 3), "bfloat16"))] * 36],
                   1040, 25.76, 4),
    "Jamba": ([*full(4, 8), *[state(((8192, 16), "float32"), ((8192, 3), "bfloat16"))] * 28], 128, 2.29, 8),
    "Bamba": ([*full(3, 8), *[state(((128, 64, 128), "float32"), ((8448, 3), "bfloat16"))] * 29], 1024, 12.73, 11),
}  # fmt: skip
"""Of each model its layers, then the tokens of a block, the megabytes of a page and the tables with blocks of 16."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    """Blocks stay short beside draft layers, windows and states, and little of the pages is left unused."""
    sites, tokens, megabytes, tables = PUBLISHED[name]
    layout = layout_of(*sites)
    assert (layout.block_size, round(layout.page_bytes / 1e6, 2), len(layout.tables)) == (tokens, megabytes, tables)
    used = sum(group.layer_bytes * len(group.sites) for group in layout.groups)
    assert used > 0.95 * layout.page_bytes * len(layout.tables)
    check(layout)


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
        state(((4,), "float3")),
        KVSpec(kind="full", num_kv_heads=1, head_size=8, states=STATE.states),
        KVSpec(kind="cross", num_kv_heads=1, head_size=8, sliding_window=4),
        KVSpec(kind="encoder", num_kv_heads=1, head_size=8, sliding_window=0),
        KVSpec(kind="tree", num_kv_heads=1, head_size=8),  # type: ignore[arg-type]
    ],
)
def test_a_spec_that_contradicts_its_kind_is_refused(spec: KVSpec) -> None:
    with pytest.raises(ConfigError, match="no form of kind"):
        layout_of(spec)
