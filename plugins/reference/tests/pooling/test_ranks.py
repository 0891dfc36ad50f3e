"""Several ranks give one rank's vectors and labels, in float64. Ranks are threads with the real workers and gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pooling_models import prompts
from thread_ranks import registry

from engine import PoolingParams
from engine.config.settings import EngineConfig
from engine.errors import EngineError, UnsupportedModelError
from engine.llm import LLMEngine
from engine_kit.llm import LLM

MODELS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "RobertaForSequenceClassification": {"num_labels": 3},
    "LlamaModel": {"kv_heads": 1},
    "Qwen3ForSequenceClassification": {"num_labels": 2},
}


def encode(folder: Any, size: int, **settings: Any) -> list[np.ndarray]:
    config = EngineConfig(
        model=str(folder), dtype="float64", tensor_parallel_size=size, num_kv_pages=40, max_num_seqs=3,
        max_model_len=64, max_num_batched_tokens=64, **settings,
    )  # fmt: skip
    with LLM.from_engine(LLMEngine.from_engine_args(config, registry())) as llm:
        given = prompts((9, 30, 60, 4))
        wishes = [PoolingParams()] * 4
        if not llm.llm_engine.frontend.inputs.model.pooler.num_labels:
            wishes[1:3] = [PoolingParams(pooling_type="mean"), PoolingParams(task="token_embed")]
        return [output.outputs.data for output in llm.encode(given, wishes, use_tqdm=False)]


@pytest.mark.parametrize("architecture", MODELS)
def test_two_and_four_ranks_give_one_ranks_results(checkpoints, architecture: str) -> None:
    folder = checkpoints(architecture, **MODELS[architecture])
    expected = encode(folder, 1)
    for size in (2, 4):
        for one, other in zip(encode(folder, size, executor="threads"), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("architecture", ["LlamaModel", "Qwen3ForSequenceClassification"])
def test_stages_give_one_ranks_results(checkpoints, architecture: str) -> None:
    """What is pooled is pooled on the last one."""
    folder = checkpoints(architecture, **MODELS[architecture], layers=3)
    expected = encode(folder, 1)
    for one, other in zip(encode(folder, 1, executor="threads", pipeline_parallel_size=2), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_an_encoder_has_no_stages(checkpoints) -> None:
    with pytest.raises(EngineError, match="it does not serve stages"):
        encode(checkpoints("BertModel"), 1, executor="threads", pipeline_parallel_size=2)


def test_what_does_not_divide(checkpoints) -> None:
    with pytest.raises(UnsupportedModelError, match="num_attention_heads 4 does not divide over 3 ranks"):
        encode(checkpoints("BertModel"), 3, executor="threads")
