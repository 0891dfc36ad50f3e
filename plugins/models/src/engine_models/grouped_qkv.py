"""Checkpoints that have queries, keys and values in one tensor, KV head by KV head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from engine.types.errors import UnsupportedModelError


def in_order(
    weights: Iterable[tuple[str, torch.Tensor]], part: str, queries: int, head_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors; in those of `part` first all queries' rows, then all keys', then all values', as `QKVLinear` reads
    one tensor. In the checkpoint each KV head has its queries' rows, its key's and its value's. A copy of each is made.

    Args:
        part: what the layer's name ends with, e.g. ".attention.query_key_value".
        queries: query heads of each KV head.

    Raises UnsupportedModelError where the layer is stored in a quantised form, whose rows cannot be put into order.
    """
    for name, tensor in weights:
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(part):
            yield name, tensor
            continue
        if kind not in ("weight", "bias"):
            raise UnsupportedModelError(
                f"load {name}",
                "its rows belong into another order, and the checkpoint stores several of them as one",
                "use a checkpoint that stores this layer plain",
            )
        if tensor.ndim and not tensor.shape[0] % ((queries + 2) * head_size):  # else the loader says what is wrong
            rows = tensor.unflatten(0, (-1, queries + 2, head_size))
            tensor = torch.cat((rows[:, :queries].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)))
        yield name, tensor
