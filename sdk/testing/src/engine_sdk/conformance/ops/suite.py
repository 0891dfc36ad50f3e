"""The suite of point `ops`."""

from __future__ import annotations

import functools
import itertools
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed
from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
from engine_kit.few_rows import AroundMatrix
from engine_sdk.conformance.base import check_methods
from engine_sdk.conformance.ops.adapters import AdapterOperations
from engine_sdk.conformance.ops.captured import CapturedOperations
from engine_sdk.conformance.ops.drafts import DraftOperations
from engine_sdk.conformance.ops.experts import ExpertOperations
from engine_sdk.conformance.ops.inputs import InputOperations
from engine_sdk.conformance.ops.invariant import InvariantOperations
from engine_sdk.conformance.ops.layers import LayerOperations
from engine_sdk.conformance.ops.sampling import SamplingOperations
from engine_sdk.conformance.ops.states import StateOperations
from engine_sdk.conformance.ops.subject import DTYPES, plain
from engine_sdk.conformance.timing import median_seconds


class OpsConformance(
    LayerOperations,
    InputOperations,
    SamplingOperations,
    DraftOperations,
    StateOperations,
    ExpertOperations,
    AdapterOperations,
    CapturedOperations,
    InvariantOperations,
):
    """Every operation that a driver's card names, against a float64 formula or the definition in numpy."""

    def test_operations_are_known(self) -> None:
        """The card names operations that there are, of which installed drivers define some, or defines them, with a
        docstring that says what they compute; packing and multiplying go together."""
        card, body = cast("type[OpsCard]", self.subject().card), self.body()
        known = set(OPERATIONS) | self.defined() - card.defines
        for other in (cast("type[OpsCard]", other) for _, other in ranked(Registry.discover(), "ops")[0]):
            if other != card and (theirs := sorted(card.operations & other.defines)):
                check_methods(body, load_body(other), theirs)
        assert card.operations and card.operations <= known | card.defines, card.operations - known - card.defines
        assert card.defines <= card.operations and not card.defines & known, card.defines
        assert all(getattr(body, name).__doc__ for name in card.defines), "an operation that it defines says not what"
        for pack, multiply in (("pack_linear", "linear"), ("pack_experts", "experts"), ("lora_pack", "lora_add")):
            assert (multiply in card.operations) == (pack in card.operations)

    @classmethod
    def figure(cls) -> str | None:
        """One row times a large matrix: what of the memory's bandwidth is reached. Else a norm of many rows."""
        for dtype in ("bfloat16", "float32"):
            if cls.serves("linear", dtype):
                weight, x = cls.tensor(2048, 2048, dtype=dtype), cls.tensor(1, 2048, dtype=dtype)
                linear, packed = cls.operation("linear", dtype), cls.operation("pack_linear", dtype)(weight, None)
                seconds = median_seconds(functools.partial(linear, x, packed), cls.device)
                speed = weight.nbytes / seconds / 1e9
                return f"1 row by 2,048 x 2,048, {dtype}: {seconds * 1e6:,.0f} us, {speed:.1f} GB/s"
        for dtype in ("bfloat16", "float32"):
            if cls.serves("rms_norm", dtype):
                x, ones = cls.tensor(64, 2048, dtype=dtype), cls.tensor(2048, dtype=dtype)
                norm = functools.partial(cls.operation("rms_norm", dtype), x, ones, 1e-5)
                return f"norm of 64 rows of 2,048, {dtype}: {median_seconds(norm, cls.device) * 1e6:,.0f} us"
        return None

    @classmethod
    def serves(cls, operation: str, dtype: str) -> bool:
        """Whether the card takes this operation."""
        return not cls.subject().reasons(OpsNeed(operation=operation, dtype=dtype, device=cls.device))


class OpsAround:
    """Mixed in before the suite: of a driver whose matrices are an `engine_kit.few_rows.AroundMatrix`."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [False, True])
    def test_around_a_matrix(self: Any, dtype: str, bias: bool) -> None:
        """The norm before, the activation or the sum behind, of all numbers of rows that fit, some by at least one
        matrix; what is given stays as it is, and may be a view."""
        pack, eps, fitting = self.operation("pack_linear", dtype), 0.3, set()
        for outputs, inputs in [(6, 31), (38, 96)]:
            weight, norm = self.tensor(outputs, inputs, dtype=dtype, seed=1), self.tensor(inputs, dtype=dtype, seed=2)
            added = self.tensor(outputs, dtype=dtype, seed=3) if bias else None
            packed = pack(weight.clone(), None if added is None else added.clone())
            assert isinstance(packed, AroundMatrix), f"{type(packed).__name__} is none"
            for rows, normed in itertools.product(range(1, 10), (True, False)):
                if not packed.fits(rows, normed):
                    continue
                fitting.add(normed)
                x = self.tensor(rows, inputs + 8, dtype=dtype, seed=4)[:, 8:]
                residual = self.tensor(rows, outputs + 2, dtype=dtype, seed=5)[:, 2:]
                before = x.clone(), residual.clone()
                wide = plain(x)
                if normed:
                    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * plain(norm)
                y = wide @ plain(weight).T + (0 if added is None else plain(added))
                terms = 1 + np.abs(wide) @ np.abs(plain(weight)).T * (1 if dtype in ("float64", "float32") else 0.5)
                if normed:
                    self.check(packed.normed(x, norm, eps, False), y, dtype, terms)
                    (gate, up), (gates, ups) = np.split(y, 2, axis=1), np.split(terms, 2, axis=1)
                    self.check(packed.normed(x, norm, eps, True), gate / (1 + np.exp(-gate)) * up, dtype, gates * ups)
                else:
                    found = packed.added(x, residual)
                    self.check(found, y + plain(residual), dtype, terms)
                    assert found.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
                assert torch.equal(x, before[0]) and torch.equal(residual, before[1]), "what was given has changed"
        assert fitting == {True, False}, "no number of rows fits"


class OpsThorough:
    """Mixed in before the suite: more shapes of the linear layer. Takes minutes."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("bias", [False, True])
    def test_thorough_linear(self: Any, dtype: str, bias: bool) -> None:
        """Every number of rows up to 20 and beyond, by widths around the sizes of registers and tiles."""
        widths = [1, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1000]
        self._linear(
            dtype, [(o, i) for o in (1, 15, 16, 33, 130) for i in widths], [*range(1, 21), 33, 64, 65, 300], bias
        )
