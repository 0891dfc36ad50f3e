"""The attention kernels compile for GPUs that are not there, within their registers and shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from attention_compiled import attention, plan, rotated_write, write
from compiled import Case, Compiled, compile_all

SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes that one program may have."""
A_FEW = 64
"""Bytes of spilled registers that do no harm: they are read once a tile at most, beside thousands of products."""


ON_BLACKWELL = 256
"""The same where Hopper's tiles are compiled for a B200, which has none of its own yet."""


def compiled(cases: list[Case]) -> list[Compiled]:
    """Within shared memory, and with next to no register in memory."""
    found = compile_all(cases)
    for case, use in zip(cases, found, strict=True):
        most = ON_BLACKWELL if case.target == "sm_100" else A_FEW
        assert use.shared <= SHARED[case.target] and use.spilled <= most, (case.target, case.constexprs, use[:3])
    return found


def test_what_serves_most_models():
    """Llama-3.1-8B's: tensor cores, and loads of 16 bytes that run ahead of the products by two tiles."""
    cases = [attention("sm_90", one=True), attention("sm_90", long=True), attention("gfx942", one=True)]
    cases += [plan("sm_90"), plan("sm_90", queries=1, ones=True)]
    cases += [kernel("sm_90", **how) for kernel in (write, rotated_write) for how in ({}, {"kv": "fp8e4nv"})]
    decode, prefill, rocm = compiled([*cases, rotated_write("sm_90", norm=False)])[:3]
    assert "wgmma.mma_async" in prefill.assembly and "mma.sync" in decode.assembly and "v_mfma" in rocm.assembly
    for use in (decode, prefill):
        assert use.spilled == 0
        assert use.assembly.count("cp.async.cg.shared.global") >= 48, "keys and values are not loaded ahead"
        assert "cp.async.wait_group \t2" in use.assembly or "cp.async.wait_group 2" in use.assembly
    tile = 2 * 64 * 128 * 2
    assert decode.shared >= 2 * tile and 227 * 1024 // decode.shared >= 2, "not two programs of two tiles each"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("size", [32, 64, 80, 96, 112, 128, 256])
def test_every_head_size(size, target):
    cases = [attention(target, size, one=True), attention(target, size), attention(target, size, long=True)]
    cases += [attention(target, size, long=True, features="window cap"), write(target, size=size)]
    if target != "sm_80":
        cases += [attention(target, size, kv="fp8e4nv", one=True), attention(target, size, kv="fp8e4nv", long=True)]
        cases.append(write(target, kv="fp8e4nv", size=size))
    compiled(cases)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_form_of_layer(target):
    everything = "window cap sinks alibi lse"
    cases = [
        attention(target, dtype=dtype, group=group, **how)
        for dtype in ("bf16", "fp16", "fp32")
        for group, how in (
            (1, {"one": True}), (1, {"long": True}), (7, {}), (8, {}), (16, {}), (71, {"one": True}),
            (4, {"one": True, "features": everything}), (4, {"page": 64}), (4, {"page": 7, "long": True}),
            (4, {"features": "window sinks lse", "size": 64, "long": True}),
            (4, {"features": "tree window"}), (4, {"features": "tree", "long": True}),
            (1, {"encoder": True, "size": 64, "long": True}), (1, {"encoder": True, "size": 64}),
        )
    ]  # fmt: skip
    cases += [plan(target), plan(target, tree=True), rotated_write(target), rotated_write(target, half=16)]
    cases += [rotated_write(target, "fp32", "bf16", norm=False, half=32)]
    compiled([*cases, plan(target, cached=False, queries=128, ones=True), write(target, "fp16", "fp16")])
