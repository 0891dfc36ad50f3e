"""The suite of point `quantization`: layers against the float64 product of rows and the weights that they stand for.

How a driver packs its weights is its own affair, so the suite reads them through `linear` itself: unit rows give the
weights back, one input after another. These have to be as near to the layer's weights as the card's `rounding` says,
and every other row has to give their product in float64, as near as `rounding` lets rows be. Weights that a checkpoint
stores in a form of its own are written by the test (`write`), and have to be read back as they were meant.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import numpy as np
import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.model import ModelContext
from engine.interfaces.ops import Ops
from engine.interfaces.platform import CaptureKey
from engine.interfaces.quantization import (
    EMBEDDING,
    KINDS,
    LayerShape,
    Quantization,
    QuantizationCard,
    QuantizationNeed,
    Rounding,
)
from engine.modeling import Embedding, Linear, LMHead, load_weights
from engine.types.errors import CheckpointError, ConfigError
from engine.types.parallel import Shard
from engine_kit.rounded_rows import RoundsRows
from engine_sdk.conformance.base import Conformance, not_served
from engine_sdk.conformance.contexts import require_capture, worker_context
from engine_sdk.conformance.subject import Subject
from engine_sdk.conformance.timing import median_seconds

DTYPES = ("float64", "float32", "bfloat16", "float16")
SUMS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-9}
"""What the dtype of activations rounds: of a sum, as a share of the sum of its terms' magnitudes."""
SHAPES = ((1, 1), (3, 31), (37, 96), (64, 257), (130, 128))
"""[O, I]: outputs that fill no tile of a kernel, inputs that fill no group."""
ROWS = (0, 1, 2, 3, 5, 8, 13, 16, 17, 33, 70)
TINY = 1e-30

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


class Layer(NamedTuple):
    """A packed layer with what it was made of.

    Attributes:
        body, packed: the driver's.
        weight: [O, I] as it was given, float64.
        held: [O, I] as unit rows give it back, float64.
        bias: [O], float64; zeros where there is none.
        rounding: what the card promises.
        sums: what the dtype rounds.
    """

    body: Quantization
    packed: Any
    weight: torch.Tensor
    held: torch.Tensor
    bias: torch.Tensor
    rounding: Rounding
    sums: float


