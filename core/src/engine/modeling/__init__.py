"""Floor 4, public: what a model's author builds with: layers, weights, rotary tables, and facts from config.json.

The package imports nothing by itself, so that a card may use its torch-free modules (`describe`, `rope_config`,
`checkpoint_files`) while the names below, which need torch, come when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.modeling.attention import Attention
    from engine.modeling.body import Body
    from engine.modeling.decoder import Decoder
    from engine.modeling.embedding import Embedding, LMHead
    from engine.modeling.guard import DispatchGuard
    from engine.modeling.latent_attention import LatentAttention
    from engine.modeling.layer_norm import LayerNorm
    from engine.modeling.linear import ColumnParallelLinear, Linear, MergedColumnLinear, QKVLinear, RowParallelLinear
    from engine.modeling.memory import out_of_memory
    from engine.modeling.mlp import GatedMLP
    from engine.modeling.module import Module, Slot
    from engine.modeling.norm import RMSNorm
    from engine.modeling.rotary import Rotary
    from engine.modeling.safetensors import read_safetensors
    from engine.modeling.table import Table
    from engine.modeling.weights import load_weights

__all__ = [
    "Attention",
    "Body",
    "ColumnParallelLinear",
    "Decoder",
    "DispatchGuard",
    "Embedding",
    "GatedMLP",
    "LMHead",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "MergedColumnLinear",
    "Module",
    "QKVLinear",
    "RMSNorm",
    "Rotary",
    "RowParallelLinear",
    "Slot",
    "Table",
    "load_weights",
    "out_of_memory",
    "read_safetensors",
]

_HOMES = {
    "Attention": "attention",
    "Body": "body",
    "ColumnParallelLinear": "linear",
    "Decoder": "decoder",
    "DispatchGuard": "guard",
    "Embedding": "embedding",
    "GatedMLP": "mlp",
    "LMHead": "embedding",
    "LatentAttention": "latent_attention",
    "LayerNorm": "layer_norm",
    "Linear": "linear",
    "MergedColumnLinear": "linear",
    "Module": "module",
    "QKVLinear": "linear",
    "RMSNorm": "norm",
    "Rotary": "rotary",
    "RowParallelLinear": "linear",
    "Slot": "module",
    "Table": "table",
    "load_weights": "weights",
    "out_of_memory": "memory",
    "read_safetensors": "safetensors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
