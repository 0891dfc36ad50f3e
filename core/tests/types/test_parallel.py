"""Places of workers: which layers, which groups, and that no two groups meet in one directory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types.errors import ConfigError
from engine.types.parallel import Parallel, Place, places, split_layers


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(3, 40))
def test_places_cover_the_model_and_groups_agree(
    tp: int, pp: int, cp: int, cores: int, ep: bool, num_layers: int
) -> None:
    """Of all engine cores that share experts together: a worker's number among all is dp_rank * world + rank."""
    parallel = Parallel(tp=tp, pp=pp, cp=cp, dp=cores if ep else 1, ep=ep)
    meetings: dict[str, set[tuple[int, ...]]] = {}
    for core in range(parallel.dp):
        found = places(parallel, num_layers, core, "/meeting" if parallel.dp > 1 else "")
        assert [place.rank for place in found] == list(range(tp * pp * cp)) and parallel.world == len(found)
        columns: dict[tuple[int, int], list[Place]] = {(place.tp_rank, place.cp_rank): [] for place in found}
        for place in found:
            columns[place.tp_rank, place.cp_rank].append(place)
        assert len(columns) == tp * cp
        for column in columns.values():
            assert [layer for place in column for layer in place.stage.layers(num_layers)] == list(range(num_layers))
            assert [place.draws for place in column] == [False] * (pp - 1) + [True] and column[0].stage.first
        sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": parallel.dp, "ep": parallel.ep_size}
        for place in found:
            assert place.rank == (place.stage.index * cp + place.cp_rank) * tp + place.tp_rank
            assert {name: group.size for name, group in place.groups.items()} == {
                name: size for name, size in sizes.items() if size > 1
            }
            for name, group in place.groups.items():
                assert len(group.members) == group.size == len(set(group.members))
                across = parallel.dp > 1 and name in ("dp", "ep")
                assert group.members[group.rank] == place.rank + across * core * parallel.world
                assert group.rendezvous.startswith("/meeting/") == across
                where = group.rendezvous if across else f"{core}: {group.rendezvous}"
                meetings.setdefault(where, set()).add(group.members)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=tuple[Place, ...]) == found
    assert all(len(members) == 1 for members in meetings.values())


def test_experts_are_dealt_over_the_ranks_of_a_stage() -> None:
    (*_, last) = places(Parallel(tp=2, pp=2, dp=2, ep=True), 4, dp_rank=1, meeting="/m")
    assert last.groups["ep"].members == (2, 3, 6, 7) and last.groups["ep"].rank == 3
    assert last.groups["dp"].members == (3, 7)
    alone = places(Parallel(tp=2, ep=True), 4)[1].groups
    assert alone["ep"].members == alone["tp"].members, "one group, and no second communicator"


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
