"""The native tests once more, on a module that is built with the address and undefined-behaviour sanitizers.

The module is built into a temporary folder, once for each level of processor features (with `scalar` beside it), and
the tests run in a process of their own which loads it. They fail there where a kernel reads or writes what is not its
own, or computes what C++ leaves undefined.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from native_build import PLUGIN, build, need_build_tools, run, tools

HERE = Path(__file__).parent
LIGHT = (
    "test_tape.py", "test_pool.py", "test_platform.py", "test_recorded_memory.py", "test_rows.py", "test_shm.py",
    "test_sum.py", "test_ops.py",
)  # fmt: skip
HEAVY = ("test_attention.py", "test_captured.py", "test_codes.py", "test_quantized.py", "test_sampling.py")
"""Of these only what is of the level, and no long rows: the rest takes minutes."""
FIRST = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "scikit_build" not in type(finder).__module__
                    and "ScikitBuild" not in type(finder).__name__]
"""
"""An editable install finds the package before any folder of the path is looked at; this runs at Python's start."""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon", "neon_bf16"])
def test_native_code_under_sanitizers(native: Any, tmp_path: Path, level: str) -> None:
    need_build_tools()
    if level not in native.levels():
        pytest.skip(f"this processor, or the compiler, has no {level}")
    compiler = shutil.which("c++") or shutil.which("g++")
    runtimes = [_runtime(compiler, name) for name in ("libasan.so", "libstdc++.so.6")] if compiler else [None]
    if None in runtimes:
        pytest.skip("the compiler has no address sanitizer")
    folder = _build(tmp_path, level)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]]),
        "LD_PRELOAD": " ".join(path for path in runtimes if path),
        # Python itself leaks at its end; torch's own libraries are not built with the sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }
    where = "import engine_cpu._native as native; print(native.__file__)"
    loaded = run([sys.executable, "-c", where], environment)
    assert Path(loaded.strip().splitlines()[-1]).is_relative_to(folder), loaded
    _test(LIGHT, "not slow", environment)
    _test(HEAVY, f"{level} and not long_rows", environment)


def _test(names: tuple[str, ...], which: str, environment: dict[str, str]) -> None:
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow and not gpu", "-k", which]
    # without capturing: what a sanitizer says goes to the process's own standard error
    run([sys.executable, "-m", "pytest", *[str(HERE / name) for name in names], *arguments, "-s"], environment)


def _build(tmp_path: Path, level: str) -> Path:
    """The package, with a sanitized module, in a folder for the path."""
    made, folder = tmp_path / "build", tmp_path / "site"
    settings = ["-DCPU_NATIVE=ON", "-DCPU_SANITIZE=address,undefined", f"-DCPU_LEVELS={level}"]
    build(PLUGIN, made, *settings, f"-DPython_EXECUTABLE={sys.executable}")
    shutil.copytree(
        PLUGIN / "src" / "engine_cpu", folder / "engine_cpu", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    run(["cmake", "--install", str(made), "--prefix", str(folder)], tools())
    (folder / "sitecustomize.py").write_text(FIRST)
    return folder


def _runtime(compiler: str, name: str) -> str | None:
    """A library of the compiler's, or None."""
    asked = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = asked.stdout.strip()
    return path if os.path.isabs(path) and Path(path).exists() else None
