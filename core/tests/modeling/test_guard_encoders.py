"""Encoders and classification heads under the dispatch guard: they compute through ops and attention only."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import CARDS, PlainOps, body_of, make_context, plain_walk

from engine.interfaces.model import State
from engine_kit.dispatch_guard import DispatchGuard
from engine_kit.hf_folder import resolve_folder
from engine_kit.safetensors_files import read_safetensors
from engine_reference.models import bert_card, llama_card

ENCODERS = {
    "BertModel": bert_card.Bert,
    "BertForSequenceClassification": bert_card.BertClassifier,
    "RobertaModel": bert_card.Roberta,
    "XLMRobertaForSequenceClassification": bert_card.RobertaClassifier,
    "LlamaModel": llama_card.LlamaEmbedder,
    "Qwen3ForSequenceClassification": llama_card.Qwen3Classifier,
}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = Path(__file__).parents[3] / "plugins" / "reference" / "tests" / "pooling" / "pooling_models.py"
    spec = importlib.util.spec_from_file_location("modeling_tests_pooling_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.PoolingCheckpoints(tmp_path_factory.mktemp("pooling"))


class BothWays:
    """One row that sees itself whole."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * self._scale).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


@pytest.mark.parametrize("architecture", ENCODERS)
def test_first_party_models_pass(make, architecture: str) -> None:
    """Forward and classification give under the guard what they give without."""
    assert not ENCODERS.keys() & CARDS.keys()
    features = {"num_labels": 2} if architecture.endswith("Classification") else {}
    files = resolve_folder("x", make(architecture, **features))
    card: Any = ENCODERS[architecture]

    def run(guard: DispatchGuard | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = make_context(
            card.describe(files.config), ops=PlainOps(), attention=lambda layer, scale, **_: BothWays(scale)
        )
        model = body_of(card)(context if guard is None else guard.context(context))
        model.load_weights(read_safetensors(files.weights))
        state = State(token_ids=torch.tensor([3, 1, 4], dtype=torch.int32), positions=torch.arange(3))
        state["token_type_ids"] = torch.zeros(3, dtype=torch.int32)
        with torch.inference_mode(), guard or DispatchGuard().allowed():
            hidden = model.forward(state, plain_walk)
            return hidden, model.classify(hidden) if features else None

    (expected, labels), (found, guarded) = run(None), run(DispatchGuard())
    assert torch.equal(found, expected)
    assert (labels is None) == (not features)
    assert labels is None or (torch.equal(guarded, labels) and labels.shape == (3, 2))
