"""Adapters of a model that stays in a file's blocks, beside the model with their products in its weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_maker import byte_vocabulary, greedy, tiny_model, write
from test_parity import PROMPTS, SETTINGS, scores, tokens

from engine import LLM, SamplingParams

pytest.importorskip("engine_lora", reason="engine-lora is not installed")
sys.path.append(str(Path(__file__).parents[2] / "lora" / "tests"))

from small_adapters import EMBEDDING, HEAD, write_pairs

from engine_lora import LoRARequest

VOCAB, HIDDEN = 272, 256
INNER = {"model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN), "model.layers.1.mlp.down_proj": (HIDDEN, 512)}
TARGETS: dict[str, dict[str, tuple[int, int]]] = {
    "embedding": {EMBEDDING: (HIDDEN, VOCAB)},
    "head": {HEAD: (VOCAB, HIDDEN)},
    "all": {EMBEDDING: (HIDDEN, VOCAB), HEAD: (VOCAB, HIDDEN), **INNER},
}


def merged(model: Any, changes: dict[str, torch.Tensor]) -> Any:
    """In float64, with a matrix of its own at each end."""
    found = copy.deepcopy(model).double()
    found.lm_head.weight = torch.nn.Parameter(found.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, change in changes.items():
            found.get_submodule(name).weight += change
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["two matrices", "one for both ends"])
def test_each_is_the_model_with_its_products(tied: bool, tmp_path: Path) -> None:
    """At both ends and between them, all in one batch; by the processor's own driver near to it, for it rounds rows."""
    model = tiny_model("LlamaForCausalLM", tie_word_embeddings=tied)
    path = write(tmp_path / "model.gguf", model, "Q6_K", vocabulary=byte_vocabulary())
    requests, expected = [None], [greedy(merged(model, {}), PROMPTS, 8, torch.float64)]
    for seed, (name, modules) in enumerate(TARGETS.items()):
        changes = write_pairs(tmp_path / name, seed, modules)
        requests.append(LoRARequest(name, 0, tmp_path / name))
        expected.append(greedy(merged(model, changes), PROMPTS, 8, torch.float64))
    assert len({str(each) for each in expected}) == len(requests), "an adapter changes nothing"

    def answers(**settings: Any) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=1)
        given = {**SETTINGS, "max_num_seqs": 8, "adapter": "lora", "adapter.max_loras": 3, "adapter.max_lora_rank": 4}
        with LLM(model=str(path), **given, **settings) as llm:
            prompts = [{"prompt_token_ids": ids} for _ in requests for ids in PROMPTS]
            each = [request for request in requests for _ in PROMPTS]
            return list(llm.generate(prompts, sampling, lora_request=each, use_tqdm=False))

    exact = answers(dtype="float64", quantization="gguf")
    assert tokens(exact) == [ids for each in expected for ids in each]
    assert np.abs(scores(answers(dtype="float32")) - scores(exact)).mean() < 0.3  # of log probabilities down to -43
