"""Floor 4, public: what a model's author builds with: layers and weights.

The package imports nothing by itself, so that a card may use its torch-free module (`parallel`) while the names below,
which need torch, come when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.modeling.decoder import Decoder as Decoder
    from engine.modeling.decoder import ModelBody as ModelBody
    from engine.modeling.decoder import Stack as Stack
    from engine.modeling.decoder import narrowed as narrowed
    from engine.modeling.layers import Attention as Attention
    from engine.modeling.layers import Embedding as Embedding
    from engine.modeling.layers import GatedMLP as GatedMLP
    from engine.modeling.layers import LMHead as LMHead
    from engine.modeling.layers import Norm as Norm
    from engine.modeling.layers import RMSNorm as RMSNorm
    from engine.modeling.layers import Rotary as Rotary
    from engine.modeling.layers import Weight as Weight
    from engine.modeling.linear import ColumnParallelLinear as ColumnParallelLinear
    from engine.modeling.linear import Linear as Linear
    from engine.modeling.linear import MergedColumnLinear as MergedColumnLinear
    from engine.modeling.linear import QKVLinear as QKVLinear
    from engine.modeling.linear import RowParallelLinear as RowParallelLinear
    from engine.modeling.loading import load_weights as load_weights
    from engine.modeling.loading import out_of_memory as out_of_memory
    from engine.modeling.module import Module as Module
    from engine.modeling.module import Param as Param

_NAMES = {
    "decoder": ("Decoder", "ModelBody", "Stack", "narrowed"),
    "layers": ("Attention", "Embedding", "GatedMLP", "LMHead", "Norm", "RMSNorm", "Rotary", "Weight"),
    "linear": ("ColumnParallelLinear", "Linear", "MergedColumnLinear", "QKVLinear", "RowParallelLinear"),
    "loading": ("load_weights", "out_of_memory"),
    "module": ("Module", "Param"),
}
__all__ = [name for names in _NAMES.values() for name in names]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _NAMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
