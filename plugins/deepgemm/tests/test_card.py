"""What the card says, on machines that are not there; and the library's signatures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import deep_gemm_double
import pytest
from written import CASES

from engine.interfaces.quantization import QuantizationNeed
from engine_cuda.gpu import Gpu, Gpus, TorchBuild
from engine_cuda.machine import Machine
from engine_deepgemm import card
from engine_deepgemm.card import DeepGemm
from engine_deepgemm.installed import Facts

SIGNATURES: dict[str, str] = json.loads((Path(__file__).parent / "signatures.json").read_text())
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WHOLE: dict[str, Any] = {"version": "0.2.5", "cuda": (13, 0), "compiler": "/usr/local/cuda/bin/nvcc"}


def need(stored: dict[str, Any] | None = None, **changes: Any) -> QuantizationNeed:
    facts: dict[str, Any] = {"kind": "linear", "dtype": "bfloat16", "stored_dtype": "bfloat16", "device": "cuda"}
    return QuantizationNeed(**facts | changes, stored=BLOCKS if stored is None else stored)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the card onto a machine with such a GPU."""

    def put(capability: tuple[int, int] = (9, 0), **more: Any) -> None:
        gpus = Gpus(maker="NVIDIA", visible=(Gpu("NVIDIA", 1 << 30, None, capability),), installed=1, serves=(13, 0))
        there = Machine(gpus, None, TorchBuild("2.11.0+cu130", (13, 0)))
        monkeypatch.setattr("engine_cuda.nvidia.machine", lambda: there)
        monkeypatch.setattr(card, "facts", lambda: Facts(capability=capability, **{**WHOLE, **more}))

    return put


def test_what_is_served(machine: Any) -> None:
    machine()
    assert DeepGemm.unsupported(need()) == []
    assert DeepGemm.unsupported(need(CASES["fp8 block"].stored)) == []
    assert DeepGemm.rounding("linear", None).row_group == 128
    assert any("never run on a GPU" in said for said in DeepGemm.remarks(need()))
    machine((10, 0))
    assert DeepGemm.unsupported(need(BLOCKS | {"scale_fmt": "ue8m0"})) == []
    assert DeepGemm.priority > 20, "before humming, where it is installed"


@pytest.mark.parametrize(
    ("stored", "changes", "word"),
    [
        (BLOCKS, {"dtype": "float16"}, "gives bfloat16, not float16"),
        ({"quant_method": "fp8"}, {}, "in other groups than blocks"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, {}, "in blocks of 64 x 128"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, {}, "does not read weights stored as 'awq'"),
        (BLOCKS | {"fmt": "e5m2"}, {}, "fp8's fmt is 'e5m2'"),
    ],
)
def test_what_is_not(machine: Any, stored: dict[str, Any], changes: Any, word: str) -> None:
    machine()
    (reason,) = DeepGemm.mismatches(need(stored, **changes)) + DeepGemm.unsupported(need(stored, **changes))
    assert word in reason


@pytest.mark.parametrize(
    ("capability", "more", "word"),
    [
        ((8, 9), {}, "needs compute capability 9.0 or later, the GPU has 8.9"),
        ((12, 0), {}, "it is for compute capability 9.0 and 10.x, the GPU has 12.0"),
        ((10, 0), {}, "scale_fmt is None, not 'ue8m0'"),
        ((9, 0), {"version": ""}, "sgl-deep-gemm is not installed (pip install 'sgl-deep-gemm>=0.2.5')"),
        ((9, 0), {"version": "0.2.4"}, "0.2.4 is too old"),
        ((9, 0), {"cuda": (12, 8)}, "linked with CUDA 13, and this torch is built for CUDA 12.8"),
        ((9, 0), {"compiler": ""}, "nvcc (12.9 or later)"),
    ],
)
def test_what_is_missing(machine: Any, capability: Any, more: Any, word: str) -> None:
    machine(capability, **more)
    (reason,) = DeepGemm.unsupported(need())
    assert word in reason


def test_without_a_gpu() -> None:
    found = DeepGemm.unsupported(need(device="meta"))
    assert "it needs a GPU, not a device of kind 'meta'" in found


def _of(function: Any) -> str:
    return str(inspect.signature(function))


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_double_has_the_librarys_signatures(name: str) -> None:
    assert _of(getattr(deep_gemm_double, name)) == SIGNATURES[name]


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="sgl-deep-gemm is not installed")
def test_the_library_has_them() -> None:
    """Read from its source: it does not load without a GPU's libraries."""
    spec = importlib.util.find_spec("deep_gemm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    found = {node.name: f"({ast.unparse(node.args)})" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    aliases = {
        target.id: node.value.id
        for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    for name, signature in SIGNATURES.items():
        if name == "get_mk_alignment_for_contiguous_layout":  # an operation of its library, of no arguments
            continue
        theirs = found[aliases.get(name, name)]
        assert theirs.replace(" ", "").replace("'", '"') == signature.replace(" ", "").replace("'", '"')
