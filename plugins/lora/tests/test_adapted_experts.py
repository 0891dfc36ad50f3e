"""Adapters of the experts of mixtures: of each as a layer, and of all as one parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_adapters import VOCAB, write_pairs
from test_adapted_engine import ADAPTED, SETTINGS, generated, tokens_of

from engine import LLM
from engine.types.errors import InvalidRequestError
from engine_lora import LoRARequest

HIDDEN, INNER, EXPERTS, LAYERS, RANK = 32, 24, 4, 2, 4
BLOCK = "model.layers.{}.block_sparse_moe"
CONFIG: Mapping[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float64", "eos_token_id": 0,
    "hidden_act": "silu", "sliding_window": None,
}  # fmt: skip
SHAPES = {"w1": (INNER, HIDDEN), "w3": (INNER, HIDDEN), "w2": (HIDDEN, INNER)}
ATTENTION = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
EACH = {
    f"{BLOCK.format(layer)}.experts.{expert}.{name}": shape
    for layer in range(LAYERS)
    for expert in range(EXPERTS)
    for name, shape in SHAPES.items()
}
ADAPTS_EXPERTS: dict[str, Any] = {**ADAPTED, "adapter.experts": True}


def write_mixtral(folder: Path, changes: Mapping[str, torch.Tensor] | None = None) -> str:
    """The model, with these added to its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(CONFIG)))
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)} | EACH
    ones = ["model.norm"]
    for layer in range(LAYERS):
        shapes[f"{BLOCK.format(layer)}.gate"] = (EXPERTS, HIDDEN)
        shapes |= {f"model.layers.{layer}.self_attn.{name}": shape for name, shape in ATTENTION.items()}
        ones += [f"model.layers.{layer}.{norm}_layernorm" for norm in ("input", "post_attention")]
    tensors = {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.float64) for name in ones}
    for module, shape in shapes.items():
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[1] ** -0.5 * 2
        tensors[f"{module}.weight"] = drawn + (changes or {}).get(module, 0)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_parameters(folder: Path, targets: list[str], turned: bool, **config: Any) -> dict[str, torch.Tensor]:
    """An adapter of target_parameters, all experts together as transformers has them -> what it adds to each of them.

    turned: A reads what PEFT took for the inputs before 0.19, which are a parameter's outputs.
    """
    folder.mkdir()
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [], "bias": "none"}
    named = {"target_parameters": [f"mlp.experts.{target}" for target in targets]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | named | config))
    generator = torch.Generator().manual_seed(11)
    tensors, found = {}, {}
    sides = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    for layer in range(LAYERS):
        for target in targets:
            outputs, inputs = sides[target][::-1] if turned else sides[target]
            a = torch.randn(EXPERTS, RANK, inputs, generator=generator, dtype=torch.float64) * 0.3
            b = torch.randn(outputs, RANK, EXPERTS, generator=generator, dtype=torch.float64) * 0.3
            inner = target == "gate_up_proj" and len(targets) == 2
            module = f"base_model.model.model.layers.{layer}.mlp.experts{'.base_layer' if inner else ''}"
            tensors[f"{module}.lora_A.weight"] = a.reshape(-1, inputs)
            tensors[f"{module}.lora_B.weight"] = b.reshape(outputs, -1)
            delta = 2 * torch.einsum("ore,eri->eoi", b, a)
            delta = delta.transpose(1, 2) if turned else delta
            for expert in range(EXPERTS):
                block = f"{BLOCK.format(layer)}.experts.{expert}"
                if target == "down_proj":
                    found[f"{block}.w2"] = delta[expert]
                else:
                    found |= {f"{block}.w1": delta[expert, :INNER], f"{block}.w3": delta[expert, INNER:]}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return found


FORMS: Mapping[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "each": lambda folder: write_pairs(folder, 1, EACH | {"model.layers.0.self_attn.q_proj": (32, 32)}),
    "some": lambda folder: write_pairs(folder, 2, {name: s for name, s in EACH.items() if ".1." in name}, rank=8),
    "parameters": lambda folder: write_parameters(folder, ["gate_up_proj", "down_proj"], False),
    "turned": lambda folder: write_parameters(folder, ["down_proj"], True, peft_version="0.18.1"),
}


class Mixtral:
    """The model, adapters of its experts, and the tokens that each of these gives."""

    def __init__(self, folder: Path) -> None:
        self.model = write_mixtral(folder / "model")
        self.requests: list[Any] = [None]
        models = [self.model]
        for name, write in FORMS.items():
            models.append(write_mixtral(folder / f"merged-{name}", write(folder / name)))
            self.requests.append(LoRARequest(name, 0, folder / name))
        self.expected = [generated(model, SETTINGS) for model in models]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Mixtral:
    return Mixtral(tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize("changes", [{}, {"tensor_parallel_size": 2}, {"dtype": "float32"}], ids=str)
def test_as_merged_into_the_experts(mixtral: Mixtral, changes: dict[str, Any]) -> None:
    assert len({str(tokens) for tokens in mixtral.expected}) == 1 + len(FORMS), "an adapter changes nothing"
    with LLM(model=mixtral.model, **{**ADAPTS_EXPERTS, **changes}) as llm:
        assert tokens_of(llm, mixtral.requests) == [tokens for one in mixtral.expected for tokens in one]


def test_what_does_not_fit_the_experts(mixtral: Mixtral, tmp_path: Path) -> None:
    write_parameters(tmp_path / "rank", ["down_proj"], False, r=3)
    write_pairs(tmp_path / "more", 1, {f"{BLOCK.format(0)}.experts.{EXPERTS}.w1": SHAPES["w1"]})
    with LLM(model=mixtral.model, **ADAPTS_EXPERTS) as llm:
        for name, found in (
            ("rank", r"of 4 experts of this model, and of rank 3, they would be \[12, 24\] and \[32, 12\]"),
            ("more", r"no layer model.layers.0.block_sparse_moe.experts.4.w1"),
        ):
            with pytest.raises(InvalidRequestError, match=found):
                tokens_of(llm, [LoRARequest(name, 0, tmp_path / name)])
    with LLM(model=mixtral.model, **ADAPTED) as llm, pytest.raises(InvalidRequestError, match="adapter.experts true"):
        tokens_of(llm, mixtral.requests[3:4])
