"""What the library is handed, beside the published formulas and, where it is installed, beside its own utilities."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deep_gemm_double
import pytest
import torch
from deepgemm_body import DoubleBody
from oracle_body import rounded_rows
from written import CASES

from engine.interfaces.quantization import LayerShape
from engine.types.errors import CheckpointError, ConfigError
from engine.types.parallel import Shard
from engine_deepgemm.blocks import in_blocks
from engine_deepgemm.card import DeepGemmOptions
from engine_deepgemm.rows import FP8, quantize_groups
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct
from engine_quantization.readers import Codes

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}


@pytest.fixture
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DoubleBody:
    """On a GPU of this major number, Hopper's where none is named."""
    major = getattr(request, "param", 9)
    monkeypatch.setattr(deep_gemm_double, "ARCH", major)
    monkeypatch.setattr("engine_deepgemm.body.on_blackwell", lambda device: major == 10)
    start = SimpleNamespace(
        model=SimpleNamespace(config={"quantization_config": CONFIG}), max_num_batched_tokens=4, max_num_seqs=4
    )
    return DoubleBody(SimpleNamespace(start=start, options=DeepGemmOptions(), device=None, dtype=torch.bfloat16))


def layer(names: dict[str, int], inputs: int, orders: Any = None, kind: str = "linear") -> LayerShape:
    return LayerShape(
        tuple(names), kind, Shard.of(inputs), tuple(Shard.of(n) for n in names.values()), False, orders or {}
    )


def stored(names: dict[str, int], inputs: int, power_of_two: bool = True, seed: int = 0) -> Any:
    """Tensors as `pack` gets them, and the weights that they stand for, float64, in their order."""
    random = torch.Generator().manual_seed(seed)
    codes, scales, meant = [], [], []
    for outputs in names.values():
        held = torch.randn(outputs, inputs, generator=random).to(FP8)
        each = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=random) + 0.1
        each = torch.exp2(each.mul(8).round()) if power_of_two else each
        wide = each.double().repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
        codes.append(held)
        scales.append(each)
        meant.append(held.double() * wide)
    return {"weight": torch.cat(codes), "weight_scale_inv": torch.cat(scales)}, torch.cat(meant)


