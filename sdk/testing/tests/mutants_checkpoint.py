"""Checkpoints with one planted fault each: readers of the bundled model, and cards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from broken_checkpoint_cards import CARDS, Sound
from mutant_suites import suites_of

from engine.types.errors import CheckpointError
from engine_sdk.conformance import CheckpointConformance
from engine_tiny.reader import TinyReader

Tensors = Iterator[tuple[str, torch.Tensor]]


class LeavesOneOut(TinyReader):
    """the last tensor is left out"""

    def weights(self) -> Tensors:
        found = list(super().weights())
        yield from found[:-1]


class Twice(TinyReader):
    """a tensor comes twice"""

    def weights(self) -> Tensors:
        found = list(super().weights())
        yield from [*found, found[0]]


class WrongDtype(TinyReader):
    """tensors are widened to float64"""

    def weights(self) -> Tensors:
        for name, tensor in super().weights():
            yield name, tensor.double()


class Transposed(TinyReader):
    """matrices come transposed"""

    def weights(self) -> Tensors:
        for name, tensor in super().weights():
            yield name, tensor.T if tensor.dim() == 2 else tensor


class SwapsNames(TinyReader):
    """names and tensors are off by one"""

    def weights(self) -> Tensors:
        found = list(super().weights())
        yield from ((name, tensor) for (name, _), (_, tensor) in zip(found, found[1:] + found[:1], strict=True))


class OneBuffer(TinyReader):
    """tensors change from reading to reading"""

    def weights(self) -> Tensors:
        self.turn = getattr(self, "turn", -1) + 1
        for name, tensor in super().weights():
            yield name, tensor + self.turn


class OnlyOnce(TinyReader):
    """the second reading gives nothing"""

    def weights(self) -> Tensors:
        if not hasattr(self, "read"):
            self.read = True
            yield from super().weights()


class OtherDevice(TinyReader):
    """tensors are not on the host"""

    def weights(self) -> Tensors:
        for name, tensor in super().weights():
            yield name, tensor.to("meta")


class HalfAModel(TinyReader):
    """a broken file ends the reading without a word"""

    def weights(self) -> Tensors:
        try:
            yield from super().weights()
        except CheckpointError:
            return


class Untyped(TinyReader):
    """a broken file is an error of the library beneath"""

    def weights(self) -> Tensors:
        try:
            yield from super().weights()
        except CheckpointError as error:
            raise OSError(str(error)) from None


class NoFileName(TinyReader):
    """the error does not say which file is broken"""

    def weights(self) -> Tensors:
        try:
            yield from super().weights()
        except CheckpointError:
            raise CheckpointError("read the weights", "a file is broken") from None


READERS = [
    LeavesOneOut, Twice, WrongDtype, Transposed, SwapsNames, OneBuffer, OnlyOnce, OtherDevice, HalfAModel, Untyped,
    NoFileName,
]  # fmt: skip
MUTANTS = [*READERS, *CARDS]

globals().update(suites_of(CheckpointConformance, Sound, MUTANTS))
