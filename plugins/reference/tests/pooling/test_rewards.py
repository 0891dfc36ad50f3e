"""Reward models, which score each token, and rerankers whose head is made of tokens' logits, against transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooling_models import Oracle, prompts
from safetensors.torch import load_file, save_file

from engine import LLM, PoolingParams
from engine.errors import EngineError, InvalidRequestError

LENGTHS = (23, 1, 40, 5, 70, 16)
STEP = 77
LABELS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}


def open_llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float64", num_kv_pages=100, max_num_seqs=4, max_num_batched_tokens=24)


def with_config(source: Path, folder: Path, **changed: Any) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


@pytest.fixture(params=LABELS)
def rewarding(request: pytest.FixtureRequest, checkpoints: Any, tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint, and what its head says of every token of a prompt, by the formula."""
    plain, labels = checkpoints("Qwen2Model"), LABELS[request.param]
    folder = with_config(plain, tmp_path / "reward", architectures=[request.param])
    tensors, oracle = load_file(folder / "model.safetensors"), Oracle(plain, torch.float64, "Qwen2Model")
    size = oracle.model.config.hidden_size
    torch.manual_seed(3)
    shapes = {"0.weight": (size, size), "0.bias": (size,), "2.weight": (labels, size), "2.bias": (labels,)}
    head = {f"score.{name}": torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    save_file({**tensors, **head}, folder / "model.safetensors", {"format": "pt"})

    def expected(ids: list[int]) -> torch.Tensor:
        w = {name: tensor.double() for name, tensor in head.items()}
        inner = (torch.from_numpy(oracle.states(ids)) @ w["score.0.weight"].T + w["score.0.bias"]).relu()
        return inner @ w["score.2.weight"].T + w["score.2.bias"]

    return folder, expected


def test_every_token_is_scored(rewarding: tuple[Path, Any]) -> None:
    """Prompts in chunks and batched; the bare logits, the steps' alone, and the last token's as a text's label."""
    folder, expected = rewarding
    given = [[token + (token == STEP) for token in ids] for ids in prompts(LENGTHS)]
    given[4][3] = given[4][30] = given[4][69] = given[0][0] = STEP
    with open_llm(folder) as llm:
        every = llm.encode(given, PoolingParams(use_activation=False), use_tqdm=False)
        steps = llm.encode(given, PoolingParams(task="token_classify", step_tag_id=STEP), use_tqdm=False)
        texts = llm.classify(given, PoolingParams(use_activation=False), use_tqdm=False)
    for ids, one, step, text in zip(given, every, steps, texts, strict=True):
        logits = expected(ids)
        np.testing.assert_allclose(one.outputs.data, logits, atol=1e-12)
        np.testing.assert_allclose(text.outputs.probs, logits[-1], atol=1e-12)
        said = logits if logits.shape[1] == 1 else logits.softmax(-1)  # a reward is not bounded
        places = [place for place, token in enumerate(ids) if token == STEP]
        assert step.outputs.data.shape == (len(places), logits.shape[1])
        np.testing.assert_allclose(step.outputs.data, said[places], atol=1e-12)
    assert len(steps[4].outputs.data) == 3 and len(steps[1].outputs.data) == 0


@pytest.mark.parametrize("rewarding", ["Qwen2ForProcessRewardModel"], indirect=True)
def test_some_labels(rewarding: tuple[Path, Any]) -> None:
    """In the order that is asked; the softmax is over them. What the head does not have is refused, by name."""
    folder, expected = rewarding
    (ids,) = prompts((30,))
    with open_llm(folder) as llm:
        for chosen in ([1, 0], [1]):
            params = PoolingParams(task="token_classify", returned_token_ids=chosen)
            found = llm.encode([ids], params, use_tqdm=False)[0].outputs.data
            np.testing.assert_allclose(found, expected(ids)[:, chosen].softmax(-1), atol=1e-12)
        assert llm.encode([ids], params, use_tqdm=False)[0].num_cached_tokens == 0, "a cached token has no states"
        for wrong, said in (
            ({"returned_token_ids": [2]}, "head has 2 labels"),
            ({"returned_token_ids": []}, "list one or more"),
            ({"step_tag_id": -1}, "step_tag_id"),
            ({"step_tag_id": STEP, "task": "classify"}, "chooses tokens"),
            ({"task": "embed"}, "token_classify or classify"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                llm.encode([ids], PoolingParams(**wrong), use_tqdm=False)


RERANKER = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}


@pytest.mark.parametrize("tied", [False, True])
def test_a_reranker_answers_yes_or_no(checkpoints: Any, tmp_path: Path, tied: bool) -> None:
    """The score is the softmax of the logit of one token against the other's, as the decoder gives them."""
    plain = checkpoints("Qwen3ForCausalLM", tie=tied)
    folder = with_config(plain, tmp_path / "one", **RERANKER, is_original_qwen3_reranker=True)
    two = with_config(plain, tmp_path / "two", **RERANKER)
    oracle, texts = Oracle(plain, torch.float64), ("a cat", "the rain in Spain")
    with open_llm(folder) as llm, open_llm(two) as both:
        encode = llm.get_tokenizer().encode
        no, yes = (encode(token, add_special_tokens=False)[-1] for token in "ny")
        found = llm.score("what is it?", list(texts), use_tqdm=False)
        for text, output in zip(texts, found, strict=True):
            ids = encode("what is it?") + encode(text)
            expected = torch.from_numpy(oracle.logits(ids))[-1, [no, yes]].softmax(-1)
            assert output.prompt_token_ids == ids
            np.testing.assert_allclose(output.outputs.score, expected[1], atol=1e-12)
            labels = both.classify([ids], use_tqdm=False)[0].outputs.probs
            np.testing.assert_allclose(labels, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"classifier_from_token": ["n", "yes!"]}, "'yes!' is no token"),
        ({"classifier_from_token": ["n"], "is_original_qwen3_reranker": True}, "names 1 tokens"),
        ({"classifier_from_token": "ny"}, "no list of tokens"),
    ],
)
def test_what_cannot_be_a_head(checkpoints: Any, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    folder = with_config(checkpoints("Qwen3ForCausalLM"), tmp_path / "model", **{**RERANKER, **changed})
    with pytest.raises(EngineError, match=re.escape(said)):
        open_llm(folder)
