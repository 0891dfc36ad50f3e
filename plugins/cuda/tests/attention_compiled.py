"""The attention kernels as launches on GPUs would compile them, for `test_attention_triton_compiled.py`."""

from __future__ import annotations

from typing import Any

import triton
from compiled import TARGETS, Case

from engine_cuda.attention_triton.items import AT_ONCE, COUNTS, FIELDS, ROWS, plan_kernel
from engine_cuda.attention_triton.kernel import Form, attention_kernel
from engine_cuda.attention_triton.plan import Division
from engine_cuda.attention_triton.tiles import decode_tiles, prefill_tiles, target_of
from engine_cuda.attention_triton.write import rotated_write_kernel, write_kernel
from engine_cuda.ops_triton.rotary import HEADS

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8e4nv": 1}
STRIDES = {
    "out_strides": ("i32",) * 2,
    "lse_strides": ("i32",) * 2,
    "q_strides": ("i32",) * 2,
    "kv_strides": ("i32",) * 5,
    "table_stride": "i32",
}


def target(name: str) -> Any:
    """The tiles' name for a target of `compiled`."""
    kind, arch, _ = TARGETS[name]
    return target_of(divmod(int(arch), 10) if kind == "cuda" else None)


def attention(
    where: str = "sm_90",
    size: int = 128,
    dtype: str = "bf16",
    kv: str | None = None,
    group: int = 4,
    long: bool = False,
    one: bool = False,
    page: int = 16,
    features: str = "",
    encoder: bool = False,
) -> Case:
    """features: of "window", "cap", "sinks", "alibi", "lse" and "tree", in one text."""
    kv = kv or dtype
    width = max(16, triton.next_power_of_2(size))
    facts = (width, BYTES[dtype], BYTES[kv], target(where))
    more = any(word in features for word in ("window", "cap", "alibi"))
    tiles = prefill_tiles(*facts, more) if long else decode_tiles(*facts)
    division = Division(decode_tiles(*facts), prefill_tiles(*facts, more), group, 1, 1)
    queries = division.queries(one)[long]
    packed = min(group, max(1, tiles.most_rows // queries))
    optional = {"lse": "lse", "sinks": "sinks", "slopes": "alibi"}
    form = Form(
        KV_HEADS=8,
        GROUP=group,
        PACKED=packed,
        HEAD_SIZE=size,
        BLOCK_D=width,
        PAGE=page,
        BLOCK_M=max(16, triton.next_power_of_2(queries * packed)),
        BLOCK_N=tiles.keys,
        ONE=one,
        SHORT=not long,
        CACHED=not encoder,
        WINDOW="window" in features,
        CAP="cap" in features,
        SINKS="sinks" in features,
        ALIBI="alibi" in features,
        LSE="lse" in features,
        TREE="tree" in features,
        FUSED="cap" not in features and "alibi" not in features,
        WIDEN=dtype == "fp32",
        DEPENDENT=where == "sm_90",
    )
    return Case(
        attention_kernel,
        {
            **dict.fromkeys(("out", "q"), f"*{dtype}"), "kv": (f"*{kv}",) * 2,
            "step": ("*i32", "*i32", "*i64", "*i64" if "tree" in features else "constexpr"),
            "scratch": ("*fp32", "*fp32", "*i32"), "scores": ("fp32", "fp32", "i32"), **STRIDES,
            **{name: "*fp32" for name, feature in optional.items() if feature in features},
        },
        {
            "FORM": form, **{name: None for name, feature in optional.items() if feature not in features},
            **({} if "tree" in features else {("step", 3): None}),
        },
        where, tiles.warps, tiles.stages, multiples_of_16=tuple(STRIDES),
    )  # fmt: skip


def plan(where: str, cached: bool = True, queries: int = 32, ones: bool = False, tree: bool = False) -> Case:
    """The kernel that divides a step; `ones`: as Triton compiles it for arguments that are 1."""
    pairs = ("unit_queries", "tile_keys", "least_tiles", "most_chunks", "waves")
    known: dict[str | tuple[str, int], int | None] = {(name, at): 1 for name in pairs for at in (0, 1)} if ones else {}
    if ones:
        known["window"] = 1
    if not tree:
        known["step", 3] = None
    return Case(
        plan_kernel,
        {
            "items": "*i32", "step": ("*i32", "*i32", "*i64", "*i64" if tree else "constexpr"),
            **dict.fromkeys((name for name in ("window", *COUNTS) if name not in known), "i32"),
            **dict.fromkeys(pairs, ("constexpr" if ones else "i32",) * 2),
        },
        {
            "CACHED": cached, "ONE": queries == 1, "TREE": tree, "BQ": queries, "ROWS": ROWS, "AT_ONCE": AT_ONCE,
            "FIELDS": FIELDS, **known,
        },
        where,
    )  # fmt: skip


def write(where: str, dtype: str = "bf16", kv: str = "bf16", size: int = 128) -> Case:
    """The kernel that stores keys and values."""
    strides = {"k_strides": ("i32",) * 2, "v_strides": ("i32",) * 2, "cache_strides": ("i32",) * 3}
    return Case(
        write_kernel,
        {"kv": (f"*{dtype}",) * 2, "caches": (f"*{kv}",) * 2, "slot_mapping": "*i64", "num_tokens": "i32", **strides},
        {"HEAD_SIZE": size, "BLOCK_D": triton.next_power_of_2(size), "PAGE": 16, "BLOCK_T": 16,
         "DEPENDENT": where == "sm_90"},
        where, multiples_of_16=tuple(strides),
    )  # fmt: skip


def rotated_write(where: str, dtype: str = "bf16", kv: str = "bf16", norm: bool = True, half: int = 64) -> Case:
    """The kernel that rotates queries and keys of 128 elements and stores keys and values."""
    strides = dict.fromkeys(("q_strides", "k_strides", "v_strides"), ("i32",) * 2)
    norms = (f"*{dtype}",) * 2 if norm else ("constexpr",) * 2
    return Case(
        rotated_write_kernel,
        {"qkv": (f"*{dtype}",) * 3, "caches": (f"*{kv}",) * 2, "slot_mapping": "*i64", "norms": norms,
         "positions": "*i64", "cos_sin": "*fp32", "heads": ("i32", "i32"), **strides, "cache_strides": ("i32",) * 3,
         "q_programs": "i32", "eps": "fp32"},
        {**({} if norm else {("norms", 0): None, ("norms", 1): None}),
         "NORM": norm, "SIZE": 128, "HALF": half, "BLOCK": half, "REST": 128 - 2 * half or 1,
         "BLOCK_D": 128, "PAGE": 16, "HEADS": HEADS,
         "DEPENDENT": where == "sm_90"},
        where, num_warps=2, multiples_of_16=(*strides, "cache_strides"),
    )  # fmt: skip
