"""The native operations against the reference driver in float64, at every level of processor features."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.ops import OpsNeed
from engine.types.errors import ConfigError
from engine_reference.ops_torch.ops import TorchOpsBody

card = pytest.importorskip("engine_cpu.ops_cpu.card", reason="engine-cpu is not installed")

REFERENCE = TorchOpsBody(None)  # type: ignore[arg-type]
LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16")
DTYPES = (torch.float32, torch.bfloat16)
DTYPE_NUMBERS = {torch.float32: 1, torch.bfloat16: 2}
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Relative to the terms of a sum for `linear`; bfloat16 is 8 bits, and norms are rounded twice."""


@pytest.fixture(scope="module", params=LEVELS)
def ops(request: pytest.FixtureRequest) -> Any:
    """The driver, forced to one level; skipped where the processor has not got it."""
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    if request.param not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {request.param}")
    return driver(request.param)


def driver(level: str) -> Any:
    from engine_cpu.ops_cpu.body import CpuOpsBody

    return CpuOpsBody(SimpleNamespace(options=card.CpuOpsOptions(level=level)))  # type: ignore[arg-type]


def random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | float = 1.0) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    error = (found.double() - expected).abs() - TOLERANCE[dtype] * (expected.abs() + scale)
    assert error.numel() == 0 or error.max() <= 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: Any, dtype: torch.dtype, bias: bool) -> None:
    """Rows for every tile, and several; widths that fill no register, outputs that fill no panel."""
    for outputs, inputs in ((1, 1), (5, 0), (3, 31), (37, 96), (130, 257), (64, 1024)):
        weight = random(outputs, inputs, dtype=dtype, seed=1)
        added = random(outputs, dtype=dtype, seed=2) if bias else None
        packed = ops.pack_linear(weight, added)
        for rows in (0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 23, 24, 70):
            x = random(rows, inputs, dtype=dtype, seed=3)
            wide = x.double(), weight.double(), None if added is None else added.double()
            expected = REFERENCE.linear(wide[0], REFERENCE.pack_linear(wide[1], wide[2]))
            scale = (wide[0].abs() @ wide[1].abs().T) if rows else 1.0
            scale = scale * (2**-8 if dtype == torch.bfloat16 else 1.0)  # sums in float32, rounded once
            check(ops.linear(x, packed), expected, dtype, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(ops: Any, dtype: torch.dtype) -> None:
    """Bit by bit, also where there are so many rows that they are taken in chunks."""
    packed = ops.pack_linear(random(45, 203, dtype=dtype), None)
    x = random(16, 203, dtype=dtype, seed=1)
    whole = ops.linear(x, packed)
    for rows in range(1, 16):
        assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(ops.linear(x[rows:], packed), whole[rows:])
    packed, x = ops.pack_linear(random(300, 31, dtype=dtype), None), random(2, 31, dtype=dtype, seed=1)  # 10 panels
    assert torch.equal(ops.linear(x[:1], packed), ops.linear(x, packed)[:1])
    packed, x = ops.pack_linear(random(33, 4095, dtype=dtype), None), random(200, 4095, dtype=dtype, seed=1)
    whole = ops.linear(x, packed)
    for row in (0, 11, 12, 47, 48, 99, 191, 192, 199):
        assert torch.equal(ops.linear(x[row : row + 1], packed), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_of_a_view(ops: Any, dtype: torch.dtype) -> None:
    """Some columns of a wider tensor, and a transposed one."""
    packed, wide = ops.pack_linear(random(9, 40, dtype=dtype), None), random(5, 100, dtype=dtype, seed=1)
    assert torch.equal(ops.linear(wide[:, 30:70], packed), ops.linear(wide[:, 30:70].contiguous(), packed))
    turned = random(40, 5, dtype=dtype, seed=2).T
    check(ops.linear(turned, packed), ops.linear(turned.contiguous(), packed).double(), dtype)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(ops: Any, threads: int) -> None:
    """Pieces are computed by whoever comes first."""
    weight, x = random(3000, 512, dtype=torch.float32), random(3, 512, dtype=torch.float32, seed=1)
    gate_up = random(200, 600, dtype=torch.float32, seed=2)
    before = torch.get_num_threads()
    expected = ops.linear(x, ops.pack_linear(weight, None)), ops.silu_mul(gate_up)
    torch.set_num_threads(threads)
    try:
        for level in LEVELS:
            try:
                several = driver(level)
            except ConfigError:
                continue
            found = several.linear(x, several.pack_linear(weight, None))
            torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(several.silu_mul(gate_up), expected[1], rtol=1e-5, atol=1e-6)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(ops: Any, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """Of one row, which takes two panels at once where they are many, an odd one last, and of several rows."""
    x, before = random(30, 66, dtype=dtype, seed=1), torch.get_num_threads()
    try:
        for outputs in (96, 416, 900):
            weight = random(outputs, 66, dtype=dtype)
            whole = ops.linear(x, ops.pack_linear(weight, None))
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                several = driver(request.node.callspec.params["ops"])
                packed = several.pack_linear(weight, None)
                assert torch.equal(several.linear(x[:1], packed), whole[:1])
                assert torch.equal(several.linear(x, packed), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 31, 64, 96, 1000])
def test_norms(ops: Any, dtype: torch.dtype, size: int) -> None:
    x, residual = random(7, size, dtype=dtype, scale=3), random(7, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    check(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    heads = random(7, 5, size, dtype=dtype, seed=3)[:, 1:4]  # as queries are cut out of a projection
    check(ops.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads.double(), weight.double(), 1e-6), dtype)
    turned = random(size, 7, dtype=dtype, seed=4).T
    check(ops.rms_norm(turned, weight, 1e-5), REFERENCE.rms_norm(turned.double(), weight.double(), 1e-5), dtype)
    total = x + residual
    normed, added = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(added, total)
    check(normed, REFERENCE.rms_norm(total.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (48, 16), (6, 6)])
def test_rope(ops: Any, dtype: torch.dtype, size: int, rotary: int) -> None:
    """Of views into one projection, as models call it, and of a dense tensor whose last dimension is not."""
    angles = torch.rand(50, rotary // 2, generator=torch.Generator().manual_seed(0)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 49, 7, 7, 30])
    both = random(5, 6, size, dtype=dtype)
    expected = REFERENCE.rope(both[:, :4].double(), both[:, 4:].double(), positions, cos_sin.double())
    rest = both.clone()
    q, k = ops.rope(both[:, :4], both[:, 4:], positions, cos_sin)
    check(q, expected[0], dtype)
    check(k, expected[1], dtype)
    assert torch.equal(q[..., rotary:], rest[:, :4, rotary:])
    turned = random(5, size, 2, dtype=dtype, seed=1).transpose(1, 2)
    expected = REFERENCE.rope(turned.double(), turned.double(), positions, cos_sin.double())
    check(ops.rope(turned.clone(), turned, positions, cos_sin)[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(ops: Any, dtype: torch.dtype) -> None:
    """Over the whole range of the exponential, and where it would leave it."""
    gate = torch.cat((torch.linspace(-120, 120, 4001), torch.tensor([-1e30, 1e30, 0.0, -0.0]))).to(dtype)
    up = random(len(gate), dtype=dtype)
    found = ops.silu_mul(torch.stack((torch.cat((gate, up)), torch.cat((up, gate)))))
    expected = REFERENCE.silu_mul(torch.stack((torch.cat((gate, up)), torch.cat((up, gate)))).double())
    check(found, expected, dtype, 1e-3)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 30), outputs=st.integers(1, 40), inputs=st.integers(1, 140), seed=st.integers(0, 9))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_of_any_shape(dtype: torch.dtype, rows: int, outputs: int, inputs: int, seed: int) -> None:
    """Whole numbers: every order of adding gives the same, exactly. No element beside the output is touched."""
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (rows, inputs), generator=generator).to(dtype)
    weight = torch.randint(-3, 4, (outputs, inputs), generator=generator).to(dtype)
    expected = (x.double() @ weight.double().T).to(dtype)
    for level in native.levels():
        linear = driver(level)._linear
        packed = linear.pack(str(dtype).removeprefix("torch."), weight, None)
        out = torch.full((rows + 2, outputs), -7777, dtype=dtype)
        scratch = torch.full((packed.layout.scratch_bytes(rows) + 64,), 77, dtype=torch.uint8)
        linear._ops.linear(
            packed.layout, DTYPE_NUMBERS[dtype], x.data_ptr(), inputs, rows, packed.weight.data_ptr(), 0, 0,
            out[1:].data_ptr(), outputs, scratch.data_ptr(),
        )  # fmt: skip
        assert torch.equal(out[1:-1], expected), level
        assert (out[0] == out[-1]).all() and out[0, 0] == torch.tensor(-7777, dtype=dtype)
        assert (scratch[-64:] == 77).all()


def test_weights_lie_side_by_side_on_huge_pages() -> None:
    """So far as the system has them; each piece is its own, and a block goes with the last of its pieces."""
    packed = pytest.importorskip("engine_cpu.packed", reason="engine_cpu's native module is not built")
    memory = packed.Memory()
    sizes = (300 << 10, 3 << 20, 100 << 20, 1000, (300 << 10) + 1, 40 << 20, 40 << 20)
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece[:: 1 << 10] = number
        piece[-1] = number
    assert [len(piece) for piece in pieces] == list(sizes)
    assert all((piece[:: 1 << 10] == number).all() and piece[-1] == number for number, piece in enumerate(pieces))
    block = pieces[0].untyped_storage().data_ptr()
    shared = [number for number, piece in enumerate(pieces) if piece.untyped_storage().data_ptr() == block]
    assert shared == [0, 1, 4, 5]
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        return
    assert all("hg" in flags_at(piece.data_ptr()) for piece in pieces if len(piece) > 1000)
    address = pieces[2].data_ptr()
    del pieces, piece
    assert "hg" not in flags_at(address)


def flags_at(address: int) -> list[str]:
    """What the system says of the memory there (proc(5), VmFlags); nothing where there is none."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if first.count("-") == 1 and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    return []


def test_freed_memory_is_kept_for_the_next_step() -> None:
    """In a process of its own, which stays as it was told: blocks of 16 MiB come and go without a page fault."""
    program = """
import platform, resource
from engine_cpu._native import keep_freed_memory
import torch
assert keep_freed_memory() is (platform.libc_ver()[0] == "glibc")
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        blocks = [torch.ones(4 << 20, dtype=torch.float32) for _ in range(4)]
        del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    if platform.libc_ver()[0] != "glibc" or "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("only GNU's C library lets itself be told")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 100, "of 65,536 that there are when memory is given back each time"


def test_card(ops: Any) -> None:
    need = OpsNeed(operation="linear", dtype="bfloat16", device="cpu")
    from engine_cpu._native import levels

    assert card.CpuOps.unsupported(need) == [] or levels() == ["scalar"]
    reasons = card.CpuOps.unsupported(OpsNeed(operation="reject", dtype="float64", device="cuda"))
    for word, reason in zip(("reject", "cuda", "float64"), reasons[-3:], strict=True):
        assert word in reason


def test_a_level_that_is_not_there() -> None:
    native = pytest.importorskip("engine_cpu._native", reason="engine_cpu's native module is not built")
    missing = [level for level in LEVELS if level not in native.levels()]
    for level in missing:
        with pytest.raises(ConfigError, match=level):
            driver(level)
    with pytest.raises(ValueError, match="level"):
        card.CpuOpsOptions(level="mmx")
