"""Weights: from mapped safetensors files to arrays on the mesh, of which each device gets its part and no more.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, a JSON header with dtype,
shape and place of each tensor, then the tensors, row by row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from engine.types.errors import CheckpointError

AXIS = "tp"
"""The mesh's axis over which a model's heads, inner dimensions, vocabulary and experts are divided."""
HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Endings of tensors that old checkpoints hold and that are computed anew."""
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_SHOWN = 6
_MOST_HEADER = 100 << 20

Rows = Callable[[int], np.ndarray]
"""A shard's number -> its part of a weight."""


class Shards(NamedTuple):
    """How a model is divided.

    Args:
        mesh: of one axis, `AXIS`.
        size: its devices.
        dtype: in which the model computes.
    """

    mesh: Mesh
    size: int
    dtype: np.dtype

    def whole(self, array: np.ndarray, dtype: np.dtype | None = None) -> jax.Array:
        """The array on every device."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.device_put(np.ascontiguousarray(array, dtype or self.dtype), sharding)

    def divided(self, shape: tuple[int, ...], part: Rows, dim: int = 0, dtype: np.dtype | None = None) -> jax.Array:
        """An array of this global shape, whose dimension `dim` is divided; `part` gives each device's."""
        spec = PartitionSpec(*(AXIS if at == dim else None for at in range(len(shape))))
        each = shape[dim] // self.size

        def callback(index: tuple[slice, ...]) -> np.ndarray:
            return np.ascontiguousarray(part((index[dim].start or 0) // each), dtype or self.dtype)

        return jax.make_array_from_callback(shape, NamedSharding(self.mesh, spec), callback)


class Tensors:
    """The tensors of safetensors files, by name. Reading one maps it; nothing is copied.

    Raises CheckpointError for a file that is missing, truncated, or no safetensors file.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._places: dict[str, tuple[np.ndarray, np.dtype, tuple[int, ...], int, int]] = {}
        self._taken: set[str] = set()
        self._problems: list[str] = []
        for file in files:
            self._open(file)

    def _open(self, file: str) -> None:
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"read tensors from {file}", "platform tpu reads safetensors files alone", "convert it, or use another"
            )
        try:
            raw = np.memmap(file, np.uint8, "r")
            size = int(raw[:8].view("<u8")[0])
            if size > min(_MOST_HEADER, len(raw) - 8):
                raise ValueError(f"its header would have {size:,} bytes")
            header = json.loads(bytes(raw[8 : 8 + size]))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                start, end = (8 + size + place for place in entry["data_offsets"])
                dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
                if dtype is None:
                    self._problems.append(f"{name} of dtype {entry['dtype']}")
                    continue
                if end > len(raw) or end - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"{name} ends behind the file, or has another size than its shape")
                if name in self._places:
                    self._problems.append(f"{name} there twice")
                self._places[name] = raw, dtype, shape, start, end
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"read tensors from {file}",
                f"the file is missing, truncated or broken: {error}",
                "fetch it again, and compare its size with the source's",
            ) from error

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A view of the mapped tensor; zeros, and a complaint later, where it is missing or has another shape."""
        self._taken.add(name)
        if name not in self._places:
            self._problems.append(f"{name} missing")
            return np.broadcast_to(np.zeros((), np.float32), shape)
        raw, dtype, found, start, end = self._places[name]
        if found != shape:
            self._problems.append(f"{name} {list(found)} for {list(shape)}")
            return np.broadcast_to(np.zeros((), np.float32), shape)
        return raw[start:end].view(dtype).reshape(shape)

    def check(self, tolerated: Sequence[str] = ()) -> None:
        """Raise CheckpointError where a tensor was missing, misshapen, or was never taken."""
        left = self._places.keys() - self._taken - set(tolerated)
        unexpected = [f"{name} unexpected" for name in sorted(left) if not name.endswith(HARMLESS)]
        if problems := [*self._problems, *unexpected]:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise CheckpointError(
                "load the weights",
                "of its tensors " + "; ".join(problems[:_SHOWN]) + more,
                "config.json and the weights do not belong together, or the architecture is another one",
            )


def rows(tensor: np.ndarray, number: int, size: int, units: int = 1) -> np.ndarray:
    """The rows of one of `size` shards; fewer of the last, where they do not divide evenly into `units`."""
    each = -(-len(tensor) // (size * units)) * units
    return tensor[number * each : (number + 1) * each]


def padded(tensor: np.ndarray, length: int) -> np.ndarray:
    """With zeros behind, up to so many rows."""
    if len(tensor) == length:
        return tensor
    return np.concatenate((tensor, np.zeros((length - len(tensor), *tensor.shape[1:]), tensor.dtype)))


def nbytes(tree: Any) -> int:
    """Memory of all arrays of a tree, over all devices."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
