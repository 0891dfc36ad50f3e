"""Heads with random weights, written in each of the forms in which heads are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, INNER = 64, 32, 4, 2, 8, 48
DRAFTED = 24
"""The draft vocabulary of EAGLE-3."""


class Sizes(NamedTuple):
    """Of a target, and of a head for it."""

    vocab: int = VOCAB
    hidden: int = HIDDEN
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    size: int = SIZE
    inner: int = INNER

    def layer(self) -> dict[str, Any]:
        """A Llama layer, as config.json has it."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.size,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000.0,
            "hidden_act": "silu",
            "torch_dtype": "float64",
        }


SMALL = Sizes()
LAYER: dict[str, Any] = SMALL.layer()


def weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Random tensors; norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[name] = 1 + drawn / 8 if "norm" in name else drawn / shape[-1] ** 0.5
    return made


def layer_shapes(prefix: str, in_size: int, of: Sizes) -> dict[str, tuple[int, ...]]:
    """Of attention and feed-forward block."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (of.heads * of.size, in_size),
        f"{prefix}.self_attn.k_proj.weight": (of.kv_heads * of.size, in_size),
        f"{prefix}.self_attn.v_proj.weight": (of.kv_heads * of.size, in_size),
        f"{prefix}.self_attn.o_proj.weight": (of.hidden, of.heads * of.size),
        f"{prefix}.mlp.gate_proj.weight": (of.inner, of.hidden),
        f"{prefix}.mlp.up_proj.weight": (of.inner, of.hidden),
        f"{prefix}.mlp.down_proj.weight": (of.hidden, of.inner),
        f"{prefix}.post_attention_layernorm.weight": (of.hidden,),
    }


def d2t(seed: int, drafted: int = DRAFTED, vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t, t2d): which of the target's tokens are drafted."""
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:drafted].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(drafted), t2d


def eagle(seed: int = 0, bias: bool = True, of: Sizes = SMALL) -> dict[str, torch.Tensor]:
    """EAGLE's tensors, in SafeAILab's names."""
    shapes = {"fc.weight": (of.hidden, 2 * of.hidden), **({"fc.bias": (of.hidden,)} if bias else {})}
    return weights({**shapes, **layer_shapes("layers.0", of.hidden, of)}, seed)


def eagle3(seed: int = 0, drafted: int = DRAFTED, streams: int = 3, of: Sizes = SMALL) -> dict[str, torch.Tensor]:
    """EAGLE-3's tensors, in SafeAILab's names."""
    shapes = {
        "fc.weight": (of.hidden, streams * of.hidden),
        **layer_shapes("midlayer", 2 * of.hidden, of),
        "midlayer.hidden_norm.weight": (of.hidden,),
        "midlayer.input_layernorm.weight": (of.hidden,),
        "norm.weight": (of.hidden,),
        "lm_head.weight": (drafted, of.hidden),
    }
    made = weights(shapes, seed)
    if drafted < of.vocab:
        made["d2t"], made["t2d"] = d2t(seed, drafted, of.vocab)
    return made


def medusa(seed: int = 0, heads: int = 3, layers: int = 1, of: Sizes = SMALL) -> dict[str, torch.Tensor]:
    """Medusa's tensors, in FasterDecoding's names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes[f"{head}.{layer}.linear.weight"] = (of.hidden, of.hidden)
            shapes[f"{head}.{layer}.linear.bias"] = (of.hidden,)
        shapes[f"{head}.{layers}.weight"] = (of.vocab, of.hidden)
    return weights(shapes, seed)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], file: str = "model.safetensors"
) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def of_speculators(kind: str, tensors: dict[str, torch.Tensor], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, tensors) in the form of the `speculators` library."""
    renames = {"eagle": (("fc.", "fusion_fc."), ("layers.0.", "transformer.")), "eagle3": (("midlayer.", "layers.0."),)}
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in renames[kind]:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        renamed[name] = tensor
    layer = {key: value for key, value in LAYER.items() if key != "torch_dtype"}
    config = {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somebody/target", "architectures": []}},
        "transformer_layer_config": {**layer, "model_type": "llama"},
        "torch_dtype": "float64",
        **more,
    }
    return config, renamed
