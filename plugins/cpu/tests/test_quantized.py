"""Drivers `int8` and `int4`: layers against their definition in float64, with the core's rounding of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.quantization import QuantizationNeed
from engine.types.errors import ConfigError
from engine_reference.quantization_absmax.absmax import dequantize, quantize
from engine_sdk.conformance.quantization import whole_layer

pytest.importorskip("engine_cpu", reason="engine-cpu is not installed")

LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
FORMS = {"int8": (8, 0), "int4-32": (4, 32), "int4-64": (4, 64), "int4-128": (4, 128)}
ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 16, 23, 24, 25, 70)


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    if request.param not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {request.param}")
    return request.param


def driver(form: str, level: str = "auto", **more: Any) -> Any:
    if form == "int8":
        from engine_cpu.quantization_int8.body import Int8Body
        from engine_cpu.quantization_int8.card import Int8Options

        return Int8Body(SimpleNamespace(options=Int8Options(level=level)))  # type: ignore[arg-type]
    from engine_cpu.quantization_int4.body import Int4Body
    from engine_cpu.quantization_int4.card import Int4Options

    options = Int4Options(level=level, group_size=FORMS[form][1], **more)
    return Int4Body(SimpleNamespace(options=options))  # type: ignore[arg-type]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(weight: torch.Tensor, form: str) -> torch.Tensor:
    """As they are rounded, float64."""
    bits, group = FORMS[form]
    codes, scales = quantize(weight, bits, group)
    return dequantize(codes, scales.double(), weight.shape[1], bits, group)


def rows(x: torch.Tensor, form: str) -> torch.Tensor:
    """As they are rounded on their way in: each group by its largest element, to 127 steps on either side; float64."""
    count, inputs = x.shape
    group = FORMS[form][1] or inputs
    wide = torch.nn.functional.pad(x.float(), (0, -inputs % group)).view(count, -(-inputs // group), group)
    most = wide.abs().amax(dim=2, keepdim=True)
    steps = torch.where(most > 0, torch.round(wide * (torch.full_like(most, 127) / most)), 0.0)
    return (steps.double() * (most / 127).double()).flatten(1)[:, :inputs]


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: str) -> None:
    """Within the rounding of float32 sums, and of one bfloat16."""
    left, right = rows(x, form), weights(weight, form)
    expected = left @ right.T + (0 if bias is None else bias.double())
    scale = left.abs() @ right.abs().T + (0 if bias is None else bias.double().abs())
    error = (found.double() - expected).abs() - 2e-6 * scale
    if found.dtype == torch.bfloat16:
        error -= 2**-8 * expected.abs()
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert not error.numel() or error.max() <= 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(level: str, form: str, dtype: torch.dtype, bias: bool) -> None:
    """Rows for every tile, outputs that fill no panel, inputs that fill no unit and no group."""
    body = driver(form, level)
    for outputs, inputs in ((1, 1), (3, 31), (37, 96), (130, 257), (64, 1024)):
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        added = random(outputs, dtype=dtype, seed=2) if bias else None
        packed = body.pack(*whole_layer("linear", weight, added))
        for count in ROWS:
            x = random(count, inputs, dtype=dtype, seed=3)
            check(body.linear(x, packed), x, weight, added, form)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(sorted(FORMS)), count=st.integers(1, 30), outputs=st.integers(1, 70),
    inputs=st.integers(1, 300), seed=st.integers(0, 99), wide=st.booleans(),
)  # fmt: skip
def test_every_level_gives_the_same_bits(
    form: str, count: int, outputs: int, inputs: int, seed: int, wide: bool
) -> None:
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    dtype = torch.float32 if wide else torch.bfloat16
    weight, x = random(outputs, inputs, seed=seed), random(count, inputs, dtype=dtype, seed=seed + 1)
    bias = random(outputs, seed=seed + 2)
    results = []
    for name in native.levels():
        body = driver(form, name)
        results.append(body.linear(x, body.pack(*whole_layer("linear", weight, bias))))
    check(results[0], x, weight, bias, form)
    for name, result in zip(native.levels(), results, strict=True):
        assert torch.equal(result, results[0]), name


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(level: str, form: str) -> None:
    body = driver(form, level)
    packed, x = body.pack(*whole_layer("linear", random(45, 203))), random(30, 203, seed=1)
    whole = body.linear(x, packed)
    for count in range(1, 30):
        assert torch.equal(body.linear(x[:count], packed), whole[:count])
        assert torch.equal(body.linear(x[count:], packed), whole[count:])
    packed, x = body.pack(*whole_layer("linear", random(33, 8192))), random(80, 8192, seed=1)  # in chunks
    whole = body.linear(x, packed)
    for row in (0, 11, 12, 47, 48, 79):
        assert torch.equal(body.linear(x[row : row + 1], packed), whole[row : row + 1])


@pytest.mark.parametrize("form", FORMS)
def test_extremes(level: str, form: str) -> None:
    """All codes at their ends, over many inputs: no sum saturates. Zeros stay zeros, tiny rows too."""
    body, inputs = driver(form, level), 4096
    signs = torch.where(torch.arange(40).unsqueeze(1) % 2 == 0, 1.0, -1.0)
    weight = -3.0 * signs.expand(40, inputs).contiguous()  # the farthest: code 0
    weight[4:8] *= -1
    weight[20:] *= torch.where(torch.arange(inputs) % 32 == 0, 1.0, -0.99)  # among such the highest codes
    x = torch.ones(14, inputs) * torch.tensor([1.0, -1.0]).repeat(7).unsqueeze(1)
    x[:, 7] *= 0.5
    check(body.linear(x, body.pack(*whole_layer("linear", weight))), x, weight, None, form)
    weight[10:12] = 0
    x[3:5] = 0
    x[5] = 1e-38
    bias = random(40)
    found = body.linear(x, body.pack(*whole_layer("linear", weight, bias)))
    assert torch.equal(found[3:6], bias.expand(3, 40))
    assert torch.equal(found[:, 10:12], bias[10:12].expand(14, 2))
    x[0], x[1] = 3e38, torch.linspace(-1e30, 1e30, inputs)
    check(body.linear(x[:2], body.pack(*whole_layer("linear", weight * 1e-6))), x[:2], weight * 1e-6, None, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_no_number_stays_alone(level: str, form: str, bad: float) -> None:
    """Its results say so, and nobody else's."""
    body = driver(form, level)
    packed, x = body.pack(*whole_layer("linear", random(33, 200))), random(14, 200, seed=1)
    expected = body.linear(x, packed)
    x[6, 150] = bad
    found = body.linear(x, packed)
    assert found[6].isnan().all()
    assert torch.equal(found[:6], expected[:6]) and torch.equal(found[7:], expected[7:])


