"""The kernels compile for GPUs that are not there, without spilling registers: Triton brings the assembler along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

CHILD = """
import importlib, inspect, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = []
for module, name, types, constants, architecture in json.loads(sys.argv[1]):
    kernel = getattr(importlib.import_module(module), name)
    arguments = list(inspect.signature(kernel.fn).parameters)
    kinds = {each: tuple(kind) if isinstance(kind, list) else kind for each, kind in types.items()}
    signature = {each: "constexpr" if each in constants else kinds.get(each, "i32") for each in arguments}
    aligned = {}
    for place, kind in enumerate(signature.values()):
        paths = [((place,), kind)] if isinstance(kind, str) else [((place, at), k) for at, k in enumerate(kind)]
        aligned |= {path: [["tt.divisibility", 16]] for path, each in paths if each[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    found.append([made.metadata.shared, len(made.asm["cubin"]), made.asm["ptx"].count(".local")])
print(json.dumps(found))
"""


def kernels(dtype: str, heads: int, size: int, per_block: int) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    pages = {**dict.fromkeys(("kv", "pages"), (f"*{dtype}",) * 2), "slots": "*i64"}
    pages |= dict.fromkeys(("k_strides", "v_strides", "page_strides"), ("i32",) * 2)
    powers = {"HEADS": heads, "SIZE": size, "HEADS_POWER": 1 << (heads - 1).bit_length()}
    powers["SIZE_POWER"] = 1 << (size - 1).bit_length()
    places = {"PER_BLOCK": per_block, "PLACES": min(32, per_block), "COLUMNS": 128}
    table = {"tables": ("*i32",) * 2, "query_start_loc": "*i32", "seq_lens": "*i32", "strides": ("i32",) * 2}
    sums = {"out": f"*{dtype}", "sums": "*fp32", "sinks": "*fp32", "lse": "*fp32"}
    strides = dict.fromkeys(("out_strides", "sums_strides", "lse_strides"), ("i32",) * 2)
    return [
        ("engine_flashattn.write", "_write", pages, {**powers, **places}),
        ("engine_flashattn.own_pages", "_own_pages", table, {"COLUMNS": 128}),
        ("engine_flashattn.sinks", "_sinks", {**sums, **strides}, {**powers, "WITH_LSE": True}),
    ]


def compile_all(asked: list[tuple[Any, ...]]) -> list[list[int]]:
    """In a process where nothing is interpreted: shared memory, bytes of code, and uses of memory for registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: list[list[int]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def check(asked: list[tuple[Any, ...]]) -> None:
    for (_, name, *_), (shared, code, local) in zip(asked, compile_all(asked), strict=True):
        assert shared <= 48 * 1024 and code > 1000 and local == 0, f"{name}: {shared} bytes shared, {local} spilled"


def test_for_hopper() -> None:
    check([(*kernel, 90) for kernel in kernels("bf16", 8, 128, 16)])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_for_all(architecture: int) -> None:
    forms = [("fp16", 1, 64, 256), ("bf16", 32, 128, 256), ("bf16", 4, 256, 16), ("fp16", 5, 80, 64)]
    check([(*kernel, architecture) for form in forms for kernel in kernels(*form)])
