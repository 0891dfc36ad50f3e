"""The operations' kernels compiled for GPUs that are not there, as launches of a real model would have them: none
spills a register."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, compile_all

from engine_cuda.ops_triton import (
    activations,
    blocks,
    candidates,
    inputs,
    logits,
    logprobs,
    norms,
    rotary,
    rows,
    sampling,
    states,
)

I32, I64, F32 = "*i32", "*i64", "*fp32"
HEADS_OF_QK = {
    "qk": ("*bf16", "*bf16"), "positions": I64, "cos_sin": F32, "heads": ("i32", "i32"), "q_strides": ("i32", "i32"),
    "k_strides": ("i32", "i32"), "q_programs": "i32",
}  # fmt: skip

LAYERS = {
    "gather": Case(
        rows.gather_kernel,
        {"index": I32, "rows": "*bf16", "out": "*bf16", "first": "i32", "count": "i32", "width": "i32",
         "row_stride": "i32"},
        {"BLOCK": 2048}, multiples_of_16=["width", "row_stride"],
    ),
    "rms_norm": Case(
        norms.rms_norm_kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "rows": "i32", "inner_rows": "i32",
         "x_strides": ("i32", "i32"), "eps": "fp32"},
        {"SIZE": 128, "ROWS": 16, "BLOCK": 128, "DEPENDENT": True}, multiples_of_16=["inner_rows", "x_strides"],
    ),
    "add_rms_norm": Case(
        norms.add_rms_norm_kernel,
        {"inputs": ("*bf16", "*bf16"), "weight": "*bf16", "outputs": ("*bf16", "*bf16"), "rows": "i32",
         "strides": ("i32", "i32"), "eps": "fp32"},
        {"SIZE": 4096, "ROWS": 1, "BLOCK": 4096, "DEPENDENT": True}, num_warps=8, multiples_of_16=["strides"],
    ),
    "layer_norm": Case(
        norms.layer_norm_kernel,
        {"x": "*fp16", "weight": "*fp16", "bias": "*fp16", "out": "*fp16", "rows": "i32", "eps": "fp32"},
        {"SIZE": 768, "ROWS": 2, "BLOCK": 1024},
    ),
    "rope": Case(
        rotary.rope_kernel,
        HEADS_OF_QK, {"HALF": 64, "BLOCK": 64, "HEADS": rotary.HEADS, "DEPENDENT": True}, num_warps=2,
        multiples_of_16=["q_strides", "k_strides"],
    ),
    "qk_norm_rope": Case(
        rotary.qk_norm_rope_kernel,
        {**HEADS_OF_QK, "weights": ("*bf16", "*bf16"), "eps": "fp32"},
        {"SIZE": 128, "HALF": 64, "BLOCK": 64, "REST": 1, "HEADS": rotary.HEADS, "DEPENDENT": True}, num_warps=2,
        multiples_of_16=["q_strides", "k_strides"],
    ),
    "silu_mul": Case(
        activations.silu_mul_kernel,
        {"x": "*bf16", "out": "*bf16", "row_stride": "i32", "inner": "i32"},
        {"BLOCK": activations.BLOCK, "DEPENDENT": True},
        multiples_of_16=["row_stride", "inner"],
    ),
    "gelu": Case(
        activations.gelu_kernel,
        {"x": "*bf16", "out": "*bf16", "count": "i32"}, {"TANH": True, "BLOCK": activations.BLOCK},
        multiples_of_16=["count"],
    ),
    "soft_cap": Case(
        activations.soft_cap_kernel,
        {"x": "*bf16", "out": "*bf16", "count": "i32", "cap": "fp32"}, {"BLOCK": activations.BLOCK},
        multiples_of_16=["count"],
    ),
}  # fmt: skip
STEPS = {
    "prepare": Case(
        inputs.prepare_kernel,
        {"tokens": I32, "token_stride": "i32", "tables": (I32, I32), "table_strides": ("i32", "i32"),
         "widths": ("i32", "i32"), "sizes": ("i32", "i32"), "rows": (I32, I32, I32, I32), "inputs": (I32, I64),
         "block_tables": (I32, I32),
         "row_strides": ("i32", "i32"), "slot_mappings": (I64, I64), "num_rows": "i32", "num_tokens": "i32",
         "token_programs": "i32", "chunks": "i32", "steps": "i32"},
        {"TABLES": 2, "SINGLE": False, "NULL": 0, "TOKENS": inputs.TOKENS, "ENTRIES": inputs.ENTRIES},
    ),
    "check": Case(
        logits.check_kernel,
        {"logits": "*bf16", "out": F32, "broken": "*i1", "row_stride": "i32", "vocab": "i32"},
        {"WIDEN": True, "BLOCK": logits.BLOCK}, multiples_of_16=["row_stride", "vocab"],
    ),
    "mask_tokens": Case(
        logits.mask_tokens_kernel,
        {"logits": F32, "rows": I64, "tokens": I64, "row_stride": "i32", "count": "i32"}, {"BLOCK": logits.TOKENS},
        multiples_of_16=["row_stride"],
    ),
    "bitmask": Case(
        logits.bitmask_kernel,
        {"logits": F32, "rows": I64, "bits": I32, "left": I32, "row_stride": "i32", "words": "i32", "vocab": "i32"},
        {"WORDS": logits.WORDS}, multiples_of_16=["row_stride", "vocab"],
    ),
    "stuck": Case(
        logits.stuck_kernel,
        {"logits": F32, "rows": I64, "bits": I32, "left": I32, "row_stride": "i32", "words": "i32", "vocab": "i32"},
        {"WORDS": logits.WORDS}, multiples_of_16=["row_stride", "vocab"],
    ),
    "count": Case(
        logits.count_kernel,
        {"counts": I32, "tokens": I32, "token_stride": "i32", "length": "i32", "num_prompt": I32, "num_tokens": I32,
         "vocab": "i32"},
        {"TOKENS": logits.TOKENS}, multiples_of_16=["vocab"],
    ),
    "penalise": Case(
        logits.penalise_kernel,
        {"logits": F32, "rows": I64, "row_stride": "i32", "counts": I32, "tokens": I32, "token_stride": "i32",
         "length": "i32", "num_tokens": I32, "penalties": (F32, F32, F32), "vocab": "i32"},
        {"TOKENS": logits.TOKENS}, multiples_of_16=["row_stride", "vocab"],
    ),
    "place": Case(
        logits.place_kernel,
        {"tokens": I32, "broken": "*i1", "table": I32, "slots": I64, "places": I64, "told": I32,
         "table_stride": "i32", "count": "i32"},
        {"BROKEN": -1, "BLOCK": logits.TOKENS},
    ),
}  # fmt: skip
PLACES = {
    "places": (F32, I64, I32, I64, F32, I64), "strides": ("i32", "i32"), "counts": ("i32", "i32"),
    "out": "*bf16",
}  # fmt: skip
BF16 = "*bf16"
SCANS = {
    f"{name}{', decodes' if decodes else ''}": Case(kernel, signature, {**sizes, "DECODES": decodes})
    for decodes in (False, True)
    for name, kernel, signature, sizes in (
        ("causal_conv", states.causal_conv_kernel,
         {"x": BF16, "weight": BF16, "bias": BF16, "out": BF16, "places": (BF16, I64, I32, I64, I64), "after": BF16,
          "strides": ("i32", "i32"), "rows": "i32", "tokens": "i32", "channels": "i32", "weight_stride": "i32"},
         {"KERNEL": 4, "BIAS": True, "BLOCK_C": states.CHANNELS}),
        ("ssd", states.ssd_kernel,
         {**PLACES, "x": BF16, "dt": BF16, "b": BF16, "c": BF16, "numbers": (F32, F32, F32),
          "token_strides": ("i32",) * 4, "heads": "i32", "per_group": "i32", "dt_low": "fp32", "dt_high": "fp32"},
         {"SIZE": 64, "STATE": 128, "BLOCK_N": 128, "BLOCK_P": states.COLUMNS}),
        ("selective_scan", states.selective_scan_kernel,
         {**PLACES, "x": BF16, "dt": BF16, "b": BF16, "c": BF16, "gate": BF16, "numbers": (F32, F32),
          "token_strides": ("i32",) * 5, "channels": "i32"},
         {"STATE": 16, "BLOCK_N": 16, "BLOCK_C": 4 * states.COLUMNS}),
        ("gated_delta", states.gated_delta_kernel,
         {**PLACES, "q": BF16, "k": BF16, "v": BF16, "dt": BF16, "beta": BF16, "numbers": (F32, F32),
          "token_strides": ("i32",) * 5, "heads": "i32", "per_key": "i32", "scale": "fp32"},
         {"KEY": 128, "VALUE": 128, "BLOCK_K": 128, "BLOCK_V": states.COLUMNS}),
    )
}  # fmt: skip
WIDE = {"SHIFT": blocks.shift_of(151_936), "PADDED": 256, "BLOCK": blocks.BLOCK}
FIRST_PASS = (F32, I64, I32)
ROW = {"logits": F32, "row_stride": "i32", "vocab": "i32", "num_blocks": "i32"}
DRAW = {**ROW, "first_pass": FIRST_PASS, "candidates": (F32, I32)}
SPOILT = (*FIRST_PASS, "*i1")
FILTERS = (F32, I32, F32, F32)
PICK = {"CAPACITY": candidates.CAPACITY, "TILE": sampling.TILE, **WIDE}
DRAWS = {
    "blocks": Case(
        blocks.blocks_kernel, {**ROW, "logits": BF16, "first_pass": SPOILT, "temperature": F32},
        {"SHIFT": WIDE["SHIFT"], "EACH": blocks.EACH, "BLOCK": blocks.BLOCK}, multiples_of_16=["row_stride", "vocab"],
    ),
    "candidates": Case(
        candidates.candidates_kernel, {**DRAW, "logits": BF16, "filters": FILTERS},
        {**WIDE, "EACH": blocks.EACH, "CAPACITY": candidates.CAPACITY}, num_warps=candidates.WARPS,
        multiples_of_16=["row_stride", "vocab"],
    ),
    "pick": Case(
        sampling.pick_kernel,
        {**DRAW, "logits": BF16, "first_pass": SPOILT, "rows": (*FILTERS, I64, I64),
         "drafts": ("constexpr", "constexpr", "i32"), "drawn": (I32, "*i1")},
        {**PICK, ("drafts", 0): None, ("drafts", 1): None, "REJECT": False, "PROBS": False},
        num_warps=16, multiples_of_16=["row_stride", "vocab"],
    ),
    "reject": Case(
        sampling.pick_kernel,
        {**DRAW, "first_pass": SPOILT, "rows": (*FILTERS, I64, I64), "drafts": (I32, F32, "i32"),
         "drawn": (I32, "*i1")},
        {**PICK, "REJECT": True, "PROBS": True}, num_warps=16, multiples_of_16=["row_stride", "vocab"],
    ),
    "verify": Case(
        sampling.verify_kernel, {"tokens": I32, "drafts": I32, "start": I64, "counts": I32, "rows": "i32"},
        {"ROWS": sampling.ROWS},
    ),
    "rank": Case(
        logprobs.rank_kernel, {**ROW, "tokens": I32, "peaks": F32, "larger": I32},
        {"EACH": blocks.EACH, "BLOCK": blocks.BLOCK}, multiples_of_16=["row_stride", "vocab"],
    ),
    "logprobs": Case(
        logprobs.logprobs_kernel,
        {**ROW, "tokens": I32, "first_pass": FIRST_PASS, "found": (F32, I32, I32, F32), "k": "i32"},
        WIDE, multiples_of_16=["row_stride", "vocab"],
    ),
}  # fmt: skip
ALL = {**LAYERS, **STEPS, **SCANS, **DRAWS}


def _compile(cases: dict[str, Case], target: str) -> None:
    dependent = {"DEPENDENT": target == "sm_90"}  # others have none
    found = compile_all(
        [
            replace(
                case, target=target, constexprs=case.constexprs | (dependent if "DEPENDENT" in case.constexprs else {})
            )
            for case in cases.values()
        ]
    )
    spilled = {name: use.spilled for name, use in zip(cases, found, strict=True) if use.spilled}
    assert not spilled, f"bytes of registers of each thread in memory: {spilled}"


def test_the_layers_of_a_decode_step():
    """For Hopper; loads and stores of 16 bytes."""
    names = ["add_rms_norm", "rope", "qk_norm_rope", "silu_mul"]
    found = compile_all([LAYERS[name] for name in names])
    for name, use in zip(names, found, strict=True):
        assert use.spilled == 0 and use.registers <= 128, name
        assert "ld.global.v4" in use.assembly and "st.global.v4" in use.assembly, name
        before, waits, _ = use.assembly.partition("griddepcontrol.wait")
        assert waits and "griddepcontrol.launch_dependents" in before, name
        assert "ld.global" not in before and "st.global" not in before, name


def test_scans():
    """A state's columns stay in registers."""
    _compile(SCANS, "sm_90")


def test_the_draw():
    """One program for each row, of 512 threads that have 128 registers each; before it the pass over all logits, 16
    bytes a load."""
    use, first = compile_all([DRAWS["pick"], DRAWS["blocks"]])
    assert use.spilled == 0 and use.registers <= 128
    assert first.spilled == 0 and first.registers <= 128
    assert first.assembly.count("ld.global.v4") == blocks.EACH * blocks.BLOCK // (128 * 8), "not once, or in pieces"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_kernel(target: str):
    """Compiles, and spills nothing."""
    _compile(ALL, target)
