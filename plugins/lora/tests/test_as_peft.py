"""Adapters that PEFT makes and saves, beside the models into which it merges them, in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from test_adapted_engine import ADAPTED, PROMPTS, SETTINGS, generated, tokens_of

from engine import LLM
from engine_lora import LoRARequest

pytestmark = pytest.mark.slow


def test_what_peft_saves_is_what_it_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    model.save_pretrained(tmp_path / "model")
    forms = {
        "linear": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "rslora": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
        "patterns": {"r": 3, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {"layers.1.mlp.up_proj": 2},
                     "target_modules": ["up_proj", "down_proj", "o_proj"]},
    }  # fmt: skip
    expected = []
    for name, form in forms.items():
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **form))
        for parameter_name, parameter in adapted.named_parameters():
            if "lora_" in parameter_name:
                parameter.data = torch.randn_like(parameter) * 0.15
        adapted.save_pretrained(tmp_path / name)
        adapted.merge_and_unload().save_pretrained(tmp_path / f"merged-{name}")
        expected += generated(str(tmp_path / f"merged-{name}"), SETTINGS)
    requests = [LoRARequest(name, 0, tmp_path / name) for name in forms]
    with LLM(model=str(tmp_path / "model"), **ADAPTED) as llm:
        assert tokens_of(llm, requests) == expected
    assert len(expected) == len(forms) * len(PROMPTS)
