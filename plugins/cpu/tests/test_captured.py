"""Captured decode steps through the engine: the same bits as uncaptured ones, for every model, dtype and level."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams
from engine.interfaces.attention import AttentionBatch
from engine.interfaces.drafter import DraftRows, Drafts
from engine.runner.drafting import Drafting
from engine_cpu.attention_cpu.body import CpuAttentionBody
from engine_cpu.attention_cpu.plan import CpuPlan
from engine_cpu.platform_cpu.capture import Replay

LEVELS = ("scalar", "avx2", "avx512", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
SETTINGS: dict[str, Any] = {"platform": "cpu", "ops": "cpu", "attention": "cpu", "num_kv_pages": 120}


@pytest.fixture(autouse=True)
def a_fit_processor(native: Any) -> None:
    if native.levels() == ["scalar"]:
        pytest.skip("this processor has neither AVX2 nor NEON")


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    """What makes random checkpoints of the first-party models, from the core's tests."""
    path = Path(__file__).parents[3] / "plugins/reference/tests/parity/checkpoints.py"
    if not path.exists():
        pytest.skip("the core's tests are not here")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("parity_checkpoints", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def workload(seed: int, vocab: int = 256) -> tuple[list[Any], list[SamplingParams]]:
    """Requests of any lengths, greedy and drawn, with everything that edits logits among them."""
    random = np.random.default_rng(seed)
    prompts, params = [], []
    for index in range(int(random.integers(1, 11))):
        prompts.append({"prompt_token_ids": random.integers(0, vocab, int(random.integers(1, 60))).tolist()})
        drawn = bool(random.integers(0, 2))
        params.append(
            SamplingParams(
                temperature=0.9 if drawn else 0.0,
                seed=seed * 100 + index,
                top_p=0.95 if random.integers(0, 2) else 1.0,
                top_k=int(random.choice([0, 20])),
                repetition_penalty=float(random.choice([1.0, 1.1])),
                logprobs=[None, 0, 3][int(random.integers(0, 3))],
                max_tokens=int(random.integers(1, 25)),
                ignore_eos=True,
            )
        )
    return prompts, params


def told(outputs: list[Any]) -> list[Any]:
    """Tokens and log probabilities, exactly."""
    return [
        (
            list(output.outputs[0].token_ids),
            [
                [(token, entry.rank, entry.logprob) for token, entry in place.items()]
                for place in output.outputs[0].logprobs or []
            ],
        )
        for output in outputs
    ]


def both(seeds: range, captured: tuple[int, ...], **settings: Any) -> None:
    """Run the workloads captured and not, and compare."""
    found = []
    for capture in ("never", "always"):
        with LLM(**{"platform.capture": capture}, **(SETTINGS | settings)) as llm:
            ready = llm.llm_engine.client.worker
            assert ready.not_captured == (), ready.not_captured
            assert ready.captured == (captured if capture == "always" else ())
            found.append([told(llm.generate(*workload(seed), use_tqdm=False)) for seed in seeds])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_workloads(dtype: str) -> None:
    """Batches that grow and shrink through all buckets and beyond, with prompts in chunks between them."""
    both(range(7), (7,), dtype=dtype, max_num_seqs=7, max_num_batched_tokens=32)


def test_under_pressure() -> None:
    """Few pages: requests are preempted and computed again."""
    both(range(20, 26), (4,), dtype="bfloat16", max_num_seqs=4, num_kv_pages=14, max_num_batched_tokens=24)


def test_steps_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose rows all have the same number of drafts are replayed, others run: the bits are the same."""
    replayed: list[int] = []
    replay = Replay.__call__

    def counted(step: Replay, rows: int = 0) -> None:
        replayed.append(len(step.tape))
        replay(step, rows)

    monkeypatch.setattr(Replay, "__call__", counted)
    drafts: dict[str, Any] = {"drafter": "ngram", "drafter.num_tokens": 3, "drafter.min_match": 1, "drafter.cost": 0.05}
    both(range(80, 82), (3,), dtype="float32", max_num_seqs=3, **drafts)
    decodes, captures = (
        replayed[0],
        4,
    )  # one to three drafts, after the decodes; each is replayed twice when it is tried
    assert len([calls for calls in replayed if calls != decodes]) > 2 * (captures - 1), "steps with drafts are replayed"


def test_drafts_of_a_model(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that are captured with their inputs and draws make the drafts that passes make that are not: of rows that
    want other numbers of them, that draw, that have penalties, and that end at the model's last position. Attention
    plans on the pages that a pass's rows have, of which it takes a copy, as other drivers do."""
    passes = pytest.importorskip("engine_kit.draft_pass").DraftPass
    pytest.importorskip("engine_drafters")
    proposed, drawn, found = Drafting.proposed, passes.__call__, list[Any]()
    alike = {"passes": 0}
    fill, copies = CpuPlan.fill, dict[int, Any]()

    def told_of(part: Drafting, rows: DraftRows) -> Drafts | None:
        drafts = proposed(part, rows)
        assert drafts is not None
        found.append([row[:n].tolist() for row, n in zip(drafts.tokens, rows.num_drafts.tolist(), strict=True)])
        return drafts

    def counted(self: Any, rows: DraftRows) -> Any:
        alike["passes"] += 1
        return drawn(self, rows)

    def copied(plan: CpuPlan, batch: AttentionBatch) -> None:
        fill(plan, batch)
        if plan.whole is not None:
            return
        table, rows = batch.block_table, len(batch.block_table)
        if id(plan) not in copies:
            copies[id(plan)] = plan, torch.arange(rows), torch.empty_like(table)
        _, every, own = copies[id(plan)]
        size = table.stride(0) * table.itemsize
        native.gather_rows(
            1, table.data_ptr(), size, rows, size, every.data_ptr(), True, rows, 0, False, own.data_ptr()
        )
        plan.block_table = own.data_ptr()

    monkeypatch.setattr(CpuPlan, "fill", copied)
    monkeypatch.setattr(Drafting, "proposed", told_of)
    monkeypatch.setattr(passes, "__call__", counted)
    drafts: dict[str, Any] = {"drafter": "draft_model", "drafter.num_tokens": 3, "drafter.cost": 0.05}
    both(range(90, 93), (3,), dtype="float32", max_num_seqs=3, max_model_len=80, **drafts)
    half = len(found) // 2
    assert found[:half] == found[half:] and alike["passes"] == half > 10
    assert len({len(row) for rows in found for row in rows}) > 1, "all rows want as many drafts"


def test_drafts_where_the_host_plans_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans on tables that are filled before: then no pass is launched with what fills them."""
    passes = pytest.importorskip("engine_kit.draft_pass").DraftPass
    pytest.importorskip("engine_drafters")
    proposed, found = Drafting.proposed, list[Drafts | None]()
    monkeypatch.setattr(CpuAttentionBody, "plans_by_launches", False)
    monkeypatch.delattr(passes, "capture")

    def told_of(part: Drafting, rows: DraftRows) -> Drafts | None:
        found.append(proposed(part, rows))
        return found[-1]

    monkeypatch.setattr(Drafting, "proposed", told_of)
    drafts: dict[str, Any] = {"drafter": "draft_model", "drafter.num_tokens": 2, "drafter.cost": 0.05}
    with LLM(**SETTINGS, dtype="float32", max_num_seqs=1, max_model_len=32, **drafts) as llm:
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert found and None not in found


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_level(native: Any, level: str) -> None:
    if level not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {level}")
    levels = {"ops.level": level, "attention.level": level}
    for dtype in ("bfloat16", "float32"):
        both(range(40, 42), (4,), dtype=dtype, max_num_seqs=4, **levels)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize(
    ("architecture", "features"),
    [
        ("LlamaForCausalLM", {"bias": True, "rope": "llama3"}),
        ("MistralForCausalLM", {"sliding": 9}),
        ("Qwen2ForCausalLM", {"sliding": 9, "layers": 3}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
    ],
)
def test_every_model(
    parity: ModuleType, tmp_path: Path, architecture: str, features: dict[str, Any], tie: bool
) -> None:
    """The guard lets every first-party decoder through, and its captured steps give the same bits."""
    folder = parity.make_checkpoint(tmp_path, architecture, tie=tie, dtype="bfloat16", **features)
    both(range(60, 63), (4,), model=str(folder), dtype="bfloat16", max_num_seqs=4, block_size=4)


@pytest.mark.parametrize(
    "ranks", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)]
)
def test_two_ranks(ranks: str) -> None:
    """Sums and gathers over shared memory stand on the tape as well.

    One step at a time, so that plans do not depend on when results come: oneDNN, which multiplies prompts, gives a row
    other bits in other company.
    """
    settings = {"dtype": "bfloat16", "max_num_seqs": 4, "in_flight": 1, "communicator": "shm,gloo"}
    both(range(70, 71), (4,), **{ranks: 2}, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"attention": "torch"}, "attention 'torch' (full) is not recorded"),
        ({"ops": "torch"}, "ops 'torch' (embedding, embedding_part, gather_rows, ...) is not recorded"),
        ({"dtype": "float64", "ops": "auto", "attention": "auto"}, "ops 'torch'"),
        ({"tensor_parallel_size": 2, "communicator": "gloo"}, "communicator 'gloo' is not recorded"),
    ],
)
def test_what_is_not_recorded_is_known_beforehand(settings: dict[str, Any], reason: str) -> None:
    """Nothing is captured, the start says why, and serving goes on without."""
    with LLM(**({**SETTINGS, "dtype": "float32", "max_num_seqs": 4} | settings)) as llm:
        ready = llm.llm_engine.client.worker
        assert ready.captured == () and any(reason in found for found in ready.not_captured), ready.not_captured
        assert len(llm.generate(*workload(1), use_tqdm=False)) == len(workload(1)[0])
