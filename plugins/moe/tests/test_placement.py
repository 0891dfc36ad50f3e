"""Where experts go, and how they get there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_moe.dealt.placement import (
    aligned,
    balanced,
    first_placement,
    heaviest,
    next_move,
    starts_of,
    table_of,
    table_width,
)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    ranks = draw(st.integers(1, 5))
    experts = draw(st.integers(ranks, 14))
    redundant = draw(st.integers(0, min(6, experts * (ranks - 1))))
    return ranks, experts, redundant, draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))


@given(sizes())
def test_every_expert_has_a_place_and_ranks_have_equal_numbers(drawn: tuple[int, int, int, list[int]]) -> None:
    ranks, experts, redundant, load = drawn
    starts = starts_of(experts + redundant, ranks)
    assert starts[-1] == experts + redundant and set(np.diff(starts)) <= {starts[-1] // ranks, starts[-1] // ranks + 1}
    first = first_placement(experts, int(starts[-1]))
    for rank in range(ranks):
        mine = first[starts[rank] : starts[rank + 1]].tolist()
        assert len(set(mine)) == len(mine), "at first no rank has an expert twice"
    wanted = balanced(np.array(load), starts)
    assert len(wanted) == starts[-1]
    for placement in (first, wanted):
        assert set(placement.tolist()) == set(range(experts))
        table = table_of(placement, experts, table_width(min(ranks, 1 + redundant)))
        for expert in range(experts):
            turns = np.bincount(table[expert], minlength=len(placement))
            copies = placement == expert
            assert turns[~copies].sum() == 0 and (turns[copies] > 0).all()
            assert turns[copies].max() - turns[copies].min() <= (0 if copies.sum() <= 4 else 1)


@given(sizes(), sizes())
def test_moves_lead_there_and_lose_nobody(
    drawn: tuple[int, int, int, list[int]], other: tuple[int, int, int, list[int]]
) -> None:
    """Between any two placements; what may stay where it is does."""
    ranks, experts, redundant, load = drawn
    starts = starts_of(experts + redundant, ranks)
    now = balanced(np.resize(other[3], experts), starts)
    after = balanced(np.array(load), starts)
    wanted = aligned(now, after, starts)
    for rank in range(ranks):
        mine = slice(int(starts[rank]), int(starts[rank + 1]))
        assert sorted(wanted[mine]) == sorted(after[mine])
        both = np.minimum(*(np.bincount(one[mine], minlength=experts) for one in (now, after)))
        assert np.count_nonzero(now[mine] == wanted[mine]) == both.sum()
    moves = 0
    while (move := next_move(now, wanted, starts)) is not None:
        expert = now[move.source]
        if move.swap:
            now[move.source] = now[move.place]
        now[move.place] = expert
        moves += 1
        assert now[move.place] == wanted[move.place] and set(now.tolist()) == set(range(experts))
    assert (now == wanted).all() and moves <= len(now)


def test_the_published_greedy() -> None:
    """By hand: the copies go to experts 4 and 0, which are halved, and each rank gets as much as any other."""
    load = np.array([80, 10, 20, 30, 100, 20])
    starts = starts_of(8, 2)
    placement = balanced(load, starts)
    assert sorted(np.bincount(placement).tolist()) == [1, 1, 1, 1, 2, 2] and np.bincount(placement)[4] == 2
    assert heaviest(load, placement, starts) == 130
    assert heaviest(load, first_placement(6, 8), starts) > 130
