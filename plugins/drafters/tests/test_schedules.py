"""The heads under the schedules of the core's own tests, in float64: any chunks, prefix hits, preemptions, steps in
flight and aborts give each request exactly the tokens that it gets alone. Their weights are random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import drafters
import msgspec
import published
import pytest
import test_real_schedules as real
from harness import CONFIG, HEAD_SIZE, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB, choice, registry
from hypothesis import HealthCheck, event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from schedules import Planned, Schedule, Settings, examples, run_schedule, schedules
from thread_ranks import ThreadExecutor

from engine.interfaces.platform import CaptureKey
from engine.types.parallel import Parallel
from engine.types.params import SamplingParams
from engine.types.start import DraftStart
from engine_drafters.checkpoint import DraftHeadCheckpoint
from engine_drafters.eagle.card import EagleDrafter
from engine_drafters.medusa.card import MedusaDrafter
from engine_drafters.models import card as cards
from engine_reference.models.llama_card import Qwen2

KINDS = ("eagle", "eagle3", "medusa", "medusa tree", "eagle tree", "eagle3 tree")
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (2,), (0, 0, 1))
SIZES = published.Sizes(VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER)


def write(kind: str, folder: Path) -> Path:
    """A head for the harness's model."""
    layer = {**SIZES.layer(), "architectures": ["LlamaForCausalLM"]}
    if kind.split()[0] == "eagle":
        return published.write(folder, layer, published.eagle(of=SIZES))
    if kind.startswith("medusa"):
        return published.write(folder, {"medusa_num_heads": 3}, published.medusa(of=SIZES), "medusa_lm_head.pt")
    config = {**layer, "draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return published.write(folder, config, published.eagle3(of=SIZES, drafted=40))


@pytest.fixture(scope="module", autouse=True)
def _kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The harness knows the heads by their kinds."""
    folders = {kind: str(write(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}
    options, draft_starts = drafters.options, drafters.draft_starts

    def options_of(kind: str) -> tuple[str, dict[str, Any]]:
        if kind in folders:
            tree = {"tree": TREE} if kind.endswith("tree") else {}
            return kind.split()[0].removesuffix("3"), {"model": folders[kind], **tree}
        return options(kind)

    def starts_of(kind: str, parallel: Parallel | None = None, whole: bool = False) -> tuple[DraftStart, ...]:
        if kind not in folders:
            return draft_starts(kind, parallel, whole)
        driver = EagleDrafter if kind.startswith("eagle") else MedusaDrafter
        (asked,) = driver.models(Qwen2.describe(CONFIG), driver.Options(model=folders[kind]))
        files = DraftHeadCheckpoint.resolve(asked.path)
        files = msgspec.structs.replace(files, config={**files.config, **asked.config})
        architecture = files.config["architectures"][0]
        described: dict[str, Any] = {
            "LlamaForCausalLMEagle": cards.LlamaEagle,
            "LlamaForCausalLMEagle3": cards.LlamaEagle3,
            "MedusaModel": cards.Medusa,
        }
        model = described[architecture].describe(files.config)
        specs = tuple(msgspec.structs.replace(spec, model=1, divided=not whole) for spec in model.kv_specs)
        found = registry()
        return (
            DraftStart(
                choices=(choice(found, "model", architecture), choice(found, "checkpoint", "draft_head")),
                model=msgspec.structs.replace(
                    model, kv_specs=specs, attention_features=("tree",) if kind.endswith("tree") else ()
                ),
                files=files,
                parallel=Parallel() if whole or parallel is None else parallel.of_stage,
                shares=asked.shares,
                features=asked.features,
            ),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "options", options_of)
        patch.setattr(drafters, "draft_starts", starts_of)
        yield
    for crew in list(ThreadExecutor.started):
        crew.shutdown()


@given(schedule=schedules(VOCAB, max_requests=5, drafters=KINDS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=examples(4), deadline=None, suppress_health_check=list(HealthCheck))
def test_heads_change_no_token(schedule: Schedule, seed: int) -> None:
    stats = real.run_with_drafts(schedule, seed)
    event(f"{schedule.settings.drafter}: {min(stats.num_preemptions, 3)} preemptions")


@pytest.mark.parametrize("kind", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_passes_of_a_head_are_captured(kind: str) -> None:
    """Where decode steps are: those that give the second draft and the ones behind it."""
    settings = Settings(
        num_pages=60, max_num_seqs=4, max_num_batched_tokens=17, max_model_len=40, in_flight=1,
        enable_prefix_caching=False, drafter=kind, num_drafts=3, adaptive=False,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=16, ignore_eos=True)
    requests = tuple(Planned(request_id=f"r{i}", prompt=tuple(range(1, 5 + i)), params=params) for i in range(3))
    core, executor = real.make_core(settings, buckets=True)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        real.check(request, outcomes[request.request_id])
    worker: Any = executor.worker
    captures: dict[CaptureKey | None, int] = worker._runner._platform.captures
    replayed = {key.rows: count for key, count in captures.items() if key is not None and key.of == "draft0"}
    assert sorted(replayed) == [4, 12] and replayed[4] > 10, replayed


@pytest.mark.slow
@given(schedule=schedules(VOCAB, drafters=KINDS), seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules_with_heads(schedule: Schedule, seed: int) -> None:
    real.run_with_drafts(schedule, seed)


WAYS: dict[str, tuple[Parallel | None, bool, int]] = {
    "swapped": (None, False, 100),
    "divided": (Parallel(tp=2), False, 0),
    "whole": (Parallel(tp=2), True, 0),
    "staged": (Parallel(pp=2), False, 0),
}
"""(over ranks, the head whole on each, pages on the host)."""
QUICK = {
    ("eagle", "swapped"),
    ("eagle3 tree", "divided"),
    ("medusa tree", "whole"),
    ("eagle", "staged"),
    ("eagle3", "staged"),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=() if (kind, way) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for way in WAYS
        if way != "staged" or not kind.endswith("tree")  # see `engine_kit.chosen_together.check_stages`
    ],
)
def test_in_a_crowded_cache_and_over_ranks(kind: str, way: str) -> None:
    """Divided, whole on every rank beside a divided target, and with pages that go to the host and come back."""
    parallel, whole, swap_pages = WAYS[way]
    settings = Settings(
        num_pages=18 if way == "staged" else 26, max_num_seqs=5, max_num_batched_tokens=17, max_model_len=40,
        in_flight=2, enable_prefix_caching=True, drafter=kind, num_drafts=7 if kind.endswith("tree") else 3,
        adaptive=False, swap_pages=swap_pages,
    )  # fmt: skip
    rng = random.Random(5)
    shared = [rng.randrange(1, VOCAB) for _ in range(8)]
    requests = tuple(
        Planned(
            request_id=f"r{i}",
            prompt=(*shared[: 8 * (i % 2)], *(rng.randrange(1, VOCAB) for _ in range(3 + i))),
            params=SamplingParams(temperature=(i % 3) * 0.6, max_tokens=21, seed=i, ignore_eos=True),
            arrives=i // 3,
        )
        for i in range(7)
    )
    core, _ = real.make_core(settings, parallel=parallel, whole=whole)
    outcomes = run_schedule(core, Schedule(settings=settings, requests=requests))
    for request in requests:
        real.check(request, outcomes[request.request_id])
    stats = core.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hits > 0 and stats.num_drafts > 50, stats
