"""Every row of the table through the whole engine beside `transformers.generate`, and who serves what by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from fallback_table import ALONE, SERVED
from greedy import make, served

from engine import LLM

ALL = {**ALONE, **SERVED}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("architecture", ALL)
def test_greedy(architecture: str, tmp_path: Path) -> None:
    """Together, in chunks, preempted; then one alone, whose prefix is cached. Nobody names the driver of what no other
    serves."""
    named = {} if architecture in ALONE else {"model_impl": "transformers"}
    cached = served(tmp_path, make(tmp_path, architecture, ALL[architecture]), **named)
    assert cached, "the prompt was computed a moment ago, and nothing of it is found again"


def test_a_config_that_the_driver_of_the_name_does_not_have(tmp_path: Path) -> None:
    served(tmp_path, make(tmp_path, "LlamaForCausalLM", {"hidden_act": "gelu"}))


def test_a_bare_decoder_is_pooled(tmp_path: Path) -> None:
    """By the last token, in chunks."""
    answers = make(tmp_path, "HeliumForCausalLM", {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HeliumModel"]}))
    oracle = transformers.HeliumModel.from_pretrained(tmp_path)
    with LLM(model=str(tmp_path), dtype="float32", max_num_batched_tokens=24) as llm:
        found = llm.embed([answer.prompt for answer in answers], use_tqdm=False)
    for answer, output in zip(answers, found, strict=True):
        with torch.no_grad():
            last = oracle(torch.tensor([answer.prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["HeliumForCausalLM", "CwmForCausalLM"])
def test_two_processes(architecture: str, tmp_path: Path) -> None:
    """Over two ranks that are processes; what ranks in threads compute is the suite's affair."""
    served(tmp_path, make(tmp_path, architecture, ALL[architecture]), tensor_parallel_size=2)
