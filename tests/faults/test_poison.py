"""Logits that are not numbers cost the request that they belong to, and nobody else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, EngineArgs, SamplingParams
from engine.frontend.launch import launch
from engine.types.errors import InvalidLogitsError

POISON = 77
"""A token whose embedding is not a number."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poison") / "model"
    shutil.copytree(launch(EngineArgs(model="tiny")).files.folder, folder)
    weights = load_file(folder / "model.safetensors")
    if "lm_head.weight" not in weights:  # else the poison would stand in everybody's logits
        import json

        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def params(i: int, **more: Any) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 1.0, "logprobs": 2},
    ]
    allowed = [t for t in range(300) if t != POISON]
    return SamplingParams(seed=i, max_tokens=12, ignore_eos=True, allowed_token_ids=allowed, **kinds[i % 3], **more)


PROMPTS = [[11 + i, 40, 41 + i, 42, 90 + i] * (1 + i) for i in range(9)]


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"in_flight": 1}, marks=pytest.mark.slow), {"drafter": "ngram"}, {"tensor_parallel_size": 2}],
)
def test_a_poisonous_prompt_costs_its_request_alone(poisoned: Path, options: dict[str, Any]) -> None:
    """Few pages, so that those that held NaN are used again at once; whatever lies behind a row's end has no effect."""
    settings = {
        "dtype": "float64",
        "max_num_seqs": 6,
        "num_kv_pages": 40,
        "block_size": 4,
        "max_num_batched_tokens": 32,
    }
    with LLM(str(poisoned), **settings, **options) as llm:
        quiet = [
            list(llm.generate({"prompt_token_ids": p}, params(i), use_tqdm=False)[0].outputs[0].token_ids)
            for i, p in enumerate(PROMPTS)
        ]
        engine = llm.llm_engine
        for turn in range(2):
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(f"good-{i}", {"prompt_token_ids": prompt}, params(i))
                bad = [*prompt[:3], POISON, *prompt[:9]]
                engine.add_request(f"bad-{i}", {"prompt_token_ids": bad}, params(i + turn))
            ends: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        ends[output.request_id] = output
            for i, expected in enumerate(quiet):
                assert list(ends[f"good-{i}"].outputs[0].token_ids) == expected, (turn, i)
                bad_end = ends[f"bad-{i}"]
                assert isinstance(bad_end.error, InvalidLogitsError) and "NaN" in str(bad_end.error)
                assert not bad_end.outputs[0].token_ids
            stats = engine.client.last_stats
            assert (stats.pages_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            engine.client.core.check_integrity()  # type: ignore[attr-defined]


SHARED = [11, 40, 12, 42, 90, 5, 6, 7, 8, 21, 22, 23, 24, 25, 61, 62, 63, 64, 65, 66, 67, 68]
"""Five blocks, and the beginning of a sixth."""
ENDS = [[101, 102], [103], [101, 104, 105, 106, 107, 108]]


@pytest.mark.parametrize("attention", ["torch", "cpu"])
@pytest.mark.parametrize("budget", [64, 8])
@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_poisonous_end_leaves_the_shared_prefix_whole(
    poisoned: Path, attention: str, budget: int, in_flight: int
) -> None:
    """Requests that share it with the bad one have the tokens of before; computed in one chunk or several."""
    if attention == "cpu":
        pytest.importorskip("engine_cpu._native", reason="engine-cpu was built without native code")
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": budget}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    several = SamplingParams(temperature=0, max_tokens=2, n=3, ignore_eos=True)
    with LLM(str(poisoned), attention=attention, in_flight=in_flight, num_kv_pages=200, **settings) as llm:
        core: Any = llm.llm_engine.client.core  # type: ignore[attr-defined]

        def tokens(end: list[int]) -> list[int]:
            (output,) = llm.generate({"prompt_token_ids": [*SHARED, *end]}, greedy, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        quiet = [tokens(end) for end in ENDS]
        for params in (greedy, several):
            core.reset_prefix_cache()
            for _ in range(2):
                with pytest.raises(InvalidLogitsError, match="NaN"):
                    llm.generate({"prompt_token_ids": [*SHARED, POISON]}, params, use_tqdm=False)
                assert [tokens(end) for end in ENDS] == quiet
        core.check_integrity()
