"""What every piece of a model is: a plain Python object that knows its weights and its parts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Owner(Protocol):
    """What a parameter belongs to."""

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Take this rank's part of one checkpoint tensor, already of the param's `local_shape`, and cast it."""
        ...


@dataclass(frozen=True, eq=False)
class Param:
    """One of the checkpoint's tensors.

    Args:
        name: the tensor's name in the checkpoint.
        shape: that it must have there.
        owner: the module that takes it.
        key: the module's own note of which of its weights this is, and where in it.
        part: what this rank keeps of it: one slice for each of the first dimensions; empty keeps all.
    """

    name: str
    shape: tuple[int, ...]
    owner: Owner
    key: Any = None
    part: tuple[slice, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part on this rank."""
        cut = tuple(len(range(*part.indices(n))) for part, n in zip(self.part, self.shape, strict=False))
        return cut + self.shape[len(cut) :]


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
        """Take a weight. Called once for each param."""
        raise NotImplementedError(f"{type(self).__name__} has a param {param.name!r} but no load()")

    def own_bytes(self, itemsize: int) -> int:
        """Memory of this module's own weights on this rank, with elements of so many bytes as they were loaded."""
        return sum(math.prod(param.local_shape) for param in self.params()) * itemsize

    def finish(self) -> None:
        """All weights of this module are loaded (for a module without params: of the whole model). Pack them."""
