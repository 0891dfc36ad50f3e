"""Every model through the whole engine beside `transformers.generate`: one row of the table each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy import make, served
from model_table import TABLE, WITH_STATES

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


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("architecture", ALL)
def test_on_several_workers(architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Over two ranks, and in two stages."""
    served(tmp_path, make(tmp_path, architecture, ALL[architecture]), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", WITH_STATES)
def test_states_that_are_swapped_out(architecture: str, tmp_path: Path) -> None:
    """Preempted requests come back with theirs."""
    served(tmp_path, make(tmp_path, architecture, ALL[architecture]), swap_space=1 << 24)
