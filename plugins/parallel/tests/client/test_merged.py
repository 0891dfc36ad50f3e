"""The statistics of several engine cores as those of one."""

from __future__ import annotations

from msgspec.structs import replace

from engine.types.outputs import StepStats
from engine_parallel.merged import merge_stats

from .played import stats

LOADED = {
    "kv_connectors": (("file", "loaded_tokens", 7),),
    "retained_pages": (("0", 2), ("pinned", 1)),
    "retention_events": (("expired", 3),),
}


def test_merged_statistics_are_sums() -> None:
    counts = {name: i + 1 for i, name in enumerate(StepStats.__struct_fields__)}
    one = stats(**counts | {"hook_failures": (("otel", "step_done", 3),), "accepted_drafts_at": (9, 4)} | LOADED)
    two = replace(one, step_id=50, num_running=100, accepted_drafts_at=(5, 2, 1))
    merged = merge_stats([one, two])
    assert merged is not None and merged.step_id == 50 and merged.num_running == one.num_running + 100
    assert merged.hook_failures == (("otel", "step_done", 6),)
    assert merged.accepted_drafts_at == (14, 6, 1)
    assert merged.kv_connectors == (("file", "loaded_tokens", 14),)
    assert merged.retained_pages == (("0", 4), ("pinned", 2)) and merged.retention_events == (("expired", 6),)
    others = {"step_id", "num_running", "hook_failures", "accepted_drafts_at", *LOADED}
    for name in set(StepStats.__struct_fields__) - others:
        assert getattr(merged, name) == 2 * getattr(one, name)
    assert merge_stats([]) is None and merge_stats([one]) is one