@pytest.mark.parametrize("form", FORMS)
def test_views_and_other_dtypes(form: str) -> None:
    """Rows cut out of a wider tensor, a transposed one; weights as checkpoints hold them."""
    pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    body, weight = driver(form), random(9, 40)
    packed, wide = body.pack(*whole_layer("linear", weight)), random(5, 100, seed=1)
    assert torch.equal(body.linear(wide[:, 30:70], packed), body.linear(wide[:, 30:70].contiguous(), packed))
    turned = random(40, 5, seed=2).T
    assert torch.equal(body.linear(turned, packed), body.linear(turned.contiguous(), packed))
    x = random(3, 40, seed=3)
    half = weight.half()
    for dtype in (torch.float16, torch.float32, torch.float64):
        stored = half.to(dtype)
        assert torch.equal(body.linear(x, body.pack(*whole_layer("linear", stored))), body.linear(
            x, body.pack(*whole_layer("linear", half.float()))))  # fmt: skip
    assert torch.equal(
        body.linear(x, body.pack(*whole_layer("linear", weight.T.contiguous().T))), body.linear(x, packed)
    )


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_threads_change_nothing(form: str, threads: int) -> None:
    pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    weight, before = random(1000, 320), torch.get_num_threads()
    one = driver(form)
    packed = one.pack(*whole_layer("linear", weight))
    torch.set_num_threads(threads)
    try:
        several = driver(form)
        again = several.pack(*whole_layer("linear", weight))
        assert torch.equal(again.weight, packed.weight)
        for count in (1, 5, 40):
            x = random(count, 320, seed=1)
            assert torch.equal(several.linear(x, again), one.linear(x, packed))
    finally:
        torch.set_num_threads(before)


def test_recorded_calls_read_what_is_there_when_they_run() -> None:
    """A replay gives what a call would, after larger products moved on to other scratch memory."""
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    for form in FORMS:
        body = driver(form)
        packed, x = body.pack(*whole_layer("linear", random(70, 130))), random(5, 130, seed=1)
        tape = native.Tape()
        with tape:
            out = body.linear(x, packed)
        body.linear(random(3000, 130), packed)
        x.copy_(random(5, 130, seed=2))
        tape.replay()
        assert torch.equal(out, body.linear(x, packed))
        assert tape.names == ["linear_quantized"]


def test_how_large_they_are() -> None:
    pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    weight = random(64, 1024)
    assert driver("int8").packed_bytes(driver("int8").pack(*whole_layer("linear", weight))) == 64 * (1024 + 4)
    body = driver("int4-32")
    assert body.packed_bytes(body.pack(*whole_layer("linear", weight))) == 64 * 1024 * 9 // 16  # 4.5 bits a weight
    body = driver("int4-128")
    assert body.packed_bytes(body.pack(*whole_layer("linear", weight))) == 64 * 1024 * 33 // 64
    for bits, size in ((8, 1024 + 4), (4, 512 + 64)):
        body = driver("int4-32", head_bits=bits)
        assert body.packed_bytes(body.pack(*whole_layer("head", weight))) == 64 * size


def test_cards() -> None:
    from engine_cpu._native import levels
    from engine_cpu.quantization_int4.card import Int4Quantization
    from engine_cpu.quantization_int8.card import Int8Quantization

    need = QuantizationNeed(kind="linear", dtype="bfloat16", stored_dtype="bfloat16", device="cpu")
    for card in (Int8Quantization, Int4Quantization):
        assert card.unsupported(need) == [] or levels() == ["scalar"]
        other = QuantizationNeed(kind="linear", dtype="float64", stored_dtype="float8_e4m3fn", device="cuda")
        for word, reason in zip(("cuda", "float64", "float8"), card.unsupported(other)[-3:], strict=True):
            assert word in reason
    with pytest.raises(ConfigError, match="65537"):
        driver("int8").pack(*whole_layer("linear", torch.zeros(1, 65537)))
