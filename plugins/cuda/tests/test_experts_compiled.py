"""The kernels of mixtures of experts compiled for GPUs that are not there, at the sizes of models: none spills."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compiled import Case, Compiled, compile_all

from engine_cuda.ops_triton import expert_kernels, experts, routing
from engine_cuda.ops_triton.launching import power_of_2

BF16, I32, F32 = "*bf16", "*i32", "*fp32"
MODELS = {
    # experts, chosen, hidden and inner size, what stands between, biases
    "qwen3-30b": (128, 8, 2048, 768, "silu", False),
    "mixtral": (8, 2, 4096, 14336, "silu", False),
    "gpt-oss": (32, 4, 2880, 2880, "clamped", True),
    "nemotron": (128, 6, 2688, 1856, "relu2", False),
}
TOKENS = (16, 256, 1024, 4096)
"""Of steps whose pairs are sorted."""


def products(model: str, tokens: int, dtype: str = BF16, target: str = "sm_90") -> dict[str, Case]:
    """The two products of sorted pairs."""
    count, chosen, hidden, inner, kind, bias = MODELS[model]
    gated, pairs = kind != "relu2", tokens * chosen
    tile = experts.tile_of(pairs, count, 4 if dtype == F32 else 2, target == "sm_90")
    biases = ({"bias": dtype}, {}) if bias else ({}, {"bias": None})
    types = {"x": dtype, "weight": dtype, "order": I32, "starts": I32, "out": dtype, "blocks": "i32"}
    sizes = {"EXPERTS": count, "PADDED": power_of_2(count), "ROWS": tile.rows, "WIDTH": tile.width, "GROUP": 8}
    more = {"num_warps": tile.warps, "num_stages": tile.stages}
    return {
        f"first, {model}, {tokens}": Case(
            expert_kernels.first_kernel,
            {**types, **biases[0], "x_stride": "i32", "alpha": "fp32", "limit": "fp32"},
            {**sizes, **biases[1], "TOP_K": chosen, "INPUTS": hidden, "INNER": inner, "KIND": kind, "GATED": gated,
             "OUTPUTS": tile.outputs // (1 + gated)},
            multiples_of_16=["x_stride"], **more,
        ),
        f"last, {model}, {tokens}": Case(
            expert_kernels.last_kernel, {**types, **biases[0]},
            {**sizes, **biases[1], "INPUTS": inner, "SIZE": hidden, "OUTPUTS": tile.outputs}, **more,
        ),
    }  # fmt: skip


def others(model: str) -> dict[str, Case]:
    """Of few pairs, and what stands before and behind the products."""
    _, chosen, hidden, inner, kind, bias = MODELS[model]
    gated, padded = kind != "relu2", power_of_2(chosen)
    biases = ({"bias": BF16}, {}) if bias else ({}, {"bias": None})
    first, last = experts.few_first_blocks(hidden, gated), experts.few_last_blocks(inner, padded)
    act = {"alpha": "fp32", "limit": "fp32"}
    return {
        f"few first, {model}": Case(
            expert_kernels.few_first_kernel,
            {"x": BF16, "weight": BF16, **biases[0], "ids": I32, "out": BF16, "x_stride": "i32", "inner": "i32",
             "experts": "i32", **act},
            {**biases[1], "TOP_K": chosen, "INPUTS": hidden, "KIND": kind, "GATED": gated, "OUTPUTS": first[0],
             "WIDTH": first[1]},
            multiples_of_16=["x_stride", "inner"],
        ),
        f"few last, {model}": Case(
            expert_kernels.few_last_kernel,
            {"x": BF16, "weight": BF16, **biases[0], "ids": I32, "by": F32, "out": BF16, "outputs": "i32",
             "experts": "i32"},
            {**biases[1], "TOP_K": chosen, "PADDED_K": padded, "INPUTS": inner, "OUTPUTS": last[0], "WIDTH": last[1]},
            multiples_of_16=["outputs"],
        ),
        f"combine, {model}": Case(
            expert_kernels.combine_kernel,
            {"terms": BF16, "by": F32, "ids": I32, "out": BF16, "width": "i32", "experts": "i32"},
            {"TOP_K": chosen, "BLOCK": experts.BLOCK}, multiples_of_16=["width"],
        ),
        f"gated act, {model}": Case(
            expert_kernels.gated_act_kernel, {"x": BF16, "out": BF16, "row_stride": "i32", "inner": "i32", **act},
            {"KIND": kind, "GATED": gated, "BLOCK": experts.BLOCK}, multiples_of_16=["row_stride", "inner"],
        ),
    }  # fmt: skip


ROUTES = {
    "sort": Case(
        expert_kernels.sort_kernel, {"ids": I32, "order": I32, "starts": I32, "pairs": "i32"},
        {"BLOCK": experts.SORTED}, num_warps=8,
    ),
    "place": Case(
        expert_kernels.place_kernel,
        {"ids": I32, "table": I32, "load": "*i64", "out": I32, "first": "i32", "pairs": "i32", "count": "i32"},
        {"TOP_K": 8, "REPLICAS": 4, "BLOCK": experts.PLACED},
    ),
    "row gate": Case(
        expert_kernels.row_gate_kernel,
        {"x": BF16, "gate": BF16, "out": BF16, "x_stride": "i32", "gate_stride": "i32", "width": "i32"},
        {"BLOCK": experts.BLOCK}, multiples_of_16=["x_stride", "width"],
    ),
    "router": Case(
        routing.router_logits_kernel, {"x": BF16, "weight": F32, "out": F32, "x_stride": "i32", "experts": "i32"},
        {"INPUTS": 2048, "EACH": routing.EACH, "WIDTH": routing.WIDTH}, multiples_of_16=["x_stride", "experts"],
    ),
    **{
        f"route, {name}": Case(
            routing.route_kernel,
            {"logits": F32, "ids": I32, "weights": F32, "scale": "fp32", "jitter": "fp32", "bias": bias}
            if bias else {"logits": F32, "ids": I32, "weights": F32, "scale": "fp32", "jitter": "fp32"},
            {**({} if bias else {"bias": None}), "EXPERTS": count, "TOP_K": chosen, "PADDED_K": power_of_2(chosen),
             "SIGMOID": sigmoid, "RENORMALISE": True, "GROUPS": groups, "PADDED_GROUPS": groups,
             "PADDED_SIZE": power_of_2(count // groups), "TOP_GROUPS": 4 if groups > 1 else 1, "PAIRS": groups > 1,
             "ONE_BY_ONE": jitter, "BIASED_LOGITS": False},
            num_warps=1,
        )
        for name, count, chosen, sigmoid, groups, bias, jitter in (
            ("qwen3-30b", 128, 8, False, 1, None, False),
            ("deepseek-v3", 256, 8, True, 8, F32, False),
            ("phi-3.5", 16, 2, False, 1, None, True),
        )
    },
}  # fmt: skip


def check(cases: dict[str, Case], target: str = "sm_90") -> dict[str, Compiled]:
    """None has a register in memory; all are launched as dependents where a GPU can."""
    depend = {"DEPENDENT": target == "sm_90"}
    made = [replace(case, target=target, constexprs={**case.constexprs, **depend}) for case in cases.values()]
    found = dict(zip(cases, compile_all(made), strict=True))
    spilled = {name: (use.registers, use.spilled) for name, use in found.items() if use.spilled}
    assert not spilled, f"registers, and bytes of them in memory: {spilled}"
    return found


def test_products_of_sorted_pairs() -> None:
    """Tensor cores, and a tile's inputs in shared memory while others are multiplied; what an H100 has."""
    for tokens, product in ((16, "mma.sync"), (4096, "wgmma")):
        for name, use in check(products("qwen3-30b", tokens)).items():
            assert "griddepcontrol.wait" in use.assembly
            assert product in use.assembly and "cp.async.cg" in use.assembly and use.shared <= 232_448, name


def test_few_pairs() -> None:
    """Matrices are read by 16 bytes a thread."""
    for name, use in check(others("qwen3-30b")).items():
        wide = re.findall(r"ld\.global\S*\.v4\.(?:b32|u32|f32)", use.assembly)
        assert len(wide) >= (4 if name.startswith("few") else 1), name


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_every_kernel(target: str) -> None:
    """Compiles, and spills nothing: every model, numbers of tokens, float32 too."""
    cases = dict(ROUTES)
    for model in MODELS:
        cases |= others(model)
        for tokens in TOKENS:
            cases |= products(model, tokens, target=target)
    for tokens in (16, 4096):
        cases |= {f"{name}, float32": case for name, case in products("qwen3-30b", tokens, F32, target).items()}
    most = {"sm_80": 99 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}[target]
    assert all(use.shared <= most for use in check(cases, target).values())
