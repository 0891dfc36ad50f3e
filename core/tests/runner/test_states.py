"""Where a step's rows find and leave their states, beside a loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.interfaces.attention import AttentionBatch, AttentionLayer
from engine.interfaces.context import WorkerContext
from engine.kv.layout import make_layout
from engine.runner.capture import decodes
from engine.runner.states import LayerStates, StateBackend
from engine.types.kv import KVGroup
from engine.types.model import KVSpec, StateTensor
from engine_reference.platform_host.platform import HostPlatformBody

SIZE = 4
SPEC = KVSpec(
    kind="state", num_kv_heads=0, head_size=0,
    states=(
        StateTensor(name="sum", shape=(3,), dtype="float32"),
        StateTensor(name="last", shape=(2, 4), dtype="bfloat16", divided_dim=1),
    ),
)  # fmt: skip
START: Any = SimpleNamespace(device="cpu")
GROUP: KVGroup = make_layout([SPEC, SPEC], block_size=SIZE, kv_itemsize=4, tokens_per_page={}, size=2).groups[0]


class Rows:
    """Three sequences, whose state "sum" is the sum of their tokens: computed in steps, through pages."""

    def __init__(self) -> None:
        self.states = StateBackend(HostPlatformBody(WorkerContext(start=START)), [SPEC, SPEC], 2)
        self.pool = torch.full((40, 2 * GROUP.layer_bytes), 255, dtype=torch.uint8)
        self.plans: list[Any] = [None]
        nothing: Any = None
        given = AttentionLayer(index=1, group=GROUP, need=nothing, scale=0.0)
        self.site = LayerStates(given, self.states, self.plans)
        self.states._sites.append(self.site)
        self.site.bind(self.states.cache(nothing, GROUP, self.pool[:, GROUP.layer_bytes :]))
        self.table = torch.from_numpy(1 + np.random.default_rng(0).permutation(39)[:36].reshape(3, 12)).int()
        self.tokens = torch.arange(1.0, 3 * 48 + 1).view(3, 48)

    def step(self, rows: list[int], starts: list[int], lengths: list[int], drafts: list[int] | None = None) -> Any:
        """One step of these rows; what they begin with."""
        loc = np.cumsum([0, *lengths]).astype(np.int32)
        ends = np.array(starts, np.int32) + np.array(lengths, np.int32)
        device_loc = torch.from_numpy(loc)
        batch: Any = AttentionBatch(
            num_rows=len(rows), num_tokens=int(loc[-1]), num_decodes=0, query_start_loc=device_loc,
            query_start_loc_host=loc, seq_lens=torch.from_numpy(ends), seq_lens_bound=ends,
            block_table=self.table[rows], slot_mapping=device_loc, kv_index=device_loc,
        )  # fmt: skip
        self.states.step = None
        if drafts is not None:
            self.states.step = decodes(ends, 1)
            self.states.step.num_drafts = np.array(drafts, np.int32)
        self.plans[0] = self.states.plan(batch, GROUP)
        found = self.site.batch
        before = self.site.load("sum")
        after = torch.cat([
            before[place] + self.tokens[row, start : start + n].cumsum(0)[:, None].expand(n, 3)
            for place, (row, start, n) in enumerate(zip(rows, starts, lengths, strict=True))
        ])  # fmt: skip
        self.site.save("sum", after[found.write_at])
        return before

    def sum(self, row: int, end: int) -> float:
        """What the state is to be after so many tokens."""
        return float(self.tokens[row, :end].sum())


def test_the_views_lie_in_the_layers_bytes() -> None:
    rows = Rows()
    assert {name: tuple(view.shape[1:]) for name, view in rows.site.pool.items()} == {"sum": (3,), "last": (2, 2)}
    for view in rows.site.pool.values():
        view.zero_()
    assert (rows.pool[:, : GROUP.layer_bytes] == 255).all() and (rows.pool[:, GROUP.layer_bytes] == 0).all()


def test_rows_go_on_where_they_were_left() -> None:
    rows = Rows()
    rng = np.random.default_rng(1)
    done = [0, 0, 0]
    while min(done) < 40:
        chosen = [row for row in range(3) if rng.random() < 0.7 and done[row] < 40] or [done.index(min(done))]
        lengths = [int(rng.integers(1, 9)) for _ in chosen]
        before = rows.step(chosen, [done[row] for row in chosen], lengths)
        for place, row in enumerate(chosen):
            assert before[place, 0] == rows.sum(row, done[row])
            done[row] += lengths[place]
    snapshots = rows.site.pool["sum"][rows.table[:, :10].long(), 0]  # at the ends of blocks, where prefixes are found
    assert snapshots.tolist() == [[rows.sum(row, end) for end in range(4, 41, 4)] for row in range(3)]
    assert rows.step([0, 1], done[:2], [1, 1])[1, 0] == rows.sum(1, done[1]) and rows.site.batch.decodes


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 2], [6, 1, 4]])
def test_after_drafts_the_state_after_the_last_that_counts(counts: list[int]) -> None:
    rows = Rows()
    rows.step([0, 1, 2], [0, 0, 0], [6, 8, 7])
    rows.step([0, 1, 2], [6, 8, 7], [6, 1, 4], drafts=[5, 0, 3])
    rows.states.restore(torch.tensor(counts, dtype=torch.int32))
    at = [6 + counts[0], 9, 7 + counts[2]]
    before = rows.step([0, 1, 2], at, [1, 1, 1])
    assert before[:, 0].tolist() == [rows.sum(row, end) for row, end in enumerate(at)]
