"""The suite of point `ops`."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest

from engine.interfaces.ops import OPERATIONS, OpsCard, OpsNeed
from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
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
from engine_sdk.conformance.ops.subject import DTYPES
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
