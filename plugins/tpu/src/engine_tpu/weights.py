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
Params = dict[str, Any]
"""A tree of a model's arrays. A linear layer has "w" [O, I], with a bias "b" [O], and rounded scales "s" [O]."""
_ROUNDED = {"int8": (np.dtype(np.int8), 127.0), "fp8": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0)}
"""By how weights are rounded: their dtype, and its largest number that is used."""


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


class Matrices:
    """Makes a model's matrices on a mesh: plain ones, or rounded to 8 bits with a scale for each output.

    Args:
        shards: the mesh, and the dtype.
        rounding: "int8", "fp8" (e4m3), or "auto": as the model computes.
        deals_experts: experts are dealt whole to devices, and not each of them divided.

    Attributes:
        elements: of the tensors that were taken.
    """

    def __init__(self, shards: Shards, rounding: str = "auto", deals_experts: bool = False) -> None:
        self.shards = shards
        self.elements = 0
        self._rounding = _ROUNDED.get(rounding)
        self._deals = deals_experts and shards.size > 1
        self._wide = np.dtype(np.float64 if shards.dtype == np.float64 else np.float32)

    def take(self, tensors: Tensors, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """See `Tensors.take`."""
        tensor = tensors.take(name, shape)
        self.elements += tensor.size
        return tensor

    def outputs_divided(self, shape: tuple[int, int], part: Rows) -> Params:
        """A matrix [O, I] whose rows are divided; `part` gives each device's."""
        if self._rounding is None:
            return {"w": self.shards.divided(shape, part)}

        def rounded(number: int) -> np.ndarray:
            mine = part(number)
            return self._round(mine, self._scales(mine))

        scales = self.shards.divided(shape[:1], lambda number: self._scales(part(number)), dtype=self._wide)
        return {"w": self.shards.divided(shape, rounded, dtype=self._rounding[0]), "s": scales}

    def joined(self, tensors: Tensors, names: Sequence[str], out: int, size: int, bias: bool) -> Params:
        """Matrices [out, size] as one whose rows are divided: each device's part has its rows of all of them."""
        shards, total = self.shards, out * len(names)

        def part(whole: Sequence[np.ndarray]) -> Rows:
            return lambda number: np.concatenate([rows(one, number, shards.size) for one in whole])

        matrices = [self.take(tensors, f"{name}.weight", (out, size)) for name in names]
        packed = self.outputs_divided((total, size), part(matrices))
        if bias:
            packed["b"] = shards.divided((total,), part([self.take(tensors, f"{n}.bias", (out,)) for n in names]))
        return packed

    def summed(self, tensors: Tensors, name: str, out: int, size: int, bias: bool) -> Params:
        """A matrix [out, size] whose columns are divided: what the parts give is added up, and the bias after that."""
        shards, each = self.shards, size // self.shards.size
        matrix = self.take(tensors, f"{name}.weight", (out, size))

        def columns(number: int) -> np.ndarray:
            return matrix[:, number * each : (number + 1) * each]

        packed: Params
        if self._rounding is None:
            packed = {"w": shards.divided((out, size), columns, dim=1)}
        else:
            scales = self._scales(matrix)
            rounded = shards.divided(
                (out, size), lambda number: self._round(columns(number), scales), 1, self._rounding[0]
            )
            packed = {"w": rounded, "s": shards.whole(scales, self._wide)}
        if bias:
            packed["b"] = shards.whole(self.take(tensors, f"{name}.bias", (out,)))
        return packed

    def stacked(
        self, count: int, shape: tuple[int, int], matrix: Callable[[int, int | None], np.ndarray], divided: int
    ) -> Params:
        """Matrices [O, I] of `count` experts as one [count, I, O]; dealt whole, or of each its dimension `divided` of
        [count, O, I] divided. matrix: (expert, device's part, None for all of it)."""
        shards, dealt = self.shards, count // self.shards.size
        dim = 0 if self._deals else 3 - divided
        dtype = shards.dtype if self._rounding is None else self._rounding[0]

        def scales(expert: int, part: int | None) -> np.ndarray:
            """Of all of a matrix's inputs, of a device's outputs."""
            return self._scales(matrix(expert, part if divided == 1 else None))

        def parts(number: int) -> tuple[range, int | None]:
            if self._deals:
                return range(number * dealt, (number + 1) * dealt), None
            return range(count), number if shards.size > 1 else None

        def weights(number: int) -> np.ndarray:
            experts, part = parts(number)
            found = []
            for expert in experts:
                mine = matrix(expert, part)
                found.append((mine if self._rounding is None else self._round(mine, scales(expert, part))).T)
            return np.stack(found)

        packed: Params = {"w": shards.divided((count, shape[1], shape[0]), weights, dim, dtype)}
        if self._rounding is not None:

            def scaled(number: int) -> np.ndarray:
                experts, part = parts(number)
                return np.stack([scales(expert, part) for expert in experts])

            if not self._deals and divided == 2:  # inputs are divided: all devices have all outputs
                packed["s"] = shards.whole(scaled(0), self._wide)
            else:
                packed["s"] = shards.divided((count, shape[0]), scaled, 0 if self._deals else 1, self._wide)
        return packed

    def _scales(self, matrix: np.ndarray) -> np.ndarray:
        """[O]; the largest of each row becomes the largest number of the rounded dtype."""
        assert self._rounding is not None
        most = np.abs(matrix.astype(self._wide)).max(axis=1)
        return np.where(most == 0, 1, most / self._rounding[1]).astype(self._wide)

    def _round(self, matrix: np.ndarray, scales: np.ndarray) -> np.ndarray:
        assert self._rounding is not None
        dtype, most = self._rounding
        scaled = matrix.astype(self._wide) / scales[:, None]
        if dtype == np.int8:
            scaled = np.rint(scaled)
        return np.clip(scaled, -most, most).astype(dtype)


def rows(tensor: np.ndarray, number: int, size: int) -> np.ndarray:
    """The rows of one of `size` shards; fewer of the last, where they do not divide evenly."""
    each = -(-len(tensor) // size)
    return tensor[number * each : (number + 1) * each]


def padded(tensor: np.ndarray, length: int) -> np.ndarray:
    """With zeros behind, up to so many rows."""
    if len(tensor) == length:
        return tensor
    return np.concatenate((tensor, np.zeros((length - len(tensor), *tensor.shape[1:]), tensor.dtype)))


def nbytes(tree: Any) -> int:
    """Memory of all arrays of a tree, over all devices."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
