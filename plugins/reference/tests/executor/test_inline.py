"""The builtin executor."""

import pytest
from cores import LAYOUTS, worker_start
from schedules import Settings

from engine.interfaces.context import CoreContext
from engine.interfaces.executor import ExecutorNeed
from engine.types.errors import EngineDeadError
from engine.types.parallel import Parallel
from engine_reference.executor_inline import Inline, InlineExecutor

SETTINGS = Settings(
    num_pages=8, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, in_flight=1, enable_prefix_caching=True
)


def inline(worker: str) -> Inline:
    return Inline(
        CoreContext(layout=LAYOUTS["full"], max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, worker=worker)
    )


def test_it_starts_the_worker_that_its_context_names() -> None:
    executor = inline("paged_worker:PagedWorker")
    assert executor.start(worker_start(LAYOUTS["full"], SETTINGS)).num_pages == 8
    executor.check_health()
    (worker,) = executor.call("__repr__")
    assert "PagedWorker" in worker
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineDeadError):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        executor.call("start")


def test_it_brings_masks_to_the_worker() -> None:
    executor = inline("inline_sampling:SamplingWorker")
    with pytest.raises(EngineDeadError):
        executor.sample(1, "masks")  # type: ignore[arg-type]
    executor.start(worker_start(LAYOUTS["full"], SETTINGS))
    executor.sample(1, "masks")  # type: ignore[arg-type]
    assert executor.call("heard") == [[(1, "masks")]]


def test_a_worker_that_fails_to_start_is_shut_down() -> None:
    import inline_broken

    executor = inline("inline_broken:BrokenWorker")
    with pytest.raises(MemoryError):
        executor.start(worker_start(LAYOUTS["full"], SETTINGS))
    assert inline_broken.BrokenWorker.shut_down == 1
    with pytest.raises(EngineDeadError):
        executor.check_health()


def test_it_runs_one_worker() -> None:
    assert InlineExecutor.unsupported(ExecutorNeed()) == []
    assert InlineExecutor.unsupported(ExecutorNeed(parallel=Parallel(tp=2))) == ["it runs one worker, 2 are needed"]
