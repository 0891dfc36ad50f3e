"""The statistics of several engine cores as those of one."""

from __future__ import annotations

from msgspec.structs import replace

from engine.types.outputs import StepStats
from engine_parallel.merged import merge_stats

from .played import stats


def test_merged_statistics_are_sums() -> None:
    counts = {name: i + 1 for i, name in enumerate(StepStats.__struct_fields__)}
    one = stats(**counts | {"hook_failures": (("otel", "step_done", 3),)})
    two = replace(one, step_id=50, num_running=100)
    merged = merge_stats([one, two])
    assert merged is not None and merged.step_id == 50 and merged.num_running == one.num_running + 100
    assert merged.hook_failures == (("otel", "step_done", 6),)
    for name in set(StepStats.__struct_fields__) - {"step_id", "num_running", "hook_failures"}:
        assert getattr(merged, name) == 2 * getattr(one, name)
    assert merge_stats([]) is None and merge_stats([one]) is one
