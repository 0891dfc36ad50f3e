"""What the library is handed, beside the published formulas and, where it is installed, beside its own converter."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import humming_double
import numpy as np
import pytest
import torch
from humming_body import DoubleBody
from written import CASES, E2M1

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine.types.parallel import Shard
from engine_humming.form import in_form, words
from engine_kit.by_expert import by_expert
from engine_kit.routing import ExpertAct
from engine_quantization.methods import method_of
from engine_quantization.readers import Codes, taken_apart


def body(name: str, dtype: torch.dtype = torch.bfloat16) -> DoubleBody:
    start = SimpleNamespace(model=SimpleNamespace(config={"quantization_config": CASES[name].stored}))
    return DoubleBody(SimpleNamespace(start=start, options=None, device=None, dtype=dtype))


def written(
    name: str, outputs: int, inputs: int, kind: str = "linear", seed: int = 0
) -> tuple[LayerShape, dict[str, torch.Tensor], torch.Tensor]:
    """(the layer, its tensors by the keys of `pack`, what they stand for, float64)."""
    weight = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32) / inputs**0.5
    tensors, meant = CASES[name].write("layer", weight)
    shape = LayerShape(("layer",), kind, Shard.of(inputs), (Shard.of(outputs),), False)
    return shape, {key.removeprefix("layer."): t for key, t in tensors.items()}, torch.from_numpy(meant)


def rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(3)).bfloat16()


def near(found: torch.Tensor, expected: torch.Tensor, bound: float = 2.0**-6) -> None:
    assert float((found.double() - expected).abs().max()) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("bits", [4, 8])
def test_words(bits: int) -> None:
    """Code i of a word stands in its bits i * b and on, as numpy counts them."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64))
    each = 32 // bits
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    expected = (codes.reshape(3, -1, each).astype(np.uint64) << shifts).sum(-1).astype(np.uint32).view(np.int32)
    assert np.array_equal(words(torch.from_numpy(codes.astype(np.uint8)), bits).numpy(), expected)


def test_powers_of_two_stay_exponents() -> None:
    """Each of MXFP4's 255 scales; the last is no number."""
    exponents = torch.arange(255, dtype=torch.int32)
    scales = torch.ldexp(torch.ones(255), exponents - 127).bfloat16().unsqueeze(0)
    codes = Codes(torch.zeros(1, 255 * 32, dtype=torch.uint8), 4, scales, None, torch.from_numpy(E2M1), 32)
    _, tensors = in_form(codes, torch.bfloat16, powers_of_two=True)
    assert torch.equal(tensors["weight_scale"].view(torch.uint8)[0].int(), exponents)


@pytest.mark.parametrize(
    "name", ["awq", "gptq asymmetric v1", "gptq ordered", "gptq 8", "w8a8 asymmetric", "fp8 tensor"]
)
def test_products(name: str) -> None:
    """Beside what the published formula says that the tensors stand for; packed as many bits as they are stored in."""
    shape, tensors, meant = written(name, 136, 256)
    made = body(name)
    packed = made.pack(shape, tensors)
    x = rows(5, 256)
    near(made.linear(x, packed), x.double() @ meant.T)
    assert made.linear(x[:0], packed).shape == (0, 136)
    assert made.packed_bytes(packed) < meant.numel() * 1.2 + 16384


@pytest.mark.parametrize("name", ["awq", "gptq", "deepseek", "mxfp4"])
def test_experts(name: str) -> None:
    """All of a layer in two products, beside each by itself; nobody's choices add nothing, and one alone is one too."""
    hidden, inner, made, act = 256, 128, body(name), ExpertAct()
    pairs, meant = [], []
    for expert in range(3):
        sides = [written(name, 2 * inner, hidden, "expert", expert), written(name, hidden, inner, "expert", expert + 9)]
        pairs.append(tuple(made.pack(shape, tensors) for shape, tensors, _ in sides))
        meant.append([weight for _, _, weight in sides])
    alone = made.pack(*written(name, hidden, inner, "expert", 9)[:2])
    near(made.linear(rows(3, inner), alone), rows(3, inner).double() @ meant[0][1].T)
    assert 0 < made.packed_bytes(alone) < hidden * inner * 1.2 + 16384
    before = sum(made.packed_bytes(one) for pair in pairs for one in pair)
    packed = made.pack_experts(pairs)
    after = sum(made.packed_bytes(one) for pair in pairs for one in pair)
    assert after > 0 and abs(after - before) < 0.1 * before + 6 * 8192
    x, ids = rows(4, hidden), torch.tensor([[0, 2], [3, 3], [1, 3], [2, 1]], dtype=torch.int32)
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(5))

    def one(expert: int, some: torch.Tensor) -> torch.Tensor:
        first, last = meant[expert]
        gate, up = (some.double() @ first.T).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ last.T

    found = made.experts(x, packed, ids, weights, act)
    near(found, by_expert(x.double(), ids, weights.double(), 3, one), 2.0**-5)
    assert not found[1].any()
    assert made.experts(x[:0], packed, ids[:0], weights[:0], act).shape == (0, hidden)

    def by(number: int) -> torch.Tensor:
        return made.experts(x, packed, torch.full((4, 1), number, dtype=torch.int32), weights[:, :1], act)

    assert not torch.equal(by(0), by(2))
    for target, source in zip(packed.tensors(0), packed.tensors(2), strict=True):
        assert target.is_contiguous()  # other ranks send bytes into it
        target.copy_(source)
    assert torch.equal(by(0), by(2))


