"""The tool that compiles kernels for GPUs that are not there."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, compile_all, compile_for
from compiled_examples import product, wrong

TYPES = {"x": "*bf16", "y": "*bf16", "out": "*fp32", "inner": "i32"}


def test_compiled_kernels_tell_what_they_take():
    """Code for each target, with loads of 16 bytes where the arguments allow them; spilled registers are seen."""
    one = Case(product, TYPES, {"SIZE": 64}, multiples_of_16=["inner"])
    ampere, hopper, rocm, large = compile_all(
        [
            replace(one, target="sm_80"),
            one,
            replace(one, target="gfx942"),
            replace(one, constexprs={"SIZE": 128}, target="sm_80", num_warps=1, num_stages=1),
        ]
    )
    assert "mma.sync" in ampere.assembly and "wgmma" in hopper.assembly and "v_mfma" in rocm.assembly
    assert "cp.async.cg.shared.global" in ampere.assembly
    for found in (ampere, hopper, rocm):
        assert 16 < found.registers <= 255 and found.spilled == 0 and found.shared >= 2 * 64 * 64 * 2
    assert large.spilled > 0


def test_a_kernel_that_does_not_compile_is_told_with_the_compilers_words():
    """And one whose arguments are not all given."""
    with pytest.raises(AssertionError, match="wrong for sm_90 with"):
        compile_for(wrong, {"x": "*i32"}, {"SIZE": 64})
    with pytest.raises(AssertionError, match=r"\['inner'\] are not as it takes"):
        compile_for(product, {key: TYPES[key] for key in ("x", "y", "out")}, {"SIZE": 64})
