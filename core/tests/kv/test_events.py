"""Whoever follows the events knows what is cached."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from cores import LAYOUTS, make_core
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_worker import VOCAB
from schedules import Planned, Schedule, run_schedule, schedules
from test_partial_blocks import ROOMY

from engine.kv.hashing import extend_hashes, root_hash
from engine.kv.manager import KVManager
from engine.loop.engine_core import EngineCore
from engine.types.kv import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from engine.types.params import SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)


class Hooks:
    """What a relay is to a core, with one listener."""

    step_done = None

    def __init__(self) -> None:
        self.calls: list[list[KVEvent]] = []
        self.failures: dict[tuple[str, str], int] = {}

    def kv_events(self, events: list[KVEvent]) -> None:
        assert events
        self.calls.append(events)


class Follower:
    """Knows from events alone which blocks are cached."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, bytes]] = set()
        self.tokens: dict[bytes, list[int]] = {}

    def take(self, event: KVEvent) -> None:
        event = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=KVEvent)
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlockRemoved):
            for hashed in event.block_hashes:
                self.blocks.remove((event.table, hashed))
        else:
            assert len(event.token_ids) == event.block_size * len(event.block_hashes) and event.block_hashes
            for hashed in event.block_hashes:
                assert (event.table, hashed) not in self.blocks
                self.blocks.add((event.table, hashed))


def listening(layout: str, chosen: object) -> tuple[EngineCore, Hooks]:
    core, executor = make_core(LAYOUTS[layout], chosen)  # type: ignore[arg-type]
    hooks = Hooks()
    core = EngineCore(
        scheduler=core.scheduler,
        executor=executor,  # type: ignore[arg-type]
        worker_ready=core.worker_ready,
        in_flight=core.in_flight,
        hooks=hooks,  # type: ignore[arg-type]
    )
    return core, hooks


def cached(kv: KVManager) -> set[tuple[int, bytes]]:
    """The full blocks in the index: partial blocks stand under hashes that no chain of full blocks has."""
    assert kv.index.events is not None
    return {told for page, told in enumerate(kv.index.events._stored) if told is not None and kv.pool.committed[page]}


@pytest.mark.parametrize("reset", [False, True])
@given(schedule=schedules(VOCAB), layout=st.sampled_from(sorted(LAYOUTS)))
@settings(max_examples=30, deadline=None)
def test_events_tell_what_is_cached(reset: bool, schedule: Schedule, layout: str) -> None:
    core, hooks = listening(layout, schedule.settings)
    run_schedule(core, schedule)
    if reset:
        core.reset_prefix_cache()
    follower = Follower()
    for event in (event for call in hooks.calls for event in call):
        follower.take(event)
    kv = core.scheduler.kv
    assert follower.blocks == cached(kv)
    keys = {kv.index.key(hashed, group) for group, hashed in follower.blocks}
    assert keys <= set(kv.index._pages)
    assert not (reset and follower.blocks)


def test_a_chain_is_told_with_its_tokens_and_parents() -> None:
    core, hooks = listening("full", ROOMY)
    for name, prompt in (("a", tuple(range(12))), ("b", (*range(8), 9, 9, 9, 9, 9))):
        core.add_request(Planned(request_id=name, prompt=prompt, params=ONE).to_request())
        while core.has_work():
            core.step()
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash(None), np.arange(12, dtype=np.int32), 4)
    (first,), (second,) = hooks.calls
    assert first == BlockStored(
        block_hashes=hashes, parent_block_hash=None, token_ids=list(range(12)), block_size=4, table=0
    )
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == hashes[1] and second.token_ids == [9, 9, 9, 9] and len(second.block_hashes) == 1
    core.reset_prefix_cache()
    assert hooks.calls[-1] == [AllBlocksCleared()]


def test_nothing_is_written_down_where_nobody_listens() -> None:
    core, _ = make_core(LAYOUTS["full"], ROOMY)
    assert core.scheduler.kv.index.events is None
