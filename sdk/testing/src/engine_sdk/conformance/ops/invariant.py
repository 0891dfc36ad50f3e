"""What `batch_invariant` on a card promises: a row's bits do not depend on the rows beside it, nor on threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.interfaces.ops import SamplingRows
from engine_sdk.conformance.ops.subject import DTYPES, OpsSubject

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
ROWS = 97
COUNTS = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, ROWS)


class InvariantOperations(OpsSubject):
    """Operations over rows, bit by bit: all of them, the first few, and each alone. Skipped where the card does not say
    `batch_invariant`."""

    @each_dtype
    @pytest.mark.parametrize("bias", [False, True])
    def test_invariant_linear(self, dtype: str, bias: bool) -> None:
        """Of wide and narrow matrices."""
        for outputs, inputs in ((64, 48), (130, 1000), (33, 4096)):
            weight = self.tensor(outputs, inputs, dtype=dtype)
            added = self.tensor(outputs, dtype=dtype) if bias else None
            one, several = (self._product(dtype, threads, weight, added) for threads in (1, 3))
            self._same(one, several, self.tensor(ROWS, inputs, dtype=dtype, seed=1))

    @classmethod
    def _product(cls, dtype: str, threads: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., Any]:
        packed = cls.invariant("pack_linear", dtype, threads)(weight, bias)
        linear = cls.invariant("linear", dtype, threads)
        return lambda x: linear(x, packed)

    @each_dtype
    @pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
    def test_invariant_norms(self, dtype: str, name: str) -> None:
        """Of rows of any length."""
        for size in (64, 1000, 5120):
            weight, bias = self.tensor(size, dtype=dtype), self.tensor(size, dtype=dtype, seed=2)
            more = (weight, 1e-5) if name == "rms_norm" else (weight, bias, 1e-5)
            one, several = self.invariant(name, dtype, 1), self.invariant(name, dtype, 3)
            self._same(one, several, self.tensor(ROWS, size, dtype=dtype, seed=1), *more)

    @each_dtype
    @pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "gelu", "relu", "soft_cap", "scale"])
    def test_invariant_elements(self, dtype: str, name: str) -> None:
        """Whatever vectors they are computed in."""
        more: tuple[Any, ...] = {
            "silu_mul": (),
            "gelu_mul": (True,),
            "gelu": (True,),
            "relu": (True,),
            "soft_cap": (3.0,),
            "scale": (0.3,),
        }[name]
        one, several = self.invariant(name, dtype, 1), self.invariant(name, dtype, 3)
        for size in (66, 1000):
            self._same(one, several, self.tensor(ROWS, size, dtype=dtype), *more)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_invariant_draws(self, dtype: str) -> None:
        """The tokens drawn, and their log probabilities, of a vocabulary that is no round number."""
        logits = self.tensor(ROWS, 5003, dtype=dtype, scale=3)
        chosen = logits.argmax(dim=1).int()
        full = torch.full((ROWS,), 1.0, device=self.device)
        numbers = torch.arange(ROWS, device=self.device)

        def drawn(sample: Callable[..., Any], logprobs: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
            def compute(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                n, first = len(x), int((logits == x[0]).all(dim=1).nonzero()[0])
                here = slice(first, first + n)
                rows = SamplingRows(
                    temperature=full[here] * 0.8,
                    top_k=numbers[here].int() % 50 + 1,
                    top_p=full[here] * 0.9,
                    min_p=full[here] * 0.01,
                    seed=numbers[here],
                    position=numbers[here],
                )
                return (sample(x.clone(), rows), *logprobs(x.clone(), chosen[here], 3))

            return compute

        one = drawn(self.invariant("sample", dtype, 1), self.invariant("logprobs", dtype, 1))
        several = drawn(self.invariant("sample", dtype, 3), self.invariant("logprobs", dtype, 3))
        self._same(one, several, logits)

    @staticmethod
    def _same(one: Callable[..., Any], several: Callable[..., Any], x: torch.Tensor, *more: Any) -> None:
        def parts(found: Any) -> tuple[torch.Tensor, ...]:
            return found if isinstance(found, tuple) else (found,)

        whole = parts(several(x.clone(), *more))
        for count in COUNTS:
            for compute in (one, several):
                for first in (0, ROWS - count):
                    found = parts(compute(x[first : first + count].clone(), *more))
                    for got, all_rows in zip(found, whole, strict=True):
                        same = torch.equal(got, all_rows[first : first + count])
                        assert same, f"{count} of {ROWS} rows, from {first} on, have other bits than among all"
