"""Floor 4, public: what a model's author builds with: layers, weights, rotary tables, and facts from config.json.

The package imports nothing by itself, so that a card may use its torch-free modules (`config`,
`parallel`) while the names below, which need torch, come when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.modeling.attention import Attention, LatentAttention
    from engine.modeling.decoder import Decoder, ModelBody, Stack
    from engine.modeling.layers import Embedding, GatedMLP, LayerNorm, LMHead, RMSNorm, Table
    from engine.modeling.linear import ColumnParallelLinear, Linear, MergedColumnLinear, QKVLinear, RowParallelLinear
    from engine.modeling.loading import load_weights, out_of_memory, read_safetensors
    from engine.modeling.module import Module, Param
    from engine.modeling.rotary import Rotary

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "Decoder",
    "Embedding",
    "GatedMLP",
    "LMHead",
    "LatentAttention",
    "LayerNorm",
    "Linear",
    "MergedColumnLinear",
    "ModelBody",
    "Module",
    "Param",
    "QKVLinear",
    "RMSNorm",
    "Rotary",
    "RowParallelLinear",
    "Stack",
    "Table",
    "load_weights",
    "out_of_memory",
    "read_safetensors",
]

_HOMES = {
    "Attention": "attention",
    "LatentAttention": "attention",
    "Decoder": "decoder",
    "ModelBody": "decoder",
    "Stack": "decoder",
    "Embedding": "layers",
    "GatedMLP": "layers",
    "LMHead": "layers",
    "LayerNorm": "layers",
    "RMSNorm": "layers",
    "Table": "layers",
    "ColumnParallelLinear": "linear",
    "Linear": "linear",
    "MergedColumnLinear": "linear",
    "QKVLinear": "linear",
    "RowParallelLinear": "linear",
    "load_weights": "loading",
    "out_of_memory": "loading",
    "read_safetensors": "loading",
    "Module": "module",
    "Param": "module",
    "Rotary": "rotary",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
