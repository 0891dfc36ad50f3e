"""One result made of all ranks' answers."""

from __future__ import annotations

import numpy as np
import pytest

from engine.types.errors import ContractError
from engine.types.parallel import Parallel, places
from engine.types.plan import StepResult
from engine.types.start import WorkerReady
from engine_kit.ranks import RankAnswer, StepMerge, merge_ready

PLACES = places(Parallel(tp=2, pp=2), 4)


def result(tokens: list[int], told: bytes | None = None) -> StepResult:
    return StepResult(step_id=7, tokens=np.array(tokens, np.int32), news=None if told is None else {"store": [told]})


def merged(results: dict[int, StepResult], order: list[int]) -> StepMerge:
    merge = StepMerge(7, range(len(PLACES)))
    for rank in order:
        merge.take(rank, RankAnswer.of(PLACES[rank], results[rank]))
    return merge


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]], ids=str)
def test_the_last_stage_draws_and_the_news_of_all_are_heard(order: list[int]) -> None:
    results = {0: result([-1, -1], b"a"), 1: result([-1, -1]), 2: result([5, 6]), 3: result([5, 6], b"b")}
    merge = merged(results, order[:-1])
    assert not merge.complete and merge.waiting == order[-1:]
    merge.take(order[-1], RankAnswer.of(PLACES[order[-1]], results[order[-1]]))
    assert merge.complete and merge.result().tokens.tolist() == [5, 6]
    told = merge.result().news
    assert told is not None and {name: sorted(news) for name, news in told.items()} == {"store": [b"a", b"b"]}


def test_ranks_that_draw_otherwise_and_a_result_that_is_missing() -> None:
    with pytest.raises(ContractError, match="rank 3 drew other tokens"):
        merged({2: result([5, 6]), 3: result([5, 7])}, [2, 3])
    merge = StepMerge(7, range(2))
    merge.take(0, RankAnswer(step_id=7))
    with pytest.raises(ContractError, match="no rank answered with a result"):
        merge.take(1, RankAnswer(step_id=7))


def test_ready_is_what_all_are() -> None:
    one = WorkerReady(num_pages=9, weight_bytes=1, cache_bytes=2, num_parameters=3, load_seconds=1.0, captured=(1, 2))
    two = WorkerReady(
        num_pages=7, weight_bytes=10, cache_bytes=20, num_parameters=30, load_seconds=0.5, step_bytes=4,
        not_captured=("no",),
    )  # fmt: skip
    ready = merge_ready([one, two])
    assert (ready.num_pages, ready.weight_bytes, ready.num_parameters, ready.load_seconds) == (7, 11, 33, 1.0)
    assert ready.step_bytes is None and ready.captured == ()