@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "dtype", "says"),
    [
        ("w8a8", 20, 256, torch.bfloat16, "20 outputs and 256 inputs, which are no multiples of 8"),
        ("fp8 tensor", 128, 100, torch.bfloat16, "no multiples of 8"),
        ("llm.int8", 128, 256, torch.float16, "smaller than float16 holds exactly"),
    ],
)
def test_what_the_library_does_not_take(
    caplog: pytest.LogCaptureFixture, name: str, outputs: int, inputs: int, dtype: torch.dtype, says: str
) -> None:
    """Is multiplied by the other driver's kernels, which is told; an expert is refused."""
    shape, tensors, meant = written(name, outputs, inputs)
    if "SCB" in tensors:
        tensors["SCB"] = tensors["SCB"] * 2.0**-10
        meant = meant * 2.0**-10
    made = body(name, dtype)
    packed, x = made.pack(shape, tensors), rows(3, inputs).to(dtype)
    assert made.pack(shape, tensors) is not packed and not humming_double.calls
    near(made.linear(x, packed), x.double() @ meant.T)
    assert 0 < made.packed_bytes(packed) < meant.numel() * 4
    (told,) = caplog.messages
    assert "layer is multiplied by 'stored-triton', not by Humming" in told and says in told
    with pytest.raises(ConfigError, match=says):
        made.pack(shape._replace(kind="expert"), tensors)


def test_experts_are_held_to_their_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No dense layer has tried the library, which computes one by one and joined the same, and wrongly."""
    right = humming_double.humming_forward

    def wrong(config: Any, inputs: Any, weight: Any, weight_scale: Any, **more: Any) -> Any:
        return right(config, inputs, weight, weight_scale.roll(1, -2), **more)

    monkeypatch.setattr(humming_double, "humming_forward", wrong)
    made = body("awq")
    pairs = [tuple(made.pack(*written("awq", *sizes, "expert", 1)[:2]) for sizes in ((256, 128), (128, 128)))]
    with pytest.raises(ConfigError, match="multiply with 1 experts by Humming(.|\n)*of the largest number off"):
        made.pack_experts(pairs)


def test_experts_in_orders_of_their_own_are_refused() -> None:
    made = body("gptq ordered")
    pairs = [tuple(made.pack(*written("gptq ordered", 128, 128, "expert", side)[:2]) for side in (0, 1))]
    with pytest.raises(ConfigError, match="g_idx(.|\n)*expert=stored-triton"):
        made.pack_experts(pairs)


def test_a_library_that_computes_another_thing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is served: a neighbour's scale, or an exception."""
    right = humming_double.humming_forward
    shape, tensors, _ = written("awq", 128, 256)

    def wrong(config: Any, inputs: Any, weight: Any, weight_scale: Any, **more: Any) -> Any:
        return right(config, inputs, weight, weight_scale.roll(1, 0), **more)

    monkeypatch.setattr(humming_double, "humming_forward", wrong)
    with pytest.raises(ConfigError, match="computes 1 x 256 x 128 wrongly"):
        body("awq").pack(shape, tensors)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No suitable CUDA 13 environment found.")

    monkeypatch.setattr(humming_double, "humming_forward", broken)
    with pytest.raises(ConfigError, match="it says: No suitable CUDA 13"):
        body("awq").pack(shape, tensors)


@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed")
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gptq asymmetric", {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}),
        ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}),
    ],
)
def test_beside_the_library(name: str, config: dict[str, Any]) -> None:
    """Its own converter of the same file, in plain torch, makes the same tensors; its schema takes ours."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    from humming.schema import BaseWeightSchema, HummingWeightSchema

    shape, tensors, _ = written(name, 128, 256)
    form = method_of(CASES[name].stored).form("layer", "linear")
    assert form is not None
    codes, _ = taken_apart(shape, form, tensors)
    scheme, ours = in_form(codes, torch.float16)
    _, theirs = BaseWeightSchema.from_config(config)._convert_humming(tensors, [128], [256], torch.float16)
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    schema = HummingWeightSchema(
        b_dtype=scheme.dtype,
        bs_dtype=scheme.scale_dtype or None,
        weight_scale_group_size=scheme.group,
        has_zero_point=scheme.zeros,
    )
    schema.validate_tensors(ours, 128, 256, torch.float16)
