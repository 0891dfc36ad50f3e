"""Places of workers: which layers, which groups, and that no two groups meet in one directory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.errors import ConfigError
from engine.types.parallel import Parallel, Place, places, split_layers


@given(st.integers(1, 4), st.integers(1, 5), st.integers(5, 40))
def test_places_cover_the_model_and_groups_agree(tp: int, pp: int, num_layers: int) -> None:
    found = places(Parallel(tp=tp, pp=pp), num_layers)
    assert [place.rank for place in found] == list(range(tp * pp))
    for tp_rank in range(tp):
        column = [place for place in found if place.tp_rank == tp_rank]
        assert [layer for place in column for layer in place.stage.layers(num_layers)] == list(range(num_layers))
        assert [place.draws for place in column] == [False] * (pp - 1) + [True] and column[0].stage.first
    meetings: dict[str, set[tuple[int, ...]]] = {}
    for place in found:
        assert set(place.groups) == {name for name, size in (("tp", tp), ("pp", pp)) if size > 1}
        for group in place.groups.values():
            assert group.members[group.rank] == place.rank and len(group.members) == group.size
            meetings.setdefault(group.rendezvous, set()).add(group.members)
    assert all(len(members) == 1 for members in meetings.values())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=tuple[Place, ...]) == found


@pytest.mark.parametrize(
    ("pp", "num_layers", "expected"), [(1, 7, (7,)), (2, 7, (4, 3)), (3, 8, (3, 3, 2)), (4, 10, (2, 3, 3, 2))]
)
def test_what_does_not_divide_is_not_the_last_stages(pp: int, num_layers: int, expected: tuple[int, ...]) -> None:
    assert split_layers(Parallel(pp=pp), num_layers) == expected


@pytest.mark.parametrize(("pp", "split"), [(2, (6, 5)), (2, (16, 0)), (2, (4, 4, 8)), (17, ())])
def test_a_split_that_does_not_fit_is_refused(pp: int, split: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=\d+.*the model has 16 layers"):
        split_layers(Parallel(pp=pp, split=split), 16)
    assert split_layers(Parallel(pp=2, split=(6, 10)), 16) == (6, 10)
