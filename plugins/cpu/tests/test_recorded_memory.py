"""The memory of a recording: what lives is never overwritten, what is gone is used again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("engine_cpu.platform_cpu.recorded_memory", reason="engine-cpu is not installed")

from engine_cpu.platform_cpu.recorded_memory import ALIGNMENT, RecordedMemory


def test_the_next_tensor_lies_where_the_last_one_lay() -> None:
    memory = RecordedMemory()
    first = memory.place(torch.empty(3, 5))
    place = first.data_ptr()
    assert (first.shape, first.dtype, first.stride()) == ((3, 5), torch.float32, (5, 1)) and place % ALIGNMENT == 0
    second = memory.place(torch.empty(3, 5))
    assert second.data_ptr() != place
    view = first.view(15)[2:4]
    del first
    assert memory.place(torch.empty(15)).data_ptr() != place, "a view of it is left"
    del view
    assert memory.place(torch.empty(15)).data_ptr() == place


def test_forms() -> None:
    """Strides and dtypes are those that were asked for; nothing is made of nothing."""
    memory = RecordedMemory()
    turned = torch.empty_strided((2, 3), (1, 2), dtype=torch.bfloat16)
    placed = memory.place(turned)
    assert (placed.shape, placed.stride(), placed.dtype) == (turned.shape, turned.stride(), turned.dtype)
    assert memory.place(torch.empty(0, 4)).shape == (0, 4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=60))
def test_what_lives_keeps_its_values(steps: list[tuple[int, int]]) -> None:
    memory, alive = RecordedMemory(), {}
    for number, (size, place) in enumerate(steps):
        alive.pop(place, None)
        tensor = memory.place(torch.empty(size * 100))
        alive[place] = tensor.fill_(number).view(size, 100)[:, 10:], number
        assert all(kept.eq(value).all() for kept, value in alive.values())
    assert memory.nbytes <= 10 * 3 * (1200 + ALIGNMENT)
