"""What the card says, on machines that are not there; and the library's signatures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import humming_double
import pytest
from written import CASES

from engine.interfaces.quantization import KINDS, QuantizationNeed
from engine.plugin import Registry
from engine_cuda.gpu import Gpu, Gpus, TorchBuild
from engine_cuda.machine import Machine
from engine_humming import card, installed
from engine_humming.card import Humming
from engine_humming.installed import Facts
from engine_kit.stored_weights import who_reads

SIGNATURES: dict[str, str] = json.loads((Path(__file__).parent / "signatures.json").read_text())
"""By module and name, as `ast` writes what stands in the wheel's sources without annotations."""


def need(name: str = "awq", **changes: Any) -> QuantizationNeed:
    facts: dict[str, Any] = {"kind": "linear", "dtype": "bfloat16", "stored_dtype": "bfloat16", "device": "cuda"}
    return QuantizationNeed(**facts | {"stored": CASES[name].stored} | changes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the card onto a machine with such a GPU."""

    def put(capability: tuple[int, int] = (9, 0), **more: Any) -> None:
        gpus = Gpus(maker="NVIDIA", visible=(Gpu("NVIDIA", 1 << 30, None, capability),), installed=1, serves=(13, 0))
        there = Machine(gpus, None, TorchBuild("2.11.0+cu130", (13, 0)))
        monkeypatch.setattr("engine_cuda.nvidia.machine", lambda: there)
        facts = {"version": "0.1.20", "compiler": "/usr/local/cuda", "capability": capability}
        monkeypatch.setattr(card, "facts", lambda: Facts(**{**facts, **more}))

    return put


@pytest.mark.parametrize("name", [name for name in CASES if "nf4" not in name])
def test_what_is_served(machine: Any, name: str) -> None:
    machine()
    assert Humming.unsupported(need(name)) == []
    assert any("never run on a GPU" in said for said in Humming.remarks(need(name)))


@pytest.mark.parametrize(
    ("capability", "changes", "more", "word"),
    [
        ((9, 0), {"name": "nf4"}, {}, "stand for numbers of a table"),
        ((9, 0), {"name": "mxfp4", "dtype": "float16"}, {}, "range of MXFP4's scales"),
        (
            (9, 0),
            {"stored": CASES["gptq"].stored | {"group_size": 24}},
            {},
            "24 inputs share a scale, which is no",
        ),
        ((9, 0), {"name": "gptq ordered", "kind": "expert"}, {}, "in an order of their own (g_idx)"),
        ((9, 0), {"name": "w4a16 ordered", "kind": "expert"}, {}, "in an order of their own (g_idx)"),
        ((9, 0), {"dtype": "float32"}, {}, "dtype float32 is not one of bfloat16, float16"),
        ((7, 5), {}, {}, "needs compute capability 8.0 or later, the GPU has 7.5"),
        ((9, 0), {}, {"version": ""}, "humming-kernels is not installed"),
        ((9, 0), {}, {"version": "0.1.9"}, "0.1.9 is too old"),
        ((9, 0), {}, {"missing": ("jinja2",)}, "jinja2, which humming-kernels imports, is not there"),
        ((9, 0), {}, {"compiler": ""}, "neither NVRTC nor nvcc"),
    ],
)
def test_what_is_not(machine: Any, capability: Any, changes: Any, more: Any, word: str) -> None:
    machine(capability, **more)
    (reason,) = Humming.unsupported(need(**changes))
    assert word in reason


@pytest.mark.parametrize(("name", "chosen"), [("gptq", "humming"), ("gptq ordered", "stored-triton")])
def test_who_reads_experts(machine: Any, name: str, chosen: str) -> None:
    """Of those that are installed, where nobody names one: what the library does not take is not found out at load."""
    machine()
    asks = {kind: need(name, kind=kind) for kind in KINDS}
    facts = SimpleNamespace(
        model=SimpleNamespace(config={"quantization_config": CASES[name].stored}),
        implementation=SimpleNamespace(candidate=None),
    )
    assert who_reads(facts, asks, Registry.discover()) == chosen


def test_turing_multiplies_float16(machine: Any) -> None:
    machine((7, 5))
    assert Humming.unsupported(need(dtype="float16")) == []


def test_without_a_gpu() -> None:
    assert "it needs a GPU, not a device of kind 'meta'" in Humming.unsupported(need(device="meta"))


def test_where_kernels_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library looks for toolkits, not along the path; NVRTC's wheel lacks headers that another has."""
    wheels = {"nvidia-cuda-nvrtc": "13.0"}
    monkeypatch.setattr(installed, "TOOLKITS", str(tmp_path / "cuda*"))
    monkeypatch.setattr(installed, "version_of", lambda name: wheels.get(name, ""))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert installed._compiler(13) == ""
    wheels["nvidia-cuda-cccl"] = "13.0"
    assert installed._compiler(13) == "nvidia-cuda-nvrtc" and installed._compiler(12) == ""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert installed._compiler(12) == str(tmp_path / "home")
    (tmp_path / "cuda-13").mkdir()
    assert installed._compiler(12) == str(tmp_path / "cuda-13")


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_double_has_the_librarys_signatures(name: str) -> None:
    member = getattr(humming_double, name.rpartition(".")[2])
    assert str(inspect.signature(member)).replace(" ", "") == f"({SIGNATURES[name]})".replace(" ", "")


@pytest.mark.skipif(importlib.util.find_spec("humming") is None, reason="humming-kernels is not installed")
def test_the_library_has_them() -> None:
    """Read from its sources: they compile nothing then."""
    spec = importlib.util.find_spec("humming")
    assert spec is not None and spec.origin is not None
    for name, signature in SIGNATURES.items():
        module, _, member = name.rpartition(".")
        path = Path(spec.origin).parent / f"{module}.py"
        assert signature == signature_of(ast.parse(path.read_text()), member)


def signature_of(tree: ast.Module, name: str) -> str:
    """A function's parameters and defaults; a dataclass's fields, which are given by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            return ast.unparse(node.args)
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one)]
            values = ["" if one.value is None else f"={ast.unparse(one.value)}" for one in fields]
            said = [ast.unparse(one.target) + value for one, value in zip(fields, values, strict=True)]
            return ", ".join(["*", *said])
    raise AssertionError(f"{name} is not there")
