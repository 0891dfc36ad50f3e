"""What all families of operations share: the driver's methods, tensors to call them with, and how results are held
against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed
from engine.plugin import Registry
from engine.plugin.choosing import ranked
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.contexts import worker_context

DTYPES = ("float64", "float32", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-11, "float32": 8e-6, "bfloat16": 2e-2, "float16": 3e-3}
"""Relative to the size of the terms."""


class OpsSubject(Conformance):
    """The base of the families: each operation is taken where the card serves it, else the test is skipped.

    Attributes:
        draws: rows of the tests of distributions: fewer, where a driver that is interpreted would take hours.
    """

    point = "ops"
    protocol = "Ops"
    draws: ClassVar[int] = 20_000

    @classmethod
    def needs(cls) -> Sequence[OpsNeed]:
        return [
            OpsNeed(operation=name, dtype=dtype, device=cls.device)
            for name, dtype in (("linear", "bfloat16"), ("rms_norm", "float32"), ("sample", "float64"))
        ]

    @classmethod
    def impossible(cls) -> Sequence[OpsNeed]:
        return [
            OpsNeed(operation="fly", dtype="float32", device=cls.device),
            OpsNeed(operation="linear", dtype="float3", device=cls.device),
            OpsNeed(operation="linear", dtype="float32", device=cls.device, framework="abacus"),
        ]

    @classmethod
    def methods(cls) -> Sequence[str]:
        """Those that the card names of the interface's."""
        return sorted(cast("type[OpsCard]", cls.subject().card).operations.intersection(OPERATIONS))

    @classmethod
    def defined(cls) -> frozenset[str]:
        """What the installed drivers define beside `OPERATIONS`."""
        cards = [cast("type[OpsCard]", card) for _, card in ranked(Registry.discover(), "ops")[0]]
        return frozenset[str]().union(*(card.defines for card in cards))

    @classmethod
    def operations(cls, dtype: str) -> Any:
        """The body; made once for each dtype."""
        return cls.built(lambda: worker_context(cls.subject(), cls.device, dtype), dtype)

    @classmethod
    def operation(cls, name: str, dtype: str) -> Callable[..., Any]:
        """One operation of the driver; skips the test, with the card's reasons, where it does not serve it."""
        cls.require(OpsNeed(operation=name, dtype=dtype, device=cls.device))
        method: Callable[..., Any] = getattr(cls.operations(dtype), name)
        return method

    @classmethod
    def invariant(cls, name: str, dtype: str, threads: int) -> Callable[..., Any]:
        """As `operation`, of a body that is built where so many threads may compute; skips the test where the card does
        not say that the operation is batch invariant."""
        cls.require(OpsNeed(operation=name, dtype=dtype, device=cls.device, batch_invariant=True))
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            context = worker_context(cls.subject(), cls.device, dtype)
            method: Callable[..., Any] = getattr(cls.built(lambda: context, f"{dtype} {threads}"), name)
        finally:
            torch.set_num_threads(before)
        return method

    @classmethod
    def tensor(cls, *shape: int, dtype: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, the same each time."""
        drawn = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
        return torch.from_numpy(drawn).to(getattr(torch, dtype)).to(cls.device)

    @classmethod
    def ints(cls, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Whole numbers on the device."""
        return torch.tensor(values, dtype=dtype, device=cls.device)

    @staticmethod
    def check(found: torch.Tensor, expected: np.ndarray, dtype: str, scale: Any = 1.0, factor: float = 1.0) -> None:
        """Of this dtype and shape, and near: relative to the expected value and to `scale`, the terms' size."""
        assert found.dtype == getattr(torch, dtype), f"the result is of {found.dtype}"
        assert tuple(found.shape) == expected.shape, f"the result has shape {tuple(found.shape)}, not {expected.shape}"
        got, bound = plain(found), factor * TOLERANCE[dtype] * (np.abs(expected) + scale)
        wrong = ~(np.abs(got - expected) <= bound)
        assert not wrong.any(), (
            f"{int(wrong.sum())} of {wrong.size} elements are wrong; the first at {np.argwhere(wrong)[0].tolist()}: "
            f"{got[wrong][0]!r}, not {expected[wrong][0]!r}"
        )


def plain(x: torch.Tensor) -> np.ndarray:
    """A tensor's numbers in float64."""
    found: np.ndarray = x.detach().double().cpu().numpy()
    return found
