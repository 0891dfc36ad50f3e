"""What every piece of a model is: a plain Python object that knows its weights and its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.interfaces.quantization import PLAIN_DTYPES


@dataclass(frozen=True, eq=False)
class Param:
    """One of the checkpoint's tensors.

    Args:
        name: the tensor's name in the checkpoint.
        shape: that it must have there.
        owner: the module that takes it.
        key: the module's own note of which of its weights this is, and where in it.
        pieces: what this rank keeps of it, each a slice for each of the first dimensions: several follow one another in
            their order, along the first dimension in which they differ. () keeps all.
        dtypes: one of which it must have there.
    """

    name: str
    shape: tuple[int, ...]
    owner: Module
    key: Any = None
    pieces: tuple[tuple[slice, ...], ...] = ()
    dtypes: frozenset[str] = PLAIN_DTYPES

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part on this rank."""
        if not self.pieces:
            return self.shape
        sizes = [[len(range(*s.indices(n))) for s, n in zip(p, self.shape, strict=False)] for p in self.pieces]
        first = sizes[0]
        if len(sizes) > 1:
            first[self._along] = sum(size[self._along] for size in sizes)
        return (*first, *self.shape[len(first) :])

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the checkpoint's tensor; a view of it where it is one piece."""
        kept = [tensor[piece] for piece in self.pieces] or [tensor]
        return kept[0] if len(kept) == 1 else torch.cat(kept, dim=self._along)

    @property
    def _along(self) -> int:
        first, second, *_ = self.pieces
        return next(d for d, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)


class Module:
    """A piece of a model. Not torch's: there are no gradients, hooks or buffers, only weights to load.

    Parts are found among the attributes (modules, and lists or tuples of modules).
    """

    def parts(self) -> Iterator[Module]:
        """This module and all that are in it, each once, in the order of the attributes."""
        return self._walk(set())

    def _walk(self, seen: set[int]) -> Iterator[Module]:
        if id(self) in seen:
            return
        seen.add(id(self))
        yield self
        for value in vars(self).values():
            for child in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(child, Module):
                    yield from child._walk(seen)

    def params(self) -> list[Param]:
        """This module's own weights, those of its parts not included."""
        return []

    def tolerated(self) -> frozenset[str]:
        """Names of tensors that a checkpoint may hold for this module although it does not use them."""
        return frozenset()

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Take this rank's part of a weight, already of the param's `local_shape`, and cast it. Once for each param."""
        raise NotImplementedError(f"{type(self).__name__} has a param {param.name!r} but no load()")

    def num_elements(self) -> int:
        """Of this module's own weights on this rank."""
        return sum(math.prod(param.local_shape) for param in self.params())

    def own_bytes(self, itemsize: int) -> int:
        """Memory of this module's own weights on this rank, with elements of so many bytes as they were loaded."""
        return self.num_elements() * itemsize

    def finish(self) -> None:
        """All weights of this module are loaded (for a module without params: of the whole model). Pack them."""
