"""Hits that end within a block: what is found, what is copied, and that sources live as long as they are read."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from cores import FULL, LAYOUTS, WIDE_DRAFT, layout_of, make_core, sliding
from evictors import lru
from hypothesis import given, settings
from hypothesis import strategies as st
from outcomes import check_outcome
from schedules import Planned, Schedule, Settings, run_schedule

from engine.kv.hashing import extend_hashes, root_hash
from engine.kv.index import RadixChildren, common_tokens
from engine.kv.layout import make_layout
from engine.kv.manager import KVManager
from engine.kv.matching import Sequence
from engine.kv.reservation import Reservation
from engine.loop.engine_core import EngineCore
from engine.types.kv import KVLayout
from engine.types.model import KVSpec
from engine.types.params import SamplingParams

ROOMY = Settings(
    num_pages=200, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, in_flight=1, enable_prefix_caching=True
)


def ask(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 1) -> tuple[int, list[int]]:
    """Tokens found in the cache, and those that came."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    core.add_request(Planned(request_id=name, prompt=tuple(prompt), params=params).to_request())
    cached, tokens = 0, []
    while core.has_work():
        for output in core.step().outputs:
            cached += output.num_cached_tokens
            tokens += output.new_token_ids
        core.check_integrity()
    return cached, tokens


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_beam_computes_one_token(layout: str) -> None:
    """A beam is a request of its own, one token longer than the one before it, which has ended. Of states there are
    only those at the ends of blocks."""
    core, _ = make_core(LAYOUTS[layout], ROOMY)
    states = any(group.kind == "state" for group in LAYOUTS[layout].groups)
    unit = core.scheduler.kv.block_size if states else 1
    prompt = [1, 2, 3, 4, 5, 6, 7]
    _, tokens = ask(core, "first", prompt)
    for step in range(20):
        prompt += tokens
        cached, other = ask(core, f"other {step}", [*prompt[:-1], (prompt[-1] + 1) % 13])
        assert cached == (len(prompt) - 1) // unit * unit
        cached, tokens = ask(core, f"beam {step}", prompt)
        assert cached == (len(prompt) - 1) // unit * unit and other


@pytest.mark.parametrize("layout", ["full", "full and sliding"])
def test_a_block_that_goes_on_otherwise_is_copied(layout: str) -> None:
    core, executor = make_core(LAYOUTS[layout], ROOMY)
    first = [n % 13 for n in range(40)]
    ask(core, "first", first)
    for same in range(1, 40):
        cached, _ = ask(core, f"r{same}", [*first[:same], (first[same] + 1) % 13, 5, 5, 5])
        assert cached == same
    assert executor.worker.num_copies > 0


def test_a_running_sequence_is_copied_from() -> None:
    core, executor = make_core(LAYOUTS["full"], ROOMY)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, seed=0)
    core.add_request(Planned(request_id="long", prompt=(1, 2, 3, 4, 5, 6), params=params).to_request())
    core.step()
    core.step()
    core.add_request(Planned(request_id="late", prompt=(1, 2, 3, 4, 5, 6, 9), params=params).to_request())
    core.step()
    assert core.scheduler.running["late"].num_cached_tokens == 6
    assert executor.worker.num_copies == 1
    core.check_integrity()


def test_nothing_is_found_past_a_salt_or_after_a_reset() -> None:
    core, _ = make_core(LAYOUTS["full"], ROOMY)
    prompt = (1, 2, 3, 4, 5, 6)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, seed=0)
    one = [
        Planned(request_id=f"r{salt}", prompt=prompt, params=params, salt=salt, arrives=3 * i)
        for i, salt in enumerate((None, "a", "b"))
    ]
    for request in one:
        core.add_request(request.to_request())
        core.step()
        core.step()
    core.reset_prefix_cache()
    core.add_request(Planned(request_id="again", prompt=prompt, params=params).to_request())
    while core.has_work():
        core.step()
        core.check_integrity()
    assert core.stats().prefix_hits == 0


def test_a_source_lives_until_the_step_that_copies_it_is_done() -> None:
    kv = KVManager(LAYOUTS["full"], num_pages=8, max_num_seqs=2, max_model_len=16, evictor=lru(8))
    tokens = np.arange(6, dtype=np.int32)
    sequence = Sequence([], root_hash(None), tokens)
    step = Reservation(kv)
    step.enter(0, sequence, step.match(sequence, 5))
    step.chunk(0, 0, 6, sequence.hashes)
    step.allocate(1, [sequence], tokens[None])
    kv.free_slot(0, 1, 6, [sequence], tokens[None])
    kv.step_done(1)
    other = Sequence([], root_hash(None), np.array([0, 1, 2, 3, 4, 9], np.int32))
    extend_hashes(other.hashes, other.root, other.tokens, 4)
    step = Reservation(kv)
    hit = step.match(other, 5)
    assert hit.num_tokens == 5 and hit.num_whole == 4 and hit.partial is not None and hit.partial.cached
    (source,) = hit.partial.sources.tolist()
    step.enter(1, other, hit)
    step.chunk(1, 5, 1, other.hashes)
    (new_blocks,), copies = step.allocate(2, [sequence, other], np.stack([tokens, other.tokens]))
    assert copies is not None and copies.source.tolist() == [source]
    assert new_blocks.index.tolist() == [0, 1] and copies.destination.tolist() == new_blocks.page.tolist()[1:]
    kv.check_integrity()
    assert kv.pool.num_deferred_free == 1 and not kv.pool.evictable[source]
    kv.step_done(2)
    assert kv.pool.evictable[source]
    kv.check_integrity()


