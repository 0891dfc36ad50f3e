"""Models that strangers wrote out of tree, right ones: they pass the suite by three lines, and serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from engine_gpt2.card import GPT2Card
from engine_mixtral.card import MixtralCard
from registered import register
from tokenizers import Tokenizer, models

from engine import LLM, SamplingParams
from engine.cli.main import main
from engine_sdk.conformance import ModelConformance
from engine_sdk.conformance.model.small import small_config

STRANGERS = Path(__file__).parent / "strangers"


class TestGPT2(ModelConformance):
    card, architecture = GPT2Card, "GPT2LMHeadModel"


class TestMixtral(ModelConformance):
    card, architecture = MixtralCard, "MixtralForCausalLM"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both packages, as `pip install -e` leaves them."""
    for folder in STRANGERS.iterdir():
        register(folder, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return


def checkpoint(folder: Path, architecture: str) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder of a random model, as transformers saves it, and that model."""
    kind = getattr(transformers, architecture)
    torch.manual_seed(0)
    config = {**small_config(architecture, {}), "eos_token_id": None, "bos_token_id": None, "initializer_range": 0.2}
    model = kind(kind.config_class(**config)).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(99)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder, model


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_they_serve(installed: None, tmp_path: Path, architecture: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that transformers saved: the greedy tokens are transformers' own. Whether steps are captured is the
    card's word: it is kept, and told."""
    folder, model = checkpoint(tmp_path / "model", architecture)
    prompts = [[5, 17, 40, 8], [60], [9, 9, 12, 80, 33, 71, 4]]
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :] for ids in prompts
    ]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model=str(folder), dtype="float32", num_kv_pages=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        worker = llm.llm_engine.client.worker
    assert [list(output.outputs[0].token_ids) for output in outputs] == [ids.tolist() for ids in expected]
    assert main(["plugins", "why", "model", "--model", str(folder)]) == 0
    said = capsys.readouterr().out
    assert architecture in said
    uncaptured = architecture == "MixtralForCausalLM"
    assert ("captured_by = frozenset()" in said) == uncaptured
    if worker.not_captured is not None:  # the platform captures steps
        assert any("captured_by = frozenset()" in reason for reason in worker.not_captured) == uncaptured
        assert not (uncaptured and worker.captured)
