"""Adapters that PEFT makes and saves, beside the models into which it merges them, in float64. Where one matrix is both
ends of a model it merges two products into one, and what it computes before that is the oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adapted_engine import ADAPTED, PROMPTS, SETTINGS, generated, tokens_of

from engine import LLM
from engine_lora import LoRARequest

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
PARAMETERS = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "layers": (
        "Llama",
        {"intermediate_size": 96},
        {
            "linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
            "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
            "patterns": {"r": 3, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.mlp.up_proj": 2},
                         "target_modules": ["up_proj", "down_proj", "o_proj"]},
            "ends": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        },
    ),
    "one matrix for both ends": (
        "Llama",
        {"intermediate_size": 96, "tie_word_embeddings": True},
        {
            "embedding": {"r": 4, "target_modules": ["embed_tokens"]},
            "tied": {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        },
    ),
    "an embedding that is scaled": (
        "Gemma",
        {"intermediate_size": 96, "tie_word_embeddings": True, "head_dim": 16, "initializer_range": 0.3},
        {"embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}},
    ),
    "Mixtral's experts": (
        "Mixtral",
        {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {
            "both": PARAMETERS,
            "one": {**PARAMETERS, "target_parameters": ["experts.down_proj"]},
            "patterns": {**PARAMETERS, "rank_pattern": {"experts.gate_up_proj": 6}},
        },
    ),
    "experts whose rows take turns": (
        "GptOss",
        {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
         "sliding_window": 32},
        {"both": PARAMETERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_peft_saves_is_what_it_merges(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    kind, sizes, forms = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **sizes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    model.save_pretrained(tmp_path / "model")
    expected = []
    for name, form in forms.items():
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **form))
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.data.copy_(torch.randn_like(parameter) * 0.15)
        adapted.save_pretrained(tmp_path / name)
        if config.tie_word_embeddings:
            expected += [greedy(adapted, prompt["prompt_token_ids"]) for prompt in PROMPTS]
            continue
        adapted.merge_and_unload().save_pretrained(tmp_path / f"merged-{name}")
        expected += generated(str(tmp_path / f"merged-{name}"), SETTINGS)
    requests = [LoRARequest(name, 0, tmp_path / name) for name in forms]
    implementations = ("auto", "transformers") if kind == "Gemma" else ("auto",)
    for implementation in implementations:
        settings = {**ADAPTED, "adapter.experts": True, "model_impl": implementation}
        with LLM(model=str(tmp_path / "model"), **settings) as llm:
            assert tokens_of(llm, requests) == expected
    assert len(expected) == len(forms) * len(PROMPTS)


def greedy(model: Any, ids: list[int]) -> list[int]:
    """The tokens that a model of transformers goes on with."""
    found = list(ids)
    with torch.inference_mode():
        for _ in range(10):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]
