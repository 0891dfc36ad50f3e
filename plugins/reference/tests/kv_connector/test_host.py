"""Connector `host`: pages out and back byte by byte, whatever the two halves are asked in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.kv_connector import KVConnectorNeed
from engine.types.errors import KVCacheTooSmallError
from engine.types.parallel import Parallel
from engine_reference.connector_host.card import HostConnector
from engine_reference.connector_host.scheduler_half import HostScheduler
from engine_reference.connector_host.worker_half import HostWorker, PoolCopies
from engine_reference.platform_host.platform import HostPlatformBody
from engine_sdk.conformance.kv_connector.host_pages import HostPages

PAGE_BYTES = 24


def context(places: int, **more: Any) -> Any:
    layout = SimpleNamespace(page_bytes=PAGE_BYTES)
    start = SimpleNamespace(layout=layout, swap_space=places * PAGE_BYTES + 7, device="cpu", size=1)
    return SimpleNamespace(layout=layout, swap_space=start.swap_space, start=start, platform=None, **more)


class Lent(HostPages):
    """A pool that is no tensor, and counts what was read of it and is not asked for yet."""

    coming = 0

    def read(self, pages: np.ndarray) -> Callable[[], np.ndarray]:
        content = super().read(pages)
        self.coming += 1

        def there() -> np.ndarray:
            self.coming -= 1
            return content()

        return there


@given(
    seed=st.integers(0, 2**32),
    places=st.integers(1, 40),
    per_chunk=st.sampled_from([1, 3, 8, 100]),
    late=st.integers(0, 3),
    paged=st.booleans(),
)
@settings(deadline=None)
def test_pages_come_back_byte_by_byte(seed: int, places: int, per_chunk: int, late: int, paged: bool) -> None:
    """Requests go out and come back in parts and in any order, others overwrite their pages, some are forgotten. Memory
    lies in chunks, as it does where it is pinned for a device; pages of a pool that is no tensor move in turns, few of
    them at once, and results are taken some steps late."""

    class Chunked(HostWorker):
        chunk_bytes = per_chunk * PAGE_BYTES + 5

    rng = random.Random(seed)
    core, worker = HostScheduler(context(places)), Chunked(context(places))
    pool, taken_late = torch.zeros(30, PAGE_BYTES, dtype=torch.uint8), 0
    lent = Lent(pool.numpy())
    with patch.object(PoolCopies, "turn_bytes", Chunked.chunk_bytes):
        worker.register(lent if paged else pool)
    kept: dict[str, np.ndarray] = {}
    for step in range(40):
        pool.copy_(torch.from_numpy(np.random.default_rng(rng.getrandbits(32)).integers(0, 256, pool.shape, np.uint8)))
        before, expected = pool.numpy().copy(), {}
        pages = np.array(rng.sample(range(30), 30), np.int32)
        name = f"r{step}"
        out = np.sort(pages[: rng.randint(1, 6)]) if rng.random() < 0.5 else pages[: rng.randint(1, 6)]
        new = before[out] if core.swap_out(name, out) else None
        for other in [other for other in kept if rng.random() < 0.2]:
            content = kept.pop(other)
            if rng.random() < 0.3:
                core.forget(other)
                continue
            some = np.array(sorted(rng.sample(range(len(content)), rng.randint(0, len(content)))), np.int32)
            free = [page for page in range(30) if page not in expected]
            targets = np.array(rng.sample(free, some.size), np.int32)
            core.swap_in(other, some, targets)
            expected |= dict(zip(targets.tolist(), content[some], strict=True))
        if new is not None:
            kept[name] = new
        core.check_integrity()
        section = core.plan_section()
        assert core.usage() == (sum(map(len, kept.values())), places)
        if section is not None:
            worker.begin(step, section)
            assert lent.coming <= PoolCopies.most_turns
            worker.load(step)
            taken_late += 1
        while taken_late > late:
            assert worker.news() is None
            taken_late -= 1
        assert late or not lent.coming
        assert all(np.array_equal(pool[page].numpy(), content) for page, content in expected.items())
        rest = [page for page in range(30) if page not in expected]
        assert np.array_equal(pool.numpy()[rest], before[rest]), "other pages are left alone"


def test_memory_that_is_not_there_is_refused_by_name() -> None:
    asked = context(2**45)
    asked.platform = HostPlatformBody(asked)
    with pytest.raises(KVCacheTooSmallError, match=r"swap space of 35,184,372,088,832 pages.*--swap-space"):
        HostWorker(asked).register(torch.zeros(4, PAGE_BYTES, dtype=torch.uint8))


def test_a_stage_that_caches_nothing_has_nothing_to_copy() -> None:
    """The plan is the same on all stages: it names pages, and there they have no byte."""
    core, stage = HostScheduler(context(4)), context(4)
    stage.start.layout = SimpleNamespace(page_bytes=0)
    worker = HostWorker(stage)
    worker.register(torch.zeros(30, 0, dtype=torch.uint8))
    assert core.swap_out("r", np.array([3, 4], np.int32))
    worker.begin(1, core.plan_section())
    core.swap_in("r", np.array([0, 1], np.int32), np.array([5, 6], np.int32))
    worker.begin(2, core.plan_section())
    worker.load(2)
    assert worker.news() is None


def test_a_space_that_holds_no_page() -> None:
    need = KVConnectorNeed(page_bytes=4096, swap_space=4, parallel=Parallel(), device="cpu")
    assert HostConnector.unsupported(need) == ["a swap space of 4 bytes holds no page of 4,096 bytes"]