def test_a_draft_layer_makes_prefixes_no_coarser() -> None:
    """Of 1,000 tokens that two requests share 62 pages are shared, and one is copied, with a draft layer or without."""
    layer = KVSpec(kind="full", num_kv_heads=8, head_size=128)
    for sites in ([layer] * 80, [*[layer] * 80, msgspec.structs.replace(layer, model=1)]):
        layout = make_layout(sites, block_size=16, kv_itemsize=2, tokens_per_page={})
        kv = KVManager(layout, num_pages=200, max_num_seqs=2, max_model_len=2048, evictor=lru(200))
        tokens = np.zeros((2, 2048), np.int32)
        tokens[0, :1005], tokens[1, :1005] = np.arange(1005), np.arange(1005)
        tokens[1, 1000:1005] += 5000
        sequences = [Sequence([], root_hash(None), row[:1005]) for row in tokens]
        copies = None
        for slot, sequence in enumerate(sequences):
            step = Reservation(kv)
            hit = step.match(sequence, 1004)
            assert hit.num_tokens == (0, 1000)[slot]
            step.enter(slot, sequence, hit)
            step.chunk(slot, hit.num_tokens, 1005 - hit.num_tokens, sequence.hashes)
            copies = step.allocate(slot + 1, sequences, tokens).copies
            if not slot:
                kv.free_slot(0, 1, 1005, sequences, tokens)
                kv.step_done(1)
        assert [table.pages.size for table in hit.tables] == [62]
        assert copies is not None and copies.source.size == 1
        kv.check_integrity()


def test_a_tight_cache_copies_nothing_rather_than_wait() -> None:
    """The pages of both sides of a copy do not fit, the request does."""
    core, executor = make_core(LAYOUTS["full"], Settings(**{**vars(ROOMY), "num_pages": 3}))
    ask(core, "first", [1, 2, 3, 4, 5, 6])
    cached, _ = ask(core, "second", [1, 2, 3, 4, 5, 7])
    assert cached == 4 and executor.worker.num_copies == 0


MIXTURES = [
    layout_of(FULL),
    layout_of(FULL, sliding(6)),
    layout_of(FULL, sliding(1), block_size=3),
    layout_of(FULL, sliding(5, heads=1), block_size=2),
    layout_of(FULL, sliding(9, heads=4), sliding(30, heads=1), block_size=2),
    layout_of(FULL, FULL, WIDE_DRAFT),
    layout_of(FULL, WIDE_DRAFT, *[sliding(6)] * 4, block_size=2),
]


@given(layout=st.sampled_from(MIXTURES), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_longest_common_prefix_is_found(layout: KVLayout, data: st.DataObject) -> None:
    """One request after another, from a small vocabulary, in a roomy cache: with full attention each finds the longest
    prefix that it shares with any before it; with sliding windows, whose pages go, not a longer one."""
    core, _ = make_core(layout, ROOMY)
    earlier: list[list[int]] = []
    for i in range(data.draw(st.integers(2, 6))):
        base = data.draw(st.sampled_from(earlier)) if earlier else []
        kept = base[: data.draw(st.integers(0, len(base)))]
        prompt = (kept + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14)))[:50]
        cached, tokens = ask(core, f"r{i}", prompt, max_tokens=3)
        longest = max((_common(prompt[:-1], other) for other in earlier), default=0)
        assert cached <= longest
        if all(table.window is None for table in layout.tables):
            assert cached == longest
        earlier.append([*prompt, *tokens[:-1]])


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_radix_children_find_the_nearest(data: st.DataObject) -> None:
    children = RadixChildren(40)
    known: dict[int, list[int]] = {}
    for page in range(1, data.draw(st.integers(1, 30))):
        tokens = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
        if tokens in known.values():
            continue
        children.add((np.array(tokens, np.int32).tobytes(), (), b"p", page))
        known[page] = tokens
    for page in data.draw(st.sets(st.sampled_from(sorted(known)))) if known else ():
        children.forget([page])
        del known[page]
    wanted = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5))
    found = next(children.nearest(b"p", np.array(wanted, np.int32).tobytes()), (0, None))
    assert found[0] == max((_common(wanted, tokens) for tokens in known.values()), default=0)
    assert next(children.nearest(b"q", b"1234"), None) is None
    assert common_tokens(b"", b"1234") == 0


def test_a_schedule_of_many_partial_blocks() -> None:
    """Requests that differ in their last tokens, all at once, steps in flight."""
    settings = Settings(**{**vars(ROOMY), "in_flight": 2, "num_pages": 40})
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, seed=0)
    requests = tuple(
        Planned(request_id=f"r{i}", prompt=(*range(9), *[i % 3] * (i % 4 + 1)), params=params, arrives=i)
        for i in range(24)
    )

    core, executor = make_core(LAYOUTS["full"], settings)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))

    for request in requests:
        check_outcome(core, request, outcomes[request.request_id])
    assert executor.worker.num_copies > 5