def rows(count: int, inputs: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("count", "inputs"), [(1, 128), (5, 200), (8, 384), (70, 130)])
def test_rows_are_rounded_by_the_formula(count: int, inputs: int, power_of_two: bool) -> None:
    """Codes times scales, group by group; zeros behind what is no input, and scales where tensor copies read them."""
    width = -(-inputs // 128) * 128
    x = rows(count, inputs) * torch.logspace(-3, 3, count).unsqueeze(1).bfloat16()
    x[0, :128] = 0
    codes, scales = quantize_groups(x, width, power_of_two)
    wide = codes.double() * scales.double().repeat_interleave(128, 1)
    assert torch.equal(wide[:, :inputs], rounded_rows(x, power_of_two))
    assert not wide[:, inputs:].any()
    if power_of_two:
        assert scales.is_contiguous()
        assert not (scales.view(torch.int32) & 0x7FFFFF).any()
    else:
        assert scales.stride() == (1, -(-count // 4) * 4)


def test_parts_that_fill_no_block() -> None:
    """Each begins with a block of its own, and is found again."""
    names = {"a": 200, "b": 64, "c": 130}
    tensors, meant = stored(names, 300)
    of_parts = zip(tensors["weight_scale_inv"].split([2, 1, 2]), names.values(), strict=True)
    spread = torch.cat([scales.repeat_interleave(128, 0)[:outputs] for scales, outputs in of_parts])
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float().nan_to_num(0.0)
    codes = Codes(tensors["weight"].view(torch.uint8), 8, spread, None, values, 128)
    held, scales, place = in_blocks(codes, list(names.values()))
    assert held.shape == (256 + 128 + 256, 384) and scales.shape == (5, 3)
    wide = held.view(FP8).double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(wide[place][:, :300], meant)
    rest = torch.ones(len(held), dtype=torch.bool).index_fill_(0, place, False)
    assert not wide[rest].any() and not wide[:, 300:].any()


@pytest.mark.parametrize("body", [9, 10], indirect=True)
@pytest.mark.parametrize("ordered", [False, True])
def test_products(body: DoubleBody, ordered: bool) -> None:
    """Of joined parts, with rows that belong elsewhere, beside float64."""
    names, inputs = {"a": 200, "b": 128}, 300
    orders = {"a": torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()} if ordered else {}
    shape = layer(names, inputs, orders)
    tensors, meant = stored(names, inputs)
    packed = body.pack(shape, tensors)
    if ordered:
        meant = torch.cat([meant[:200][orders["a"]], meant[200:]])
    for count in (0, 1, 6):
        x = rows(count, inputs)
        expected = rounded_rows(x, body._powers) @ meant.T
        assert torch.equal(body.linear(x, packed), expected.bfloat16())
    assert body.packed_bytes(packed) < 1.6 * meant.numel() + 4096


def test_blocks_of_compressed_tensors(body: DoubleBody) -> None:
    """The same numbers under other names."""
    tensors, meant = stored({"a": 130}, 200)
    body._config = {"quantization_config": CASES["fp8 block"].stored}
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    x = rows(3, 200)
    packed = body.pack(layer({"a": 130}, 200), tensors)
    assert torch.equal(body.linear(x, packed), (rounded_rows(x) @ meant.T).bfloat16())


@pytest.mark.parametrize(("body", "bias"), [(9, True), (10, False)], indirect=["body"])
def test_experts(body: DoubleBody, bias: bool) -> None:
    """All of a layer in two products, beside each by itself; nobody's choices add nothing."""
    hidden, inner, count = 200, 72, 3
    pairs, act = [], ExpertAct()
    for expert in range(count):
        sides = []
        for side, (outputs, inputs) in enumerate(((2 * inner, hidden), (hidden, inner))):
            shape = layer({f"{expert}.{side}": outputs}, inputs, kind="expert")._replace(bias=bias)
            tensors, _ = stored({"one": outputs}, inputs, seed=2 * expert + side)
            tensors["weight_scale_inv"] /= 1024
            more = {"bias": torch.full((outputs,), 0.25 * (expert + 1)).bfloat16()} if bias else {}
            sides.append(body.pack(shape, tensors | more))
        pairs.append(tuple(sides))
    packed = body.pack_experts(pairs)
    x, ids = rows(4, hidden), torch.tensor([[0, 2], [3, 3], [1, 3], [2, 1]], dtype=torch.int32)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(5))

    def one(expert: int, some: torch.Tensor) -> torch.Tensor:
        first, last = pairs[expert]
        return body.linear(body._act.gated_act(body.linear(some, first), act), last)

    found = body.experts(x, packed, ids, weights, act)
    assert torch.equal(found, by_expert(x, ids, weights, count, one))
    assert not found[1].any()
    assert body.experts(x[:0], packed, ids[:0], weights[:0], act).shape == (0, hidden)

    def by(number: int) -> torch.Tensor:
        return body.experts(x, packed, torch.full((4, 1), number, dtype=torch.int32), weights[:, :1], act)

    assert not torch.equal(by(0), by(2))
    for target, source in zip(packed.tensors(0), packed.tensors(2), strict=True):
        assert target.is_contiguous()  # other ranks send bytes into it
        target.copy_(source)
    assert torch.equal(by(0), by(2))


def test_kernels_are_compiled_before_requests_come(body: DoubleBody) -> None:
    """Of each size of layer once, for 1, 2, 4 ... rows."""
    body._warm_up = True
    deep_gemm_double.calls.clear()
    for seed in (0, 1):
        body.pack(layer({"a": 256}, 128), stored({"a": 256}, 128, seed=seed)[0])
    rows_of_calls = [sizes[0] for _, sizes in deep_gemm_double.calls]
    assert rows_of_calls == [1, 17, 130, 1, 2, 4]


@pytest.mark.parametrize("body", [10], indirect=True)
def test_scales_that_are_no_powers_of_two(body: DoubleBody) -> None:
    tensors, _ = stored({"a": 128}, 128, power_of_two=False)
    with pytest.raises(CheckpointError, match="no powers of two"):
        body.pack(layer({"a": 128}, 128), tensors)


@pytest.mark.parametrize("kind", ["linear", "expert"])
def test_a_library_that_computes_another_thing_is_refused(
    body: DoubleBody, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Before anything is served: a neighbour's scale, or an exception."""
    tensors, _ = stored({"a": 256}, 256)
    right = deep_gemm_double.fp8_gemm_nt
    shape = layer({"a": 256}, 256, kind=kind)

    def wrong(a: Any, b: Any, d: torch.Tensor, **more: Any) -> None:
        right(a, (b[0], b[1].roll(1, 0).contiguous()), d, **more)

    monkeypatch.setattr(deep_gemm_double, "fp8_gemm_nt", wrong)
    with pytest.raises(ConfigError, match="computes 1 x 256 x 256 wrongly"):
        body.pack(shape, tensors)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("NVCC version must be at least 12.9")

    monkeypatch.setattr(deep_gemm_double, "fp8_gemm_nt", broken)
    with pytest.raises(ConfigError, match="it says: NVCC version"):
        body.pack(shape, tensors)


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="sgl-deep-gemm is not installed")
def test_rows_beside_the_library() -> None:
    """Its own utility in plain torch, without its kernels; it multiplies by 1 / scale, so a code may be the next."""
    spec = importlib.util.find_spec("deep_gemm")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / "utils" / "math.py"
    of_file = importlib.util.spec_from_file_location("deep_gemm_math", path)
    assert of_file is not None and of_file.loader is not None
    library = importlib.util.module_from_spec(of_file)
    of_file.loader.exec_module(library)
    x = rows(33, 384)
    for power_of_two in (False, True):
        codes, scales = quantize_groups(x, 384, power_of_two)
        theirs, of_theirs = library.per_token_cast_to_fp8(x, use_ue8m0=power_of_two)
        assert torch.allclose(scales, of_theirs, rtol=2**-23, atol=0)
        apart = (codes.view(torch.uint8).int() - theirs.view(torch.uint8).int()).abs()
        assert int(apart.max()) <= (0 if power_of_two else 1) and float((apart > 0).float().mean()) < 0.01
