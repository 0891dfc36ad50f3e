"""Our kernels: in Triton's interpreter against torch, and compiled for GPUs that are not there."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch
from flashinfer_body import write_reference

from engine_flashinfer.sinks import apply_sinks
from engine_flashinfer.write import _write, write_pages

SLOTS = torch.tensor([5, 16, 47, 0, 33])


def pages_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of 3 pages of 16 tokens, 3 KV heads of 64 elements: views of pages that hold more."""
    pool = torch.zeros(3, 2 * 16 * 3 * 64 + 128, dtype=dtype)
    both = pool[:, : 2 * 16 * 3 * 64].unflatten(1, (2, 16, 3, 64))
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_is_not_finite_hurts_nobody(dtype: str) -> None:
    """Values that are not are 0, and their keys NaN; the others are stored as they are, those of fp8 rounded."""
    kv_dtype: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(3)
    fused = (300 * torch.randn(5, 7, 64, generator=generator)).to(torch.bfloat16)
    k, v = fused[:, 1:4], fused[:, 4:]
    v[1, 2, 5], v[3, 0, 0], k[4, 1, 1] = torch.nan, torch.inf, torch.nan
    found, expected = pages_of(kv_dtype), pages_of(kv_dtype)
    write_pages(k, v, *found, SLOTS)
    write_reference(k, v, *expected, SLOTS)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.float().nan_to_num(12345.0), other.float().nan_to_num(12345.0))
    page, place = SLOTS // 16, SLOTS % 16
    values = found[1].float()[page, place]
    assert values.isfinite().all() and values[1, 2, 5] == 0
    assert found[0].float()[page, place][1, 2].isnan().all() and found[0].float()[page, place][1, 1].isfinite().all()


@pytest.mark.parametrize("with_lse", [False, True])
def test_sinks_take_weight_away(with_lse: bool) -> None:
    """Out becomes out * sum / (sum + exp(sink)); a row that saw nothing stays 0."""
    generator = torch.Generator().manual_seed(5)
    out, sums, sinks = (torch.randn(shape, generator=generator) for shape in ((4, 3, 64), (4, 3), (3,)))
    sums, sinks = 30 * sums, 30 * sinks
    sums[2, 1], out[2, 1] = -torch.inf, 0.0
    expected = out * torch.sigmoid(sums - sinks).unsqueeze(-1)
    lse = torch.zeros(6, 3, 2)[:4, :, 0] if with_lse else None
    apply_sinks(out, sums, sinks, lse)
    torch.testing.assert_close(out, expected)
    if lse is not None:
        torch.testing.assert_close(lse, torch.logaddexp(sums, sinks))


CHILD = """
import inspect, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine_flashinfer.write import _write
arguments = list(inspect.signature(_write.fn).parameters)
for heads, size, fp8 in ((8, 128, False), (4, 256, False), (16, 128, True), (1, 64, True)):
    powers = {"HEADS_POWER": triton.next_power_of_2(heads), "SIZE_POWER": size}
    constants = {"HEADS": heads, "SIZE": size, "PER_BLOCK": 16, "FP8": fp8, **powers}
    kinds = dict.fromkeys(("kv", "pages"), ("*u8" if fp8 else "*bf16",) * 2) | {"slots": "*i64"}
    kinds |= dict.fromkeys(("k_strides", "v_strides", "page_strides"), ("i32",) * 2)
    signature = {each: "constexpr" if each in constants else kinds[each] for each in arguments}
    pairs = [(arguments.index(each), at) for each, kind in kinds.items() if isinstance(kind, tuple) for at in (0, 1)]
    attrs = dict.fromkeys([(arguments.index("slots"),), *pairs], [["tt.divisibility", 16]])
    for architecture in (80, 90, 100):
        source = ASTSource(fn=_write, signature=signature, constexprs=constants, attrs=attrs)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        text = made.asm["ptx"]
        wide = [line for line in text.splitlines() if "st.global" in line]
        assert heads == 1 or all(".v4.b32" in line or ".v2.b32" in line for line in wide), wide
        assert ".local" not in text
from engine_flashinfer.sinks import _sinks
arguments = list(inspect.signature(_sinks.fn).parameters)
for heads, size in ((64, 64), (20, 128), (8, 256)):
    constants = {"HEADS": heads, "SIZE": size, "HEADS_POWER": triton.next_power_of_2(heads), "SIZE_POWER": size}
    constants["WITH_LSE"] = True
    kinds = {"out": "*bf16", **dict.fromkeys(("sums", "sinks", "lse"), "*fp32")}
    attrs = {(arguments.index(each),): [["tt.divisibility", 16]] for each in kinds}
    kinds["lse_strides"] = ("i32", "i32")
    signature = {each: "constexpr" if each in constants else kinds[each] for each in arguments}
    for architecture in (80, 90, 100):
        source = ASTSource(fn=_sinks, signature=signature, constexprs=constants, attrs=attrs)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert ".local" not in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]
"""


@pytest.mark.slow
def test_they_compile_and_store_many_bytes_at_once() -> None:
    assert "slots" in inspect.signature(_write.fn).parameters
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", CHILD]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
