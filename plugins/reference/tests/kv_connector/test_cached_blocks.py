"""Connector `host` beside swapping: computed blocks come back as they were, and make room for requests."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.interfaces.kv_connector import Found, Pages
from engine.types.kv import KVLayout, KVTable
from engine_reference.connector_host.cached_blocks import CachingHostScheduler
from engine_reference.connector_host.worker_half import HostWorker

PAGE_BYTES, BLOCK, PAGES = 24, 2, 30
LAYOUT = KVLayout(
    block_size=BLOCK,
    page_bytes=PAGE_BYTES,
    tables=(KVTable(index=0, kind="full", window=None, tokens_per_block=BLOCK),),
    groups=(),
)


def halves(places: int) -> tuple[CachingHostScheduler, HostWorker, torch.Tensor]:
    start = SimpleNamespace(layout=LAYOUT, swap_space=places * PAGE_BYTES, device="cpu")
    context: Any = SimpleNamespace(layout=LAYOUT, swap_space=start.swap_space, start=start, platform=None)
    worker, pool = HostWorker(context), torch.zeros(PAGES, PAGE_BYTES, dtype=torch.uint8)
    worker.register(pool)
    return CachingHostScheduler(context), worker, pool


def request(name: str, keys: list[bytes]) -> Any:
    """One with these blocks, all of which may be loaded."""
    return SimpleNamespace(request_id=name, num_loadable=len(keys) * BLOCK, block_keys=lambda table: keys)


def of_blocks(pages: list[int], first: int = 0) -> list[Pages]:
    return [Pages(0, first, np.array(pages, np.int32))]


@given(seed=st.integers(0, 2**32), places=st.integers(2, 20))
@settings(deadline=None)
def test_blocks_and_requests_share_the_room(seed: int, places: int) -> None:
    """Against copies of all that was ever computed: what is found has the right content or is told as failed, swapped
    requests lose nothing, and requests are refused only where they would not fit without any block."""
    rng = random.Random(seed)
    core, worker, pool = halves(places)
    content: dict[bytes, np.ndarray] = {}
    swapped: dict[str, np.ndarray] = {}
    for step in range(40):
        pool.copy_(torch.from_numpy(np.random.default_rng(rng.getrandbits(32)).integers(0, 256, pool.shape, np.uint8)))
        chain = rng.randrange(4)
        keys = [b"%d-%d" % (chain, block) for block in range(rng.randint(1, 6))]
        free = rng.sample(range(1, PAGES), PAGES - 1)  # no page twice in a step
        one = request(f"r{step}", keys)
        expected: dict[int, np.ndarray] = {}
        local = rng.randint(0, len(keys))
        found = core.lookup(one, local * BLOCK)
        if rng.random() < 0.3 and swapped:
            name = rng.choice(sorted(swapped))
            back = [free.pop() for _ in swapped[name]]
            core.swap_in(name, np.arange(len(back), dtype=np.int32), np.array(back, np.int32))
            expected |= dict(zip(back, swapped.pop(name), strict=True))
        if rng.random() < 0.3:
            out = [free.pop() for _ in range(rng.randint(1, 5))]
            taken = core.swap_out(f"s{step}", np.array(out, np.int32))
            if taken:
                swapped[f"s{step}"] = pool[out].numpy().copy()
            held = sum(map(len, swapped.values()))
            assert taken or len(out) + held + sum(map(len, core._freed)) > places
        wanted: dict[int, bytes] = {}
        if found is not None:
            assert 0 < found.num_tokens <= (len(keys) - local) * BLOCK and not found.asynchronous
            end = local + found.num_tokens // BLOCK
            into = [free.pop() for _ in range(end - local)]
            core.allocated(one, of_blocks(into, local), local * BLOCK, end * BLOCK)
            wanted = dict(zip(into, keys[local:end], strict=True))
        if rng.random() < 0.8:
            other = request(f"c{step}", [b"%d-%d" % (rng.randrange(4), 0), *keys[1:]])
            pages = [free.pop() for _ in other.block_keys(0)]
            for page, key in zip(pages, other.block_keys(0), strict=True):
                if key in content:
                    pool[page] = torch.from_numpy(content[key])  # the same tokens have the same content
                content.setdefault(key, pool[page].numpy().copy())
            core.computed(other, of_blocks(pages), len(pages) * BLOCK)
            core.finished(other, of_blocks(pages))
        core.check_integrity()
        section = core.plan_section()
        failed: set[int] = set()
        if section is not None:
            worker.begin(step, section)
            worker.load(step)
            news = worker.news()
            failed = set() if news is None else set(core.take([news]).failed.tolist())
        assert failed <= wanted.keys()
        expected |= {page: content[key] for page, key in wanted.items() if page not in failed}
        assert all(np.array_equal(pool[page].numpy(), kept) for page, kept in expected.items())
        core.check_integrity()


def test_what_was_used_last_stays() -> None:
    """Of four places: the blocks of the end of what was not used for longest go first."""
    core, _, _ = halves(4)
    first, second, third = (request(name, [b"%s%d" % (name.encode(), i) for i in range(2)]) for name in "abc")
    for one in (first, second, first):
        core.computed(one, of_blocks([1, 2]), 4)
        core.finished(one, of_blocks([1, 2]))
    core.computed(third, of_blocks([3]), 2)
    core.plan_section()
    assert core.lookup(first, 0) == Found(4) and core.lookup(second, 0) == Found(2)
    assert core.lookup(second, 2) is None
    assert core.swap_out("s", np.array([1, 2, 3, 4], np.int32)), "requests go before all blocks"
    assert core.lookup(first, 0) is None


def test_a_prompt_comes_back_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device, with a pool for one prompt, has long given it up: the same tokens."""
    loaded: list[int] = []
    allocated = CachingHostScheduler.allocated

    def watched(self: CachingHostScheduler, request: Any, pages: Any, first: int, end: int) -> None:
        loaded.append(end - first)
        allocated(self, request, pages, first, end)

    monkeypatch.setattr(CachingHostScheduler, "allocated", watched)
    about = " upon a time there was a little girl who lived in a house near the big forest with her mother"
    prompts = [word + about for word in ("Once", "Twice", "Never", "Often")]
    params = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8, ignore_eos=True) for i in range(4)]
    shape: dict[str, Any] = {"dtype": "float64", "block_size": 4, "max_num_seqs": 1, "max_model_len": 48}
    with LLM("tiny", **shape, num_kv_pages=14, swap_space="8MiB") as llm:
        turns = [[one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)] for _ in range(2)]
        assert llm.llm_engine.stats().pages_used == llm.llm_engine.stats().swap_pages_used == 0
    assert turns[0] == turns[1] and len(loaded) >= 3 and max(loaded) >= 16, loaded
    with LLM("tiny", **shape, num_kv_pages=400) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)] == turns[0]
