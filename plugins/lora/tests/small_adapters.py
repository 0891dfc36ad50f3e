"""A small Llama, adapters of it in PEFT's form, and the model with an adapter's products in its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import engine_reference

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 32, 48, 4, 2, 2, 256
SIZE = HIDDEN // HEADS
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float64", "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip
SHAPES: Mapping[str, tuple[int, int]] = {
    "self_attn.q_proj": (HEADS * SIZE, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
TOKENIZER = str(Path(engine_reference.__file__).parent / "checkpoint_dummy" / "files")


def write_model(
    folder: Path, changes: Mapping[str, torch.Tensor] | None = None, *, one_end: bool = False, **config: Any
) -> str:
    """The model, with these added to its weights. one_end: before that, its head is its embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5

    ends = {EMBEDDING: drawn(VOCAB, HIDDEN) * 4, HEAD: drawn(VOCAB, HIDDEN) * 4}
    ends[HEAD] = ends[EMBEDDING] if one_end else ends[HEAD]
    tensors = {f"{module}.weight": end + (changes or {}).get(module, 0) for module, end in ends.items()}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            module = f"model.layers.{layer}.{name}"
            tensors[f"{module}.weight"] = drawn(*shape) + (changes or {}).get(module, 0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
    if config.get("tie_word_embeddings"):
        del tensors[f"{HEAD}.weight"]
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_adapter(folder: Path, seed: int, rank: int = 4, targets: Sequence[str] = tuple(SHAPES), **config: Any) -> str:
    """An adapter as PEFT saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in targets:
            outputs, inputs = SHAPES[name]
            mine = config.get("rank_pattern", {}).get(name, rank)
            module = f"base_model.model.model.layers.{layer}.{name}"
            for end, shape in (("A", (mine, inputs)), ("B", (outputs, mine))):
                drawn = torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.3
                tensors[f"{module}.lora_{end}.weight"] = drawn
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def products(folder: str, scale: float | Mapping[str, float]) -> dict[str, torch.Tensor]:
    """B @ A of each layer, scaled: by one number, or by one for each of `SHAPES`."""
    tensors, found = load_file(Path(folder) / "adapter_model.safetensors"), {}
    for layer in range(LAYERS):
        for name in SHAPES:
            module = f"model.layers.{layer}.{name}"
            if (a := tensors.get(f"base_model.model.{module}.lora_A.weight")) is not None:
                by = scale if isinstance(scale, float) else scale[name]
                found[module] = by * tensors[f"base_model.model.{module}.lora_B.weight"] @ a
    return found


def write_pairs(
    folder: Path, seed: int, modules: Mapping[str, tuple[int, int]], rank: int = 4, **config: Any
) -> dict[str, torch.Tensor]:
    """An adapter of these modules, by their outputs and inputs, as PEFT saves it; embeddings by their A that is looked
    up. -> what it adds to the weights of each."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for module, (outputs, inputs) in modules.items():
        a, b = (
            torch.randn(*s, generator=generator, dtype=torch.float64) * 0.3 for s in ((rank, inputs), (outputs, rank))
        )
        looked_up = module == EMBEDDING
        ends = ("lora_embedding_A", "lora_embedding_B") if looked_up else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{module}.{end}": x for end, x in zip(ends, (a, b), strict=True)}
        found[module] = 2 * (b @ a).T if looked_up else 2 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    return found
