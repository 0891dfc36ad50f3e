"""The loader: a stream of named tensors into a model's slots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from engine.modeling.memory import out_of_memory
from engine.modeling.module import Module, Slot
from engine.types.errors import CheckpointError, DeviceMemoryError

HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Endings of tensors that old checkpoints hold and that are computed anew."""

_SHOWN = 6


def load_weights(model: Module, weights: Iterable[tuple[str, torch.Tensor]], asked: str = "load the weights") -> None:
    """Give every tensor to the module whose slot has its name, cast to the model's dtype.

    Over several ranks each keeps its part of a tensor, cut while it streams by: of a mapped file, only what is kept is
    read. A module is packed as soon as its last tensor has come; modules without slots (a tied head) at the end. The
    stream is read once, in its own order, and no tensor is kept.

    Args:
        model: its parts' `slots` say what is expected.
        weights: (name, tensor) as a checkpoint streams them.
        asked: begins the error's message.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, there twice, of the wrong shape or not of a
            floating-point dtype; nothing may be computed with the model then.
        DeviceMemoryError: the device's memory ended: at which tensor, and how much is missing.
    """
    parts = list(model.parts())
    waiting: dict[str, Slot] = {}
    for part in parts:
        for slot in part.slots():
            assert slot.name not in waiting, f"two slots have the name {slot.name!r}"
            waiting[slot.name] = slot
    pending = Counter(id(slot.owner) for slot in waiting.values())
    modules = {id(part): part for part in parts}
    tolerated = frozenset[str]().union(*(part.tolerated() for part in parts))
    taken: set[str] = set()
    unexpected: list[str] = []
    twice: list[str] = []
    misshapen: list[str] = []
    for name, tensor in _streamed(weights, asked, waiting):
        found = waiting.pop(name, None)
        if found is None:
            if name in taken:
                twice.append(name)
            elif name not in tolerated and not name.endswith(HARMLESS):
                unexpected.append(name)
            continue
        taken.add(name)
        if tuple(tensor.shape) != found.shape:
            misshapen.append(f"{name} {list(tensor.shape)} for {list(found.shape)}")
        elif not tensor.dtype.is_floating_point:
            misshapen.append(f"{name} of dtype {str(tensor.dtype).removeprefix('torch.')}")
        else:
            try:
                found.owner.place(found, tensor[found.part] if found.part else tensor)
                pending[id(found.owner)] -= 1
                if not pending[id(found.owner)]:
                    modules[id(found.owner)].finish()
            except torch.OutOfMemoryError as error:
                raise _no_memory(asked, found, tensor.dtype, waiting.values(), error) from error
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (
            ("missing", sorted(waiting)),
            ("unexpected", unexpected),
            ("there twice", twice),
            ("of the wrong form", misshapen),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            asked,
            "of its tensors " + "; ".join(problems),
            "config.json and the weights do not belong together, or the architecture is another one",
        )
    for part in parts:
        if not part.slots():
            part.finish()


def _streamed(
    weights: Iterable[tuple[str, torch.Tensor]], asked: str, waiting: Mapping[str, Slot]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Them. A checkpoint that makes its tensors on the device may find no memory itself, on the way to the next one."""
    stream, dtype = iter(weights), torch.bfloat16
    while True:
        try:
            named = next(stream, None)
        except torch.OutOfMemoryError as error:
            following, *rest = waiting.values()
            raise _no_memory(asked, following, dtype, rest, error) from error
        if named is None:
            return
        dtype = named[1].dtype
        yield named


def _no_memory(
    asked: str, slot: Slot, dtype: torch.dtype, waiting: Iterable[Slot], error: torch.OutOfMemoryError
) -> DeviceMemoryError:
    """waiting: the slots behind this one. They are counted in the checkpoint's dtype, whatever becomes of them."""
    this, rest = (sum(math.prod(s.local_shape) for s in slots) * dtype.itemsize for slots in ([slot], waiting))
    return out_of_memory(
        asked,
        error,
        "quantise the weights (--quantization), divide them over more devices (--tensor-parallel-size), choose a "
        "smaller --dtype or model, or free the device's memory",
        f"the device's memory ends at {slot.name} {list(slot.local_shape)}, {this:,} bytes, and {rest:,} bytes of "
        "weights come after it",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
