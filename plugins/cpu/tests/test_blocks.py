"""Driver `gguf_cpu`: weights in ggml's blocks against ggml's own package in float64, at every level."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ggml_blocks import TYPES, random_blocks

from engine.interfaces.quantization import LayerShape, QuantizationNeed
from engine.types.errors import UnsupportedModelError
from engine.types.parallel import Shard
from engine_kit.ggml_blocks import METHOD
from engine_kit.ggml_blocks import TYPES as FORMS
from engine_kit.routing import ExpertAct

pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")

from engine_cpu._native import Layout, Tape, levels
from engine_cpu.packed import PackedLinear
from engine_cpu.quantization_gguf.body import GGUFBody, Parts
from engine_cpu.quantization_gguf.card import GGUFQuantization

LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if request.param not in levels():
        pytest.skip(f"this processor, or the compiler, has no {request.param}")
    return str(request.param)


def body(types: dict[str, str], level: str = "auto", dtype: str = "float32") -> GGUFBody:
    stored = {"quant_method": METHOD, "types": types}
    start = SimpleNamespace(model=SimpleNamespace(config={"quantization_config": stored}), dtype=dtype)
    return GGUFBody(SimpleNamespace(options=SimpleNamespace(level=level), start=start))  # type: ignore[arg-type]


def layer(weights: dict[str, torch.Tensor], inputs: int, bias: torch.Tensor | None = None) -> tuple[LayerShape, Any]:
    tensors = {f"weight.{place}": weight for place, weight in enumerate(weights.values())}
    shape = LayerShape(
        tuple(weights), "linear", Shard.of(inputs), tuple(Shard.of(len(w)) for w in weights.values()), bias is not None
    )
    return shape, tensors if bias is None else {**tensors, "bias": bias}


def rounded(x: torch.Tensor, group: int) -> np.ndarray:
    """Rows as they are rounded on their way in."""
    wide = x.float().view(len(x), -1, group)
    most = wide.abs().amax(dim=2, keepdim=True)
    steps = torch.where(most > 0, torch.round(wide * (torch.full_like(most, 127) / most)), 0.0)
    return (steps.double() * (most / 127).double()).flatten(1).numpy()


def check(found: torch.Tensor, rows: np.ndarray, weight: np.ndarray, bias: torch.Tensor | None) -> None:
    added = 0 if bias is None else bias.double().numpy()
    expected, scale = rows @ weight.T + added, np.abs(rows) @ np.abs(weight).T + np.abs(added)
    error = np.abs(found.double().numpy() - expected) - 4e-6 * scale
    if found.dtype == torch.bfloat16:
        error -= 2**-8 * np.abs(expected)
    assert found.shape == expected.shape and error.max() <= 0


@pytest.mark.parametrize("kind", TYPES)
def test_linear(level: str, kind: str) -> None:
    """Rows for every tile, with the bits of `scalar`; a row's do not depend on those beside it."""
    driver, scalar = body({"layer": kind}, level), body({"layer": kind}, "scalar")
    group = 16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32
    for outputs, inputs, biased in ((37, 256, False), (64, 768, True)):
        blocks, weight = random_blocks(kind, outputs, inputs)
        bias = torch.randn(outputs) if biased else None
        shape, tensors = layer({"layer": torch.from_numpy(blocks)}, inputs, bias)
        packed = driver.pack(shape, tensors)
        assert driver.packed_bytes(packed) == -(-outputs // 32) * 32 * (blocks[0].size + 4 * biased)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(23, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
            whole = driver.linear(x, packed)
            check(whole, rounded(x, group), weight, bias)
            assert torch.equal(whole, scalar.linear(x, scalar.pack(shape, tensors)))
            for count in (1, 2, 3, 4, 5, 7, 8, 9, 16):
                assert torch.equal(driver.linear(x[-count:], packed), whole[-count:])


def test_parts_of_several_types(level: str) -> None:
    """Queries and keys in 4 bits, values in 6, a gate in float16, and one that is plain: each as it is stored."""
    kinds = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K", "g": "F16", "p": "F32"}
    stored, meant = {}, []
    for place, (name, kind) in enumerate(kinds.items()):
        if FORMS[kind].plain:
            plain = torch.randn(20, 512, generator=torch.Generator().manual_seed(place)) / 20
            stored[name] = plain.half() if kind == "F16" else plain
            meant.append(stored[name].double().numpy())
        else:
            blocks, weight = random_blocks(kind, 50, 512, seed=place)
            stored[name] = torch.from_numpy(blocks)
            meant.append(weight)
    driver, bias = body(kinds, level), torch.randn(190)
    packed = driver.pack(*layer(stored, 512, bias))
    assert isinstance(packed, Parts) and [part.outputs for part in packed.parts] == [100, 50, 20, 20]
    x = torch.randn(9, 512)
    found, rows = driver.linear(x, packed), [rounded(x, 32)] * 2 + [rounded(x, 16)] + [x.double().numpy()] * 2
    for start, row, weight in zip((0, 50, 100, 150, 170), rows, meant, strict=True):
        part = slice(start, start + len(weight))
        check(found[:, part], row, weight, bias[part])


def test_float16(level: str) -> None:
    """Rows are not rounded."""
    weight, linear = torch.randn(37, 130).half(), PackedLinear("quantization", level)
    packed = linear.pack("float16", weight, None)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(21, 130).to(dtype)
        found = linear.linear(x, packed)
        check(found, x.double().numpy(), weight.double().numpy(), None)
        assert torch.equal(linear.linear(x[4:7], packed), found[4:7])
    assert packed.nbytes == 64 * 130 * 2


@pytest.mark.parametrize("kind", TYPES)
def test_extremes(level: str, kind: str) -> None:
    """All codes and rows at their ends, over many inputs: no sum saturates. A row that is no number stays alone."""
    for value in (0x00, 0xFF):
        full, weight = random_blocks(kind, 33, 2048, fill=value)
        driver = body({"layer": kind}, level)
        packed = driver.pack(*layer({"layer": torch.from_numpy(full)}, 2048))
        x = torch.ones(12, 2048) * torch.tensor([[1.0], [-1.0], [0.0]]).repeat(4, 1)
        check(driver.linear(x, packed), x.double().numpy(), weight, None)
    x = torch.randn(12, 2048)
    expected = driver.linear(x, packed)
    x[6, 1500] = float("nan")
    found = driver.linear(x, packed)
    assert found[6].isnan().all()
    assert torch.equal(found[:6], expected[:6]) and torch.equal(found[7:], expected[7:])


@pytest.mark.parametrize("kind", (*TYPES, "F16", "F32", "BF16"))
def test_looked_up_rows(kind: str) -> None:
    """Rows of a packed layer, exactly as ggml's package works them out, and zeros for those that another rank has."""
    if FORMS[kind].plain:
        plain = torch.randn(71, 256).to(getattr(torch, FORMS[kind].dtype))
        stored, meant = plain, plain.float()
    else:
        blocks, weight = random_blocks(kind, 71, 256)
        stored, meant = torch.from_numpy(blocks), torch.from_numpy(weight).float()
    ids = torch.tensor([0, 70, 15, 16, 31, 32, 15, *range(71)])
    for dtype in (torch.float32, torch.bfloat16):
        driver = body({"layer": kind}, dtype=str(dtype).removeprefix("torch."))
        packed = driver.pack(*layer({"layer": stored}, 256))
        expected = meant.to(dtype)
        for given in (ids, ids.int(), ids[::2], ids[:0]):
            assert torch.equal(driver.embedding(given, packed, None), expected[given.long()])
        part = driver.embedding(ids, packed, 10)
        assert torch.equal(part[ids >= 10], expected[ids[ids >= 10] - 10]) and not part[ids < 10].any()
        assert not driver.embedding(torch.tensor([81, 9, -5]), packed, 10).any()
        for beyond in (71, -1):
            with pytest.raises(IndexError, match="of 71"):
                driver.embedding(torch.tensor([3, beyond]), packed, None)


def test_other_formats_are_not_looked_up() -> None:
    linear, ids = PackedLinear("quantization", "auto"), torch.tensor([0])
    with pytest.raises(ValueError, match="format"):
        linear.look_up(ids, linear.pack("int8", torch.randn(32, 32), None), torch.float32, None)
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        linear.look_up(ids, linear.pack("float32", torch.randn(32, 32), None), torch.float16, None)


def test_recorded_calls() -> None:
    """A replay reads what is there when it runs, in layers of several parts too."""
    stored = {name: torch.from_numpy(random_blocks(kind, 40, 256)[0]) for name, kind in (("a", "Q4_K"), ("b", "Q6_K"))}
    driver = body({"a": "Q4_K", "b": "Q6_K"})
    packed, x = driver.pack(*layer(stored, 256)), torch.randn(5, 256)
    tape = Tape()
    with tape:
        out = driver.linear(x, packed)
    driver.linear(torch.randn(900, 256), packed)
    x.copy_(torch.randn(5, 256))
    tape.replay()
    assert torch.equal(out, driver.linear(x, packed))


def test_experts(level: str) -> None:
    """All of a layer's at once: as each by itself."""
    types = {"e.experts.*.gate": "Q4_K", "e.experts.*.up": "Q4_K", "e.experts.*.down": "Q6_K"}
    driver, pairs = body(types, level), []
    for expert in range(3):
        gate, up, down = (
            random_blocks(k, 256, 256, seed=3 * expert + i) for i, k in enumerate(("Q4_K", "Q4_K", "Q6_K"))
        )
        names = [f"e.experts.{expert}.{part}" for part in ("gate", "up", "down")]
        first = driver.pack(*layer({names[0]: torch.from_numpy(gate[0]), names[1]: torch.from_numpy(up[0])}, 256))
        last = driver.pack(*layer({names[2]: torch.from_numpy(down[0])}, 256))
        pairs.append((first, last))
    x, ids = (
        torch.randn(7, 256),
        torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 2], [2, 0], [0, 2]], dtype=torch.int32),
    )
    weights = torch.rand(7, 2)
    found = driver.experts(x, driver.pack_experts(pairs), ids, weights, ExpertAct())
    for token in range(7):
        expected = torch.zeros(256)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            first, last = pairs[expert]
            gate, up = driver.linear(x[token : token + 1], first).chunk(2, dim=1)
            expected += weight * driver.linear(torch.nn.functional.silu(gate) * up, last)[0]
        assert torch.allclose(found[token], expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))
    mixed = {"e.experts.*.gate": "Q4_K", "e.experts.*.up": "Q5_K"}
    other = body(mixed, level)
    pair = {
        f"e.experts.0.{p}": torch.from_numpy(random_blocks(mixed[f"e.experts.*.{p}"], 32, 256)[0])
        for p in ("gate", "up")
    }
    with pytest.raises(UnsupportedModelError, match="different types"):
        other.pack_experts([(other.pack(*layer(pair, 256)), pairs[0][1])])


def test_the_layout_refuses_what_is_no_block() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        Layout("q4_k", 32, 128).pack_blocks(0, 0, 0, 1)
    with pytest.raises(ValueError, match="no format"):
        Layout("q9_k", 32, 256)


def test_card() -> None:
    plain = QuantizationNeed(kind="linear", dtype="bfloat16", stored_dtype="bfloat16", device="cpu")
    assert "rounds none" in " ".join(GGUFQuantization.mismatches(plain))
    assert GGUFQuantization.claims({"quant_method": "gguf"}) and not GGUFQuantization.claims({"quant_method": "awq"})
    assert GGUFQuantization.unsupported(plain) == [] or levels() == ["scalar"]
