"""Loading weights: named tensors to a model's parameters, and the memory between them."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from engine.modeling.module import Module, Param
from engine.types.errors import CheckpointError, DeviceMemoryError

HARMLESS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
"""Endings of tensors that old checkpoints hold and that are computed anew."""
_SHOWN = 6
LARGE_BYTES = 256 << 10
"""Less than that is the heap's affair."""
_SENTENCES = 3
"""Of torch's message that say how much was asked for and how much is there; advice about its settings follows."""


def load_weights(model: Module, weights: Iterable[tuple[str, torch.Tensor]], asked: str = "load the weights") -> None:
    """Give every tensor to the module whose param has its name.

    Over several ranks each keeps its part of a tensor, cut while it streams by: of a mapped file, only what is kept is
    read. A module is packed as soon as its last tensor has come; modules without params (a tied head) at the end. The
    stream is read once, in its own order, and no tensor is kept.

    Args:
        model: its parts' `params` say what is expected.
        weights: (name, tensor) as a checkpoint streams them.
        asked: begins the error's message.

    Raises:
        CheckpointError: names every tensor that is missing, unexpected, there twice, of the wrong shape or of
            another dtype than it may have; nothing may be computed with the model then.
        DeviceMemoryError: the device's memory ended: at which tensor, and how much is missing.
    """
    parts = list(model.parts())
    waiting: dict[str, Param] = {}
    for part in parts:
        for param in part.params():
            assert param.name not in waiting, f"two params have the name {param.name!r}"
            waiting[param.name] = param
    pending = Counter(id(param.owner) for param in waiting.values())
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
        shape = tuple(tensor.shape)
        if shape != found.shape and (found.shape, shape) != ((1,), ()) and (found.shape != (-1,) or tensor.ndim != 1):
            misshapen.append(f"{name} {list(tensor.shape)} for {list(found.shape)}")
        elif (dtype := str(tensor.dtype).removeprefix("torch.")) not in found.dtypes:
            misshapen.append(f"{name} of dtype {dtype}")
        else:
            try:
                found.owner.load(found, found.cut(tensor))
                pending[id(found.owner)] -= 1
                if not pending[id(found.owner)]:
                    found.owner.finish()
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
        if not part.params():
            part.finish()


def _streamed(
    weights: Iterable[tuple[str, torch.Tensor]], asked: str, waiting: Mapping[str, Param]
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
    asked: str, param: Param, dtype: torch.dtype, waiting: Iterable[Param], error: torch.OutOfMemoryError
) -> DeviceMemoryError:
    """waiting: the params behind this one. They are counted in the checkpoint's dtype, whatever becomes of them."""
    this, rest = (sum(math.prod(s.local_shape) for s in params) * dtype.itemsize for params in ([param], waiting))
    return out_of_memory(
        asked,
        error,
        "quantise the weights (--quantization), divide them over more devices (--tensor-parallel-size), choose a "
        "smaller --dtype or model, or free the device's memory",
        f"the device's memory ends at {param.name} {list(param.local_shape)}, {this:,} bytes, and {rest:,} bytes of "
        "weights come after it",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def staging(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor whose memory goes back to the system as soon as nobody has the tensor any more.

    On a CPU a large one gets a mapping of its own. In the heap, what comes and goes while a model is loaded would lie
    between what stays: a process would keep the memory of its plain weights although it holds packed ones alone.
    """
    size = math.prod(shape) * dtype.itemsize
    on_host = torch.empty(0, device=device).is_cpu
    if not on_host or size < LARGE_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # lives as long as the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def out_of_memory(asked: str, error: torch.OutOfMemoryError, remedy: str, where: str = "") -> DeviceMemoryError:
    """The error to raise where torch found no memory.

    Args:
        asked: what was to be done.
        error: torch's.
        remedy: what helps.
        where: how far it came; it goes before torch's own words.
    """
    said = ". ".join(str(error).strip().split("\n", 1)[0].split(". ")[:_SENTENCES]).rstrip(".")
    return DeviceMemoryError(asked, ": ".join(part for part in (where, said) if part), remedy)