def whole_layer(
    kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[LayerShape, dict[str, torch.Tensor]]:
    """What `pack` is called with for a plain layer of one rank."""
    outputs, inputs = Shard.of(weight.shape[0]), Shard.of(weight.shape[-1])
    shape = LayerShape(("layer",), kind, inputs, (outputs,), bias is not None)
    return shape, {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


class QuantizationConformance(Conformance):
    """Weights of fewer bits stay as near as the card says, and rows meet them as they are.

    Attributes:
        stored: a `quantization_config` that the card claims, for a driver that reads what is stored so; with it goes
            `write`. Without it, only the rounding of plain weights is tested.
        uncovered: names of layers that this one leaves plain.
        inputs, outputs: of the layers that are written; each of two ranks has half of them.
        operations: the driver of `ops` whose norms and activations its layers round as they are made, where they do
            (`engine_kit.rounded_rows.RoundsRows`).
    """

    point = "quantization"
    protocol = "Quantization"
    stored: ClassVar[Mapping[str, Any] | None] = None
    uncovered: ClassVar[Sequence[str]] = ()
    inputs: ClassVar[int] = 256
    outputs: ClassVar[Sequence[int]] = (512, 256, 256)
    operations: ClassVar[str] = "torch"

    @classmethod
    def need(cls, kind: str = "linear", dtype: str = "float32", stored: str = "bfloat16") -> QuantizationNeed:
        """What is asked for."""
        return QuantizationNeed(kind=kind, dtype=dtype, stored_dtype=stored, device=cls.device)

    @classmethod
    def needs(cls) -> Sequence[QuantizationNeed]:
        return [
            cls.need(kind, dtype, stored) for kind in KINDS for dtype, stored in zip(DTYPES, DTYPES[::-1], strict=True)
        ]

    @classmethod
    def impossible(cls) -> Sequence[QuantizationNeed]:
        return [
            cls.need(stored="float3"),
            QuantizationNeed(
                kind="linear", dtype="float32", stored_dtype="float32", device=cls.device, framework="abacus"
            ),
        ]

    # -- the driver --------------------------------------------------------------------------------------------------
    @classmethod
    def described(cls) -> type[QuantizationCard]:
        """The card, as what it is."""
        return cast("type[QuantizationCard]", cls.subject().card)

    @classmethod
    def make(cls, kind: str, dtype: str, stored: str = "float32") -> Quantization:
        """A body; skipped where the card serves no such layer."""
        if kind not in cls.described().kinds:
            not_served(f"layers of kind {kind} are not among the card's kinds")
        cls.require(cls.need(kind, dtype, stored))
        return cls.built(lambda: worker_context(cls.subject(), cls.device, dtype), dtype)  # type: ignore[no-any-return]

    @classmethod
    def any_dtype(cls, kind: str = "linear") -> str:
        """The widest dtype that is served, for what does not turn on it."""
        served = [dtype for dtype in DTYPES if not cls.subject().reasons(cls.need(kind, dtype))]
        return "float32" if "float32" in served or not served else served[0]

    @classmethod
    def any_kind(cls) -> str:
        """A kind that is served."""
        return next((kind for kind in KINDS if kind in cls.described().kinds), KINDS[0])

    @classmethod
    def rounding(cls, kind: str) -> Rounding:
        """What the card promises."""
        found = cls.described().rounding(kind, cls.subject().options)
        assert found is not None, "the card states no bound: override rounding(kind, options)"
        return found

    @classmethod
    def numbers(cls, *shape: int, dtype: str, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, the same each time."""
        drawn = np.random.default_rng([seed, *shape]).normal(size=shape) * scale
        return torch.from_numpy(drawn).to(getattr(torch, dtype)).to(cls.device)

    @classmethod
    def layer(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, kind: str = "linear", dtype: str = "float32"
    ) -> Layer:
        """Pack a weight, and read it back by unit rows, from a second layer that has no bias."""
        body = cls.make(kind, dtype, str(weight.dtype).removeprefix("torch."))
        packed = body.pack(*whole_layer(kind, weight, bias))
        eye = torch.eye(weight.shape[1], dtype=getattr(torch, dtype), device=cls.device)
        held = body.linear(eye, packed if bias is None else body.pack(*whole_layer(kind, weight))).double().T
        wide = weight.double()
        added = torch.zeros(weight.shape[0], dtype=torch.float64, device=cls.device) if bias is None else bias.double()
        return Layer(body, packed, wide, held, added, cls.rounding(kind), SUMS[dtype])

    # -- what is right -----------------------------------------------------------------------------------------------
    @staticmethod
    def check_weights(layer: Layer) -> None:
        """As near as the card says."""
        given, rounding = layer.weight, layer.rounding
        bound = rounding.weight * _largest(given, rounding.weight_group) + rounding.row * layer.held.abs()
        off = (layer.held - given).abs() - bound - layer.sums * given.abs()
        _nothing_above_zero(off, "weights are farther off than the card's rounding says")

    @staticmethod
    def check_rows(layer: Layer, x: torch.Tensor, found: torch.Tensor) -> None:
        """x [T, I] by the weights that are held, in float64."""
        rounding, wide, held = layer.rounding, x.double(), layer.held.abs()
        assert found.dtype == x.dtype, f"the result is {found.dtype}, of rows of {x.dtype}"
        shape = (x.shape[0], held.shape[0])
        assert tuple(found.shape) == shape, f"the result has shape {tuple(found.shape)}, not {shape}"
        assert found.isfinite().all(), "rows of numbers give what is none"
        expected = wide @ layer.held.T + layer.bias
        bound = rounding.row * (_largest(wide, rounding.row_group) @ held.T)
        # Each weight was itself read through a row of 1 and zeros, which may have been rounded likewise.
        bound += rounding.row * (wide.abs() @ held.T)
        bound += 2 * layer.sums * (wide.abs() @ held.T + layer.bias.abs())
        _nothing_above_zero((found.double() - expected).abs() - bound, "results are wrong")

    # -- weights -----------------------------------------------------------------------------------------------------
    @each_kind
    def test_weights(self, kind: str) -> None:
        """Of every shape, for every kind of layer."""
        for number, shape in enumerate(SHAPES):
            self.check_weights(
                self.layer(self.numbers(*shape, dtype="float32", seed=number), kind=kind, dtype=self.any_dtype(kind))
            )

    @pytest.mark.parametrize("stored", DTYPES)
    def test_stored_dtypes(self, stored: str) -> None:
        """Weights in each dtype that checkpoints have; equal numbers are packed to equal layers."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        plain = self.numbers(37, 96, dtype="bfloat16").to(torch.float16).float()
        layer = self.layer(plain.to(getattr(torch, stored)), kind=kind, dtype=dtype)
        self.check_weights(layer)
        if not self.subject().reasons(self.need(kind, dtype, "float32")) and stored != "bfloat16":
            assert torch.equal(layer.held, self.layer(plain, kind=kind, dtype=dtype).held), (
                "equal weights, packed to others"
            )

    @pytest.mark.parametrize("scale", [0.02, 1.0, 1e3])
    def test_sizes_of_weights(self, scale: float) -> None:
        """Small and large ones, in outputs of very different sizes: no output is rounded by another's weights."""
        weight = self.numbers(37, 96, dtype="float32", scale=scale)
        weight *= torch.logspace(-1, 1, 37, device=self.device).unsqueeze(1)
        kind = self.any_kind()
        self.check_weights(self.layer(weight, kind=kind, dtype=self.any_dtype(kind)))

    def test_outlying_weights(self) -> None:
        """One that is a thousand times the others costs its own group alone."""
        weight = self.numbers(16, 257, dtype="float32")
        weight[3, 5], weight[4, 256], weight[5, 100] = 1000.0, -1000.0, 500.0
        kind = self.any_kind()
        self.check_weights(self.layer(weight, kind=kind, dtype=self.any_dtype(kind)))

    def test_ends_of_the_range(self) -> None:
        """The largest weight and its negative in one group: neither wraps round."""
        weight = torch.ones(6, 64, device=self.device)
        weight[0, ::2], weight[1, 1::2], weight[2] = -1, -1, -1
        weight[3:] *= torch.tensor([3.0, -7.0, 0.1], device=self.device).unsqueeze(1)
        kind = self.any_kind()
        layer = self.layer(weight, kind=kind, dtype=self.any_dtype(kind))
        self.check_weights(layer)
        x = torch.ones(2, 64, dtype=getattr(torch, self.any_dtype(kind)), device=self.device)
        x[1] = -1
        self.check_rows(layer, x, layer.body.linear(x, layer.packed))

    def test_zeros(self) -> None:
        """Outputs without weights give their bias, rows of zeros too; inputs without weights are not read."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        weight, bias = self.numbers(37, 96, dtype="float32"), self.numbers(37, dtype=dtype, seed=1)
        weight[3:7], weight[:, 10:20], weight[30, :64] = 0, 0, 0
        layer = self.layer(weight, bias, kind, dtype)
        self.check_weights(layer)
        assert not layer.held[3:7].any() and not layer.held[:, 10:20].any(), "what was 0 is not 0 any more"
        x = self.numbers(5, 96, dtype=dtype, seed=2)
        x[2] = 0
        found = layer.body.linear(x, layer.packed)
        self.check_rows(layer, x, found)
        assert torch.equal(found[2], bias), "a row of zeros gives another thing than the bias"
        assert torch.equal(found[:, 3:7], bias[3:7].expand(5, 4)), "outputs without weights give another thing"
        nothing = self.layer(torch.zeros(5, 33, device=self.device), kind=kind, dtype=dtype)
        assert not nothing.body.linear(self.numbers(3, 33, dtype=dtype), nothing.packed).any()

    # -- rows --------------------------------------------------------------------------------------------------------
    @each_dtype
    @pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
    def test_linear(self, dtype: str, bias: bool) -> None:
        """No row, one, and many, over every shape."""
        kind = self.any_kind()
        for number, (outputs, inputs) in enumerate(SHAPES):
            weight = self.numbers(outputs, inputs, dtype="float32", seed=number)
            added = self.numbers(outputs, dtype=dtype, seed=9) if bias else None
            layer = self.layer(weight, added, kind, dtype)
            for count in ROWS:
                x = self.numbers(count, inputs, dtype=dtype, seed=3)
                self.check_rows(layer, x, layer.body.linear(x, layer.packed))

    @each_kind
    def test_kinds(self, kind: str) -> None:
        """Rows by layers of each kind."""
        dtype = self.any_dtype(kind)
        layer = self.layer(self.numbers(64, 257, dtype="bfloat16"), kind=kind, dtype=dtype)
        for count in (1, 17):
            x = self.numbers(count, 257, dtype=dtype, seed=1)
            self.check_rows(layer, x, layer.body.linear(x, layer.packed))

    def test_wide_layers(self) -> None:
        """Thousands of inputs with all weights and rows at one end: no sum overflows."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        weight = torch.full((9, 4096), -3.0, device=self.device)
        weight[4:] = 3.0
        body = self.make(kind, dtype)
        packed, x = (
            body.pack(*whole_layer(kind, weight)),
            torch.ones(3, 4096, dtype=getattr(torch, dtype), device=self.device),
        )
        x[1], x[2, ::2] = -1, -1
        found, share = body.linear(x, packed).double(), self.rounding(kind)
        expected = x.double() @ weight.double().T
        bound = 4096 * 3.0 * (share.weight + share.row + share.weight * share.row + SUMS[dtype])
        _nothing_above_zero((found - expected).abs() - bound, "results are wrong")

    @pytest.mark.parametrize("scale", [1e-20, 1e-4, 1e4, 1e20])
    def test_sizes_of_rows(self, scale: float) -> None:
        """Activations that are tiny or huge, and a row of both."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        if dtype == "float16":
            pytest.skip("float16 has no such numbers")
        layer = self.layer(self.numbers(37, 96, dtype="float32"), kind=kind, dtype=dtype)
        x = self.numbers(7, 96, dtype=dtype, seed=4) * scale
        x[3, :48] *= 1e-3
        x[4, 7] *= 1000
        self.check_rows(layer, x, layer.body.linear(x, layer.packed))

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """However large they are, and however many."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        layer = self.layer(self.numbers(37, 203, dtype="float32"), kind=kind, dtype=dtype)
        x = self.numbers(30, 203, dtype=dtype, seed=1)
        x[::2] *= 1000
        whole = layer.body.linear(x, layer.packed).double()
        slack = 2 * layer.sums * (x.double().abs() @ layer.held.abs().T)
        for part in (slice(0, 1), slice(1, 2), slice(3, 10), slice(17, 30), slice(29, 30)):
            alone = layer.body.linear(x[part].clone(), layer.packed).double()
            _nothing_above_zero((alone - whole[part]).abs() - slack[part], "alone it gives another result")

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_row_that_is_no_number(self, bad: float) -> None:
        """Spoils nobody else's."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        layer = self.layer(self.numbers(37, 96, dtype="float32"), kind=kind, dtype=dtype)
        x = self.numbers(9, 96, dtype=dtype, seed=1)
        x[6, 50] = bad
        found = layer.body.linear(x, layer.packed)
        assert not found[6].isfinite().all(), "a row that is no number gives numbers"
        others = [i for i in range(9) if i != 6]
        self.check_rows(layer, x[others], found[others])

    def test_strided_tensors(self) -> None:
        """Rows that are cut out of wider ones, weights that are views, or transposed; x is not changed."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        wide = self.numbers(60, 150, dtype="float32")
        for weight in (wide[::2, 20:116], wide[7:44, 30:126], wide.T[:37, :50]):
            layer = self.layer(weight, kind=kind, dtype=dtype)
            self.check_weights(layer)
            inputs = weight.shape[1]
            for x in (
                self.numbers(5, 200, dtype=dtype, seed=1)[:, 30 : 30 + inputs],
                self.numbers(inputs, 5, dtype=dtype, seed=2).T,
                self.numbers(10, inputs, dtype=dtype, seed=3)[::2],
            ):
                before = x.clone()
                self.check_rows(layer, x, layer.body.linear(x, layer.packed))
                assert torch.equal(x, before), "the rows were changed"

    # -- rows that are rounded as they are made ----------------------------------------------------------------------
    def test_rows_rounded_as_they_are_made(self) -> None:
        """By norms, with a sum before them and without, and by the activation, for the product behind them: what that
        gives is what `linear` gives of the operations' results. To the last bit where sums are exact; of any numbers
        as near as `rounding` says."""
        kind, rounds = self.any_kind(), False
        dtypes = [dtype for dtype in DTYPES if not self.subject().reasons(self.need(kind, dtype, "float32"))]
        for dtype in dtypes or [self.any_dtype(kind)]:
            body, ops = self.make(kind, dtype), self.row_operations(dtype)
            weight, bias = self.numbers(37, 100, dtype="float32"), self.numbers(37, dtype=dtype, seed=1)
            packed = body.pack(*whole_layer(kind, weight, None if rounds else bias))
            if check_rounded_rows(body, ops, packed, 100, self.numbers, dtype) and not rounds:
                self._check_any_rows(self.layer(weight, bias, kind, dtype), ops, dtype)
                rounds = True
        if not rounds:
            not_served("no rows are rounded as they are made: `pack` gives no RoundsRows, or `rounds` says so")

    def _check_any_rows(self, layer: Layer, ops: Ops, dtype: str) -> None:
        eps, packed, rows = 0.3, layer.packed, next(n for n in ROWS if n and layer.packed.rounds(n))
        x, residual, gate_up = (self.numbers(rows, n, dtype=dtype, seed=seed) for seed, n in enumerate((100, 100, 200)))
        norm = self.numbers(100, dtype=dtype, seed=3)
        normed, _ = ops.add_rms_norm(x.clone(), residual.clone(), norm, eps)
        self.check_rows(layer, normed, packed.after_norm(x, residual, norm, eps)[0])
        self.check_rows(layer, ops.silu_mul(gate_up), packed.after_silu(gate_up))

    @classmethod
    def row_operations(cls, dtype: str) -> Ops:
        """The operations whose rows are rounded."""
        subject = Subject.installed("ops", cls.operations, {})
        made: Ops = cls.once(
            f"ops {dtype}", lambda: subject.body()(worker_context(subject, cls.device, dtype, with_ops=False))
        )
        return made

    # -- over several ranks ------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("ranks", [2, 3])
    def test_sharded_weights(self, ranks: int) -> None:
        """Each rank packs its part: outputs put side by side, or sums over parts of the inputs, are as exact."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        weight, x = self.numbers(60, 96, dtype="float32"), self.numbers(5, 96, dtype=dtype, seed=1)
        for part in weight.chunk(ranks, dim=0):
            layer = self.layer(part, kind=kind, dtype=dtype)
            self.check_weights(layer)
            self.check_rows(layer, x, layer.body.linear(x, layer.packed))
        total = torch.zeros(5, 60, dtype=torch.float64, device=self.device)
        for part, rows in zip(weight.chunk(ranks, dim=1), x.chunk(ranks, dim=1), strict=True):
            layer = self.layer(part, kind=kind, dtype=dtype)
            self.check_weights(layer)
            total += layer.body.linear(rows, layer.packed).double()
        share, exact = self.rounding(kind), x.double() @ weight.double().T
        most = _largest(weight.double(), 0), _largest(x.double(), 0)
        bound = share.weight * (x.double().abs() @ most[0].T) + share.row * (most[1] @ weight.double().abs().T)
        bound += share.weight * share.row * (most[1] @ most[0].T) + ranks * SUMS[dtype] * (most[1] @ most[0].T)
        _nothing_above_zero((total - exact).abs() - bound, "the ranks' sums are wrong")

    # -- what is packed ----------------------------------------------------------------------------------------------
    def test_packing_is_the_same_each_time(self) -> None:
        """The same layer twice, from the same body or another: the same bits of results, and the same size."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        weight, bias = self.numbers(37, 203, dtype="float32"), self.numbers(37, dtype=dtype, seed=1)
        x, first = self.numbers(9, 203, dtype=dtype, seed=2), self.make(kind, dtype)
        other = self.body()(worker_context(self.subject(), self.device, dtype))
        found, sizes = [], set()
        for body in (first, first, other):
            packed = body.pack(*whole_layer(kind, weight, bias))
            sizes.add(body.packed_bytes(packed))
            found += [body.linear(x, packed), body.linear(x, packed)]
        assert all(torch.equal(found[0], again) for again in found[1:]), "the same layer gives other results"
        assert len(sizes) == 1, f"the same layer takes {sorted(sizes)} bytes"

    def test_nothing_is_kept(self) -> None:
        """Weight and bias may change, or go, when the layer is packed; they are not changed by it."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        body, x = self.make(kind, dtype), self.numbers(5, 64, dtype=dtype, seed=2)
        for stored in ("float32", dtype):
            if self.subject().reasons(self.need(kind, dtype, stored)):
                continue
            weight, bias = self.numbers(32, 64, dtype=stored), self.numbers(32, dtype=dtype, seed=1)
            copies = weight.clone(), bias.clone()
            packed = body.pack(*whole_layer(kind, weight, bias))
            assert torch.equal(weight, copies[0]) and torch.equal(bias, copies[1]), "packing changes the weights"
            before = body.linear(x, packed)
            weight.fill_(7)
            bias.fill_(7)
            assert torch.equal(body.linear(x, packed), before), "what is packed is a view of the weights"

    def test_layers_are_apart(self) -> None:
        """Many layers of one body, of several shapes and of the same, called in turn."""
        kind = self.any_kind()
        dtype = self.any_dtype(kind)
        shapes = [*SHAPES, (5, 700), (300, 7), *SHAPES]
        layers = [
            self.layer(self.numbers(*s, dtype="float32", seed=i), None, kind, dtype) for i, s in enumerate(shapes)
        ]
        for count, layer in itertools.product((1, 9), (*layers, *layers[::-1])):
            x = self.numbers(count, layer.weight.shape[1], dtype=dtype, seed=5)
            self.check_rows(layer, x, layer.body.linear(x, layer.packed))

    def test_it_is_smaller(self) -> None:
        """Than the same weights in 16 bits: that is what it is for. The bytes are a whole number of them."""
        kind = self.any_kind()
        body = self.make(kind, self.any_dtype(kind), "bfloat16")
        taken = body.packed_bytes(body.pack(*whole_layer(kind, self.numbers(256, 1024, dtype="bfloat16"))))
        assert isinstance(taken, int) and 0 < taken < 256 * 1024 * 2, f"{taken} bytes, of {256 * 1024} weights"

    @pytest.mark.parametrize("shapes", [((8,), None), ((8, 4), (4,)), ((8, 4), (8, 1)), ((2, 3, 4), None)], ids=str)
    def test_what_is_no_layer(self, shapes: tuple[tuple[int, ...], tuple[int, ...] | None]) -> None:
        """A typed error that names the kind of layer, and no guess."""
        kind = self.any_kind()
        body = self.make(kind, self.any_dtype(kind))
        weight = self.numbers(*shapes[0], dtype="float32")
        bias = None if shapes[1] is None else self.numbers(*shapes[1], dtype="float32")
        with pytest.raises(ConfigError, match=kind):
            body.pack(*whole_layer(kind, weight, bias))

    def test_very_wide_layers(self) -> None:
        """Right, or refused with their sizes."""
        kind, inputs = self.any_kind(), 100_003
        dtype = self.any_dtype(kind)
        body, weight = self.make(kind, dtype), self.numbers(2, inputs, dtype="float32")
        try:
            packed = body.pack(*whole_layer(kind, weight))
        except ConfigError as error:
            assert str(inputs) in str(error).replace(",", ""), f"the error does not name the size: {error}"
            return
        x, share = self.numbers(2, inputs, dtype=dtype, seed=1), self.rounding(kind)
        wide, rows = weight.double(), x.double()
        heavy, long = _largest(wide, share.weight_group), _largest(rows, share.row_group)
        bound = share.weight * (rows.abs() @ heavy.T) + share.row * (long @ wide.abs().T)
        bound += share.weight * share.row * (long @ heavy.T) + SUMS[dtype] * (rows.abs() @ wide.abs().T)
        _nothing_above_zero((body.linear(x, packed).double() - rows @ wide.T).abs() - bound, "results are wrong")

    # -- what is stored ----------------------------------------------------------------------------------------------
    @classmethod
    def write(cls, name: str, weight: torch.Tensor, bias: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Store a layer as a checkpoint does: its tensors by their names, and the weight [O, I] that they stand for.

        weight: float32 [O, I], as near to which as it can be; bias: float32 [O], which is stored as it is.
        """
        raise NotImplementedError("say by write() how a checkpoint stores a layer")

    @classmethod
    def stored_need(cls, kind: str, dtype: str = "float32") -> QuantizationNeed:
        """What is asked where weights are stored in the form; the test is skipped where none is named."""
        if cls.stored is None:
            not_served("no stored form is named, by `stored`")
        return replace(cls.need(kind, dtype), stored=cls.stored)

    @classmethod
    def is_stored(cls, kind: str) -> bool:
        """Whether a layer of this kind is stored in the form."""
        card = cls.described()
        return cls.stored is not None and kind in card.kinds and bool(card.covers(cls.stored, "layer", kind))

    def test_what_is_claimed(self) -> None:
        """Its own form, and no other."""
        kind = self.any_kind()
        need, card = self.stored_need(kind), self.described()
        assert need.stored is not None and card.claims(need.stored) is True, "it does not claim the form that is named"
        other = {**need.stored, "quant_method": "of-another-kind"}
        assert card.claims(other) is False and card.claims({}) is False, "it claims other forms than its own"
        assert self.subject().reasons(replace(need, stored=other)), "another form is served all the same"

    def test_what_is_covered(self) -> None:
        """What the config leaves plain is plain, and all else is not."""
        card, stored = self.described(), self.stored_need(self.any_kind()).stored
        assert stored is not None
        for kind in sorted(card.kinds):
            for name in self.uncovered:
                assert card.covers(stored, name, kind) is False, f"{name} is plain"
        covered = [card.covers(stored, "model.layers.7.some.layer", kind) is True for kind in card.kinds]
        assert any(covered), "a layer is taken for a plain one"

    @pytest.mark.parametrize("ranks", [1, 2])
    @pytest.mark.parametrize("how", ["one", "parts", "in one tensor", "inputs"])
    def test_stored_layers(self, how: str, ranks: int) -> None:
        """What is written is read back: one layer, parts that are joined, parts in one tensor, and inputs divided over
        ranks."""
        for kind in sorted(self.described().kinds):
            need = self.stored_need(kind)
            if not self.is_stored(kind):
                continue
            dtype = next((d for d in DTYPES if not self.subject().reasons(replace(need, dtype=d))), "float32")
            self.require(replace(need, dtype=dtype))
            sizes = self.outputs if how in ("parts", "in one tensor") else self.outputs[:1]
            names = [f"layer.{i}" for i in range(len(sizes))] if how == "parts" else ["layer"]
            rows = list(sizes) if how == "parts" else [sum(sizes)]
            weights = [self.numbers(n, self.inputs, dtype="float32", seed=i) for i, n in enumerate(rows)]
            biases = [self.numbers(n, dtype="float32", seed=9 + i) for i, n in enumerate(rows)]
            tensors: dict[str, torch.Tensor] = {}
            meant: list[torch.Tensor] = []
            for name, weight, bias in zip(names, weights, biases, strict=True):
                written, stands_for = self.write(name, weight, bias)
                assert stands_for.shape == weight.shape
                tensors |= written
                meant.append(stands_for.double())
            for rank in range(ranks):
                found = self.loaded(kind, dtype, how, names, sizes, (rank, ranks), tensors)
                parts = [torch.split(torch.cat(whole), list(sizes)) for whole in (meant, [b.double() for b in biases])]
                if how == "inputs":
                    expected = torch.cat(parts[0]).chunk(ranks, dim=1)[rank]
                    bias = torch.cat(parts[1]) * (rank == 0)
                else:
                    expected, bias = (torch.cat([part.chunk(ranks)[rank] for part in whole]) for whole in parts)
                self.check_stored(found, expected, bias, dtype, kind)

    def test_other_dtypes_are_refused(self) -> None:
        """A checkpoint whose tensors have another dtype than the form is broken, and is not read."""
        kind = next((k for k in KINDS if self.is_stored(k)), KINDS[0])
        need = self.stored_need(kind)
        dtype = next((d for d in DTYPES if not self.subject().reasons(replace(need, dtype=d))), "float32")
        weight, bias = self.numbers(512, self.inputs, dtype="float32"), self.numbers(512, dtype="float32", seed=1)
        tensors, _ = self.write("layer", weight, bias)
        name, codes = max(tensors.items(), key=lambda pair: pair[1].nbytes)
        wrong = tensors | {name: codes.to(torch.int16)}
        with pytest.raises(CheckpointError, match=re.escape(name)):
            self.loaded(kind, dtype, "one", ["layer"], [512], (0, 1), wrong)

    # -- embeddings --------------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_looked_up_rows(self, dtype: str) -> None:
        """Of embeddings, whole and divided over ranks: what was stored, rounded once to the dtype. A tied head has
        their memory, and gives the product."""
        embedding, meant = self.embedding(dtype)
        ids = torch.tensor([0, 511, 7, 7, 31, 32, 33, 300], device=self.device)
        expected = meant.to(self.device, getattr(torch, dtype))[ids]
        assert torch.equal(embedding(ids), expected), "a row is not what was stored"
        assert torch.equal(embedding(ids.to(torch.int32)), expected)
        assert embedding(ids[:0]).shape == (0, self.inputs)
        assert 0 < embedding.own_bytes(4) < 4 * meant.numel(), "it takes the memory of plain weights"
        several = [self.embedding(dtype, (rank, 3))[0](ids) for rank in range(3)]
        assert torch.equal(sum(several[1:], several[0]), expected), "an id that another rank has gives no zeros"
        head = LMHead(self.embedding_context(dtype), 512, self.inputs, "lm_head", embedding)
        head.linear.finish()
        self.check_stored(
            head.linear, meant.double(), torch.zeros(512, dtype=torch.float64), dtype, EMBEDDING, tied=True
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_captured_rows(self, dtype: str) -> None:
        """What the platform records of `embedding` looks the ids up that are there when it is replayed."""
        embedding, meant = self.embedding(dtype)
        require_capture(self.described().captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        ids = torch.arange(4, device=self.device)
        left: list[torch.Tensor] = []

        def step() -> None:
            left[:] = [embedding(ids)]

        replay = platform.capture(step, CaptureKey(0, variant=(f"embedding {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        out = left[0]
        for first in (100, 3):
            ids.copy_(torch.arange(first, first + 4))
            replay()
            assert torch.equal(out, meant.to(self.device, out.dtype)[ids]), "the replay has kept a value, or an address"

    @classmethod
    def embedding(cls, dtype: str, place: tuple[int, int] = (0, 1)) -> tuple[Embedding, torch.Tensor]:
        """A rank's part of one with 512 rows, and what the whole of it stands for, float32; skipped where the card
        serves none. place: (rank, ranks)."""
        if EMBEDDING not in cls.described().kinds:
            not_served(f"{EMBEDDING} is not among the card's kinds")
        cls.require(replace(cls.stored_need(EMBEDDING), dtype=dtype))
        weight = cls.numbers(512, cls.inputs, dtype="float32")
        tensors, meant = cls.write("layer", weight, torch.zeros(512))
        made = Embedding(cls.embedding_context(dtype, place), 512, cls.inputs, "layer")
        load_weights(made, [("layer.weight", tensors["layer.weight"])])
        return made, meant

    @classmethod
    def embedding_context(cls, dtype: str, place: tuple[int, int] = (0, 1)) -> ModelContext:
        """A rank's, in which sums over ranks are left to the test."""
        of_worker, (rank, ranks) = cls.stored_context(dtype), place
        group: Any = SimpleNamespace(all_reduce=lambda y: y, size=ranks, rank=rank)
        body = cls.built(lambda: of_worker, f"stored {dtype}")
        unused: Any = SimpleNamespace(linear=None)
        return ModelContext(
            description=of_worker.start.model,
            ops=unused,
            attention=unused,
            dtype=getattr(torch, dtype),
            device=torch.device(cls.device),
            max_model_len=1,
            tp_rank=rank,
            tp_size=ranks,
            group=group if ranks > 1 else None,
            quantization={EMBEDDING: body},
        )

    def loaded(
        self,
        kind: str,
        dtype: str,
        how: str,
        names: Sequence[str],
        sizes: Sequence[int],
        place: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
    ) -> Linear:
        """A rank's layer as a model has it, loaded from these tensors. place: (rank, ranks)."""
        rank, ranks = place
        body = self.built(lambda: self.stored_context(dtype), f"stored {dtype}")
        context = SimpleNamespace(
            ops=None, quantization={kind: body}, covers=None, adapters=None,
            dtype=getattr(torch, dtype), device=torch.device(self.device),
        )  # fmt: skip

        def shard(size: int) -> Shard:
            return Shard(size, rank * size // ranks, size // ranks)

        inputs = shard(self.inputs) if how == "inputs" else self.inputs
        outputs = list(sizes) if how == "inputs" else [shard(size) for size in sizes]
        mine = how != "inputs" or rank == 0
        layer = Linear(cast(ModelContext, context), inputs, outputs, names, True, adds_bias=mine, kind=kind)
        load_weights(layer, tensors.items())
        return layer

    @classmethod
    def stored_context(cls, dtype: str) -> WorkerContext:
        """A worker's, whose model's config says how the weights are stored."""
        context = worker_context(cls.subject(), cls.device, dtype)
        model = msgspec.structs.replace(context.start.model, config={"quantization_config": cls.stored})
        return replace(context, start=msgspec.structs.replace(context.start, model=model))

    def check_stored(
        self, layer: Linear, weight: torch.Tensor, bias: torch.Tensor, dtype: str, kind: str, tied: bool = False
    ) -> None:
        """weight [O, I] and bias [O] that the layer has to compute with, float64. tied: another's memory."""
        share, wide = self.described().rounding(kind, self.subject().options) or Rounding(0.0), weight.abs()
        eye = torch.eye(weight.shape[1], dtype=getattr(torch, dtype), device=self.device)
        off = (layer(eye).double() - weight.T - bias).abs()
        bound = (2 * SUMS[dtype] + share.row) * (wide.T + bias.abs())
        _nothing_above_zero(off - bound, "weights are not those that were stored")
        x = self.numbers(5, weight.shape[1], dtype=dtype, seed=3)
        rows = x.double()
        off = (layer(x).double() - rows @ weight.T - bias).abs()
        bound = share.row * (_largest(rows, share.row_group) @ wide.T)
        bound += 2 * SUMS[dtype] * (rows.abs() @ wide.T + bias.abs())
        _nothing_above_zero(off - bound, "results are wrong")
        elements = 0 if tied else weight.numel() + bool(layer.shape.bias) * len(bias)
        assert (layer.own_bytes(8) > 0) is not tied and layer.num_elements() == elements

    # -- captured steps ----------------------------------------------------------------------------------------------
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_captured(self, dtype: str) -> None:
        """What the platform records of `linear` is right for other rows, after larger products as well."""
        kind = self.any_kind()
        body = self.make(kind, dtype)
        require_capture(self.described().captured_by, self.device)
        platform = worker_context(self.subject(), self.device, dtype).platform
        assert platform is not None
        packed = body.pack(*whole_layer(kind, self.numbers(70, 130, dtype="float32")))
        x = self.numbers(5, 130, dtype=dtype)
        left: list[torch.Tensor] = []

        def step() -> None:
            left[:] = [body.linear(x, packed)]

        replay = platform.capture(step, CaptureKey(0, variant=(f"quantization {dtype}",)))
        assert replay is not step, "the platform could not capture it, though the card names its recorder"
        out = left[0]
        body.linear(self.numbers(500, 130, dtype=dtype, seed=7), packed)
        for seed in (1, 2):
            given = self.numbers(5, 130, dtype=dtype, seed=seed)
            x.copy_(given)
            replay()
            assert torch.equal(out, body.linear(given, packed)), "the replay has kept a value, or an address"

    # -- how fast ----------------------------------------------------------------------------------------------------
    @classmethod
    def figure(cls) -> str | None:
        """One row times a large matrix: how fast what is packed is read."""
        kind = cls.any_kind()
        dtype = "bfloat16" if not cls.subject().reasons(cls.need(kind, "bfloat16")) else cls.any_dtype(kind)
        body = cls.make(kind, dtype)
        packed = body.pack(*whole_layer(kind, cls.numbers(2048, 2048, dtype="float32")))
        x, taken = cls.numbers(1, 2048, dtype=dtype), body.packed_bytes(packed)
        seconds = median_seconds(functools.partial(body.linear, x, packed), cls.device)
        return (
            f"1 row by 2,048 x 2,048, {dtype}: {seconds * 1e6:,.0f} us, {taken / seconds / 1e9:.1f} GB/s of "
            f"{taken * 8 / 2048**2:.2f} bits a weight"
        )


def check_rounded_rows(
    body: Quantization, ops: Ops, packed: Any, inputs: int, numbers: Callable[..., torch.Tensor], dtype: str
) -> bool:
    """Whether a layer rounds rows as they are made, then bit for bit what `linear` makes of what `ops` gives.

    What is normed are whole numbers, whose squares add up to the same in every order.

    Args:
        packed: a layer of so many inputs.
        numbers: of a shape, dtype, seed and scale; see `QuantizationConformance.numbers`.
    """
    rows = max(filter(packed.rounds, range(1, 10)), default=0) if isinstance(packed, RoundsRows) else 0
    if not rows:
        return False
    norm, eps = numbers(inputs, dtype=dtype, seed=1), 0.3
    # Of those beyond 256 bfloat16 rounds the sum.
    x, residual = (numbers(rows, inputs, dtype=dtype, seed=int(n), scale=n).round() for n in (3.0, 150.0))
    x[::3, 5], residual[1::3, 7] = 40, -500
    x[2::5] = residual[2::5] = 0
    gate_up = numbers(rows, 2 * inputs + 8, dtype=dtype, seed=4)[:, 8:]
    gate_up[::4] *= 10
    normed, total = ops.add_rms_norm(x.clone(), residual.clone(), norm, eps)
    meant = {
        "a norm": (body.linear(ops.rms_norm(x, norm, eps), packed), x),
        "a sum and its norm": (body.linear(normed, packed), total),
        "an activation": (body.linear(ops.silu_mul(gate_up), packed),),
    }
    found = {
        "a norm": packed.after_norm(x.clone(), None, norm, eps),
        "a sum and its norm": packed.after_norm(x.clone(), residual, norm, eps),
        "an activation": (packed.after_silu(gate_up),),
    }
    for what, results in meant.items():
        for one, other in zip(found[what], results, strict=True):
            assert one.dtype == other.dtype, f"the result is {one.dtype}, of rows of {other.dtype}"
            assert torch.equal(one, other), f"behind {what} of {rows} rows it is not what `linear` gives"
    return True


def _largest(values: torch.Tensor, group: int) -> torch.Tensor:
    """For each element of [n, I] the largest magnitude in its group of inputs."""
    inputs = values.shape[1]
    size = group or max(1, inputs)
    padded = torch.nn.functional.pad(values.abs(), (0, -inputs % size)).view(len(values), -(-inputs // size), size)
    found: torch.Tensor = padded.amax(dim=2, keepdim=True).expand_as(padded).flatten(1)[:, :inputs]
    return found


def _nothing_above_zero(off: torch.Tensor, what: str) -> None:
    """off: by how much each element is beyond its bound; NaN is."""
    wrong = ~(off <= TINY)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        pytest.fail(
            f"{what}: {int(wrong.sum())} of {wrong.numel()}, the first at {first}, by {float(off[tuple(first)]):.3g}"
        )
