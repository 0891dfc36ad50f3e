"""The types in which ggml stores weights (GGUF files), for cards and bodies that read them. Torch-free.

A checkpoint that stores them so says in its config's `quantization_config`: {"quant_method": "gguf", "types": {name:
type}}, with the names of weights as the model asks for them, ".weight" left out and "*" for the number of an expert.
Their tensors are uint8 [O, blocks, bytes of a block], and plain ones those of their dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.interfaces.quantization import LayerShape, StoredTensor
from engine.types.errors import CheckpointError

METHOD = "gguf"


class BlockType(NamedTuple):
    """A type.

    Args:
        number: in files.
        inputs: weights of a block, in a row of one output.
        bytes: of a block.
        dtype: of its tensors.
    """

    number: int
    inputs: int
    bytes: int
    dtype: str = "uint8"

    @property
    def plain(self) -> bool:
        """Numbers as they stand."""
        return self.dtype != "uint8"


TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        "F32": BlockType(0, 1, 4, "float32"),
        "F16": BlockType(1, 1, 2, "float16"),
        "BF16": BlockType(30, 1, 2, "bfloat16"),
        "Q4_0": BlockType(2, 32, 18),
        "Q4_1": BlockType(3, 32, 20),
        "Q5_0": BlockType(6, 32, 22),
        "Q5_1": BlockType(7, 32, 24),
        "Q8_0": BlockType(8, 32, 34),
        "Q2_K": BlockType(10, 256, 84),
        "Q3_K": BlockType(11, 256, 110),
        "Q4_K": BlockType(12, 256, 144),
        "Q5_K": BlockType(13, 256, 176),
        "Q6_K": BlockType(14, 256, 210),
        "IQ4_NL": BlockType(20, 32, 18),
        "IQ4_XS": BlockType(23, 256, 136),
    }
)
"""By ggml's names."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


def stored_by_ggml(stored: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` is of this form."""
    return stored.get("quant_method") == METHOD


def type_of(config: Mapping[str, Any], name: str) -> str:
    """The type of a weight, by its layer's name.

    Raises CheckpointError where the config names none that is known.
    """
    stored = config.get("quantization_config") or {}
    types = stored.get("types") or {}
    found = types.get(_EXPERT.sub(".experts.*.", name))
    if found not in TYPES:
        raise CheckpointError(
            f"load {name}.weight", f"its type is {found!r}, which is none of {', '.join(TYPES)}", "fetch the file again"
        )
    return str(found)


def block_tensors(layer: LayerShape, config: Mapping[str, Any]) -> list[StoredTensor]:
    """The tensors of a layer: "weight.0", "weight.1", ... of its names, as they are stored, and "bias".

    Raises ConfigError where this rank's part begins or ends within a block.
    """
    found = []
    for place, name in enumerate(layer.names):
        kind = TYPES[type_of(config, name)]
        (stored,) = (one for one in layer.stored("weight", inputs=kind.inputs) if one.name == f"{name}.weight")
        shape = stored.shape if kind.plain else (*stored.shape, kind.bytes)
        found.append(
            stored._replace(key=f"weight.{place}", shape=shape, dtypes=frozenset({kind.dtype}))  # the cut is of blocks
        )
    return found + (layer.stored("bias", inputs=0, cast=True) if layer.bias else [])
