"""Every model through the whole engine beside `transformers.generate`: one row of the table each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import BUDGET, PAGES, Answer, make, served
from model_table import TABLE, WITH_STATES
from pairwise import pairwise

ALL = {**TABLE, **WITH_STATES}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", ALL)
def test_greedy(architecture: str, tmp_path: Path) -> None:
    """Together, in chunks, preempted; then one alone, whose prefix is cached.

    States have pages enough: where requests preempt each other, their snapshots go first, as the drafts' test has it.
    """
    settings = {"num_kv_pages": 48} if architecture in WITH_STATES else {}
    cached = served(tmp_path, make(tmp_path, architecture, ALL[architecture]), **settings)
    assert cached, "the prompt was computed a moment ago, and nothing of it is found again"


@pytest.mark.parametrize("architecture", WITH_STATES)
def test_states_behind_drafts(architecture: str, tmp_path: Path) -> None:
    """Prompts that repeat themselves, so that there are drafts, of which hardly one counts."""
    answers = make(tmp_path, architecture, ALL[architecture], repeated=True)
    served(tmp_path, answers, drafter="ngram", max_num_batched_tokens=64)


FACTORS = {
    "workers": ("tensor_parallel_size", "pipeline_parallel_size"),
    "max_num_seqs": (8, 1),
    "max_num_batched_tokens": (BUDGET, 128),
    "num_kv_pages": (PAGES, 96),
    "enable_prefix_caching": (True, False),
}
"""What meets in the product: two ranks and two stages, requests together and alone, in chunks and at once, preempted
and not, with prefixes that are found again and without."""


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    """One of an architecture, and the oracle's answers."""
    folder = tmp_path_factory.mktemp("product")
    return folder, make(folder, request.param, ALL[request.param])


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(FACTORS), ids=lambda case: "-".join(map(str, case.values())))
@pytest.mark.parametrize("checkpoint", ALL, indirect=True)
def test_product(checkpoint: tuple[Path, list[Answer]], case: dict[str, Any]) -> None:
    """Every pair of these, on several workers; alone, one has them in `test_greedy`."""
    folder, answers = checkpoint
    settings = {name: value for name, value in case.items() if name != "workers"} | {case["workers"]: 2}
    if json.loads((folder / "config.json").read_text())["architectures"][0] in WITH_STATES:  # see `test_greedy`
        settings["num_kv_pages"] = max(48, settings["num_kv_pages"])
    cached = served(folder, answers, **settings)
    assert case["enable_prefix_caching"] or not cached


@pytest.mark.slow
@pytest.mark.parametrize("architecture", WITH_STATES)
def test_states_that_are_swapped_out(architecture: str, tmp_path: Path) -> None:
    """Preempted requests come back with theirs."""
    served(tmp_path, make(tmp_path, architecture, ALL[architecture]), swap_space=1 << 24)


DEALT: dict[str, dict[str, Any]] = {
    "still": {"tensor_parallel_size": 2},
    "moving": {"tensor_parallel_size": 2, "experts.redundant": 2, "experts.rebalance_every": 4},
    "over cores": {"data_parallel_size": 2, "experts.redundant": 2, "experts.rebalance_every": 4},
    "shuffled over cores": {"data_parallel_size": 2, "experts": "all_to_all"},
}


@pytest.mark.slow
@pytest.mark.parametrize("dealt", DEALT)
@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "GptOssForCausalLM"])
def test_experts_dealt_over_processes(architecture: str, dealt: str, tmp_path: Path) -> None:
    """One tensor for each expert, shared ones beside them, and all experts in one tensor."""
    settings = {"enable_expert_parallel": True, **DEALT[dealt]}
    served(tmp_path, make(tmp_path, architecture, ALL[architecture]), **settings)
