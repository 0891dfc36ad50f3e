"""The kernels' self-test (tests/native): for processors that are not at hand, under an emulator; here, sanitized.

The program needs neither Python nor torch: every kernel of every level that is compiled in and that the processor runs,
over odd sizes, against double precision.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from native_build import build_self_test, need_build_tools, run

pytestmark = pytest.mark.slow

CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
AMX = ["avx512_amx"]
PARTS = {"linear", "layers", "attention", "sampling", "states", "experts"}


def passed_parts(said: str) -> dict[str, set[str]]:
    """Levels, and the parts of each that passed with checks in them."""
    found: dict[str, set[str]] = {}
    for level, part in re.findall(r"^(\w+) (\w+): [1-9]\d* checks, 0 wrong", said, re.MULTILINE):
        found.setdefault(level, set()).add(part)
    return found


@pytest.fixture(scope="module")
def emulator() -> str:
    found = next((path for name in EMULATORS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no emulator of ARM is installed ({' or '.join(EMULATORS)})")
    return found


@pytest.fixture(scope="module")
def for_arm(emulator: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for 64-bit ARM."""
    need_build_tools()
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"no compiler for ARM is installed ({CROSS_COMPILER})")
    return build_self_test(
        tmp_path_factory.mktemp("arm"),
        *("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", "-DCMAKE_EXE_LINKER_FLAGS=-static"),
        f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
    )


def test_arm(emulator: str, for_arm: Path) -> None:
    said = run([emulator, "-cpu", "max", str(for_arm)], dict(os.environ))
    assert passed_parts(said) == dict.fromkeys(("scalar", "neon", "neon_bf16"), PARTS), said


def test_a_processor_without_bfloat16_is_not_given_its_instructions(emulator: str, for_arm: Path) -> None:
    """Levels are chosen by what the processor says that it has; `neon` is all that this one runs."""
    old = [emulator, "-cpu", "cortex-a72", str(for_arm)]
    refused = subprocess.run([*old, "neon_bf16"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "neon_bf16" in refused.stdout
    assert passed_parts(run([*old, "neon"], dict(os.environ))) == {"neon": PARTS}


def test_here_under_sanitizers(native: Any, tmp_path: Path) -> None:
    """This processor's best level, and AMX in an emulation: a kernel that reads or writes what is not its own ends the
    program."""
    need_build_tools()
    levels = ["scalar", native.levels()[-1], *AMX[: platform.machine() == "x86_64"]]
    settings = ("-DCPU_SANITIZE=address,undefined", "-DCPU_AMX=emulated", f"-DCPU_LEVELS={';'.join(levels[1:])}")
    program = build_self_test(tmp_path, *settings)
    said = run([str(program)], os.environ | {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"})
    assert passed_parts(said) == dict.fromkeys(levels, PARTS), said


def test_the_instructions_of_amx(native: Any, tmp_path: Path) -> None:
    """As they are shipped: a processor without AMX signals each of them, and the program does it in its place."""
    if "avx512_bf16" not in native.levels():
        pytest.skip("this processor, or the compiler, has no avx512_bf16, on which the level stands")
    need_build_tools()
    said = run([str(build_self_test(tmp_path, "-DCPU_LEVELS=avx512_amx", "-DCPU_AMX=trapped")), *AMX], dict(os.environ))
    assert passed_parts(said) == dict.fromkeys(AMX, PARTS), said
    if "avx512_amx" not in native.levels():
        assert re.search(r"^[1-9]\d{4,} instructions were done in the processor's place", said, re.MULTILINE), said
