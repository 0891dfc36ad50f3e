"""The n-gram drafter against its definition, one row at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DrafterNeed, DraftRows
from engine.plugin import Registry, choose_one
from engine.plugin.points import DRAFTER
from engine.types.errors import OptionsError
from engine_reference.drafter_ngram.card import NgramDrafter, NgramOptions
from engine_reference.drafter_ngram.ngram import NgramDrafterBody


def make(device: str = "cpu", **options: object) -> NgramDrafterBody:
    return NgramDrafterBody(
        WorkerContext(
            start=None,  # type: ignore[arg-type]
            options=NgramOptions(**options),
            device=torch.device(device),
            platform=SimpleNamespace(to_device=lambda host, out: out.copy_(host)),  # type: ignore[arg-type]
        )
    )


def definition(tokens: list[int], least: int, most: int, k: int) -> list[int]:
    """The longest suffix that occurs earlier, at its latest place; what follows, repeated where the text ends."""
    for n in range(most, least - 1, -1):
        if n >= len(tokens):
            continue
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                followed = tokens[start + n :]
                return [followed[i % len(followed)] for i in range(k)]
    return []


def propose(rows: list[list[int]], k: list[int], body: NgramDrafterBody) -> list[list[int]]:
    """Through a table in which the rows stand upside down, among garbage."""
    table = torch.randint(0, 3, (len(rows) + 2, 60), dtype=torch.int32)
    slots = np.arange(len(rows), 0, -1, dtype=np.int32)
    for slot, tokens in zip(slots.tolist(), rows, strict=True):
        table[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    before = table.clone()
    asked = DraftRows(slots, np.array([len(r) for r in rows], np.int32), np.array(k, np.int32))
    drafts = body.propose(asked, SimpleNamespace(tokens=table))
    assert torch.equal(table, before)
    assert drafts.tokens.shape == (len(rows), max(k)) and drafts.counts is not None and drafts.probs is None
    return [drafts.tokens[i, :count].tolist() for i, count in enumerate(drafts.counts.tolist())]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    k=st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
@settings(max_examples=120, deadline=None)
def test_equals_the_definition(rows: list[list[int]], sizes: list[int], k: list[int]) -> None:
    least, most = sizes
    found = propose(rows, k[: len(rows)], make(min_match=least, max_match=most))
    assert found == [definition(row, least, most, n) for row, n in zip(rows, k, strict=False)]


def test_a_text_that_repeats_itself_is_continued() -> None:
    assert propose([[5, 6, 7, 5, 6, 7, 5, 6]], [7], make()) == [[7, 5, 6, 7, 5, 6, 7]]


def test_counts_are_left_out_where_asking_would_wait_for_the_device() -> None:
    table = torch.tensor([[1, 2, 1, 2, 0], [1, 2, 3, 4, 0]], dtype=torch.int32)
    body = make(device="meta")
    rows = DraftRows(np.array([0, 1], np.int32), np.array([4, 4], np.int32), np.array([2, 3], np.int32))
    drafts = body.propose(rows, SimpleNamespace(tokens=table))
    assert drafts.counts is None and drafts.tokens[0].tolist() == [1, 2, 1]


def test_options_are_checked() -> None:
    registry = Registry.discover()
    need = DrafterNeed(dtype="float32", device="cpu")
    chosen = choose_one(registry, DRAFTER, need, "ngram", {"num_tokens": "3", "min_match": "1", "adaptive": "false"})
    assert chosen.card is NgramDrafter and (chosen.options.num_tokens, chosen.options.adaptive) == (3, False)
    for bad in ({"min_match": 5, "max_match": 4}, {"num_tokens": 0}, {"acceptance": "sometimes"}, {"model": "x"}):
        with pytest.raises(OptionsError):
            choose_one(registry, DRAFTER, need, "ngram", bad)
