"""Kernels compiled for GPUs that are not there: what they take of registers and shared memory, and their code.

Triton compiles for any target that it knows, and brings the assembler along. In a process where kernels are
interpreted they cannot be compiled, so this is done in a child process, which is started once and lives as long:

    use = compile_for(_rms_norm_kernel, {"x": "*bf16", "y": "*bf16", "rows": "i32"}, {"BLOCK": 1024}, "sm_90")
    assert use.spilled == 0

The same module is the child's program.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any, NamedTuple

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
"""Backend, architecture and warp size of the GPUs that kernels are compiled for: A100, H100, B200, MI300."""


@dataclass(frozen=True)
class Case:
    """One kernel as one launch would compile it.

    Args:
        kernel: what `triton.jit` made, at a module's top level, of a module that can be imported.
        signature: type of each argument that is no constexpr, in any order: "*bf16", "*i64", "i32", "fp32"; a tuple
            of types for an argument that is a tuple, whose pointers are taken to be at multiples of 16 bytes.
        constexprs: value of each constexpr. Arguments that are 1 or None at the launch are constexprs too;
            ("strides", 1) is the second element of such a tuple, whose type is "constexpr".
        target: one of `TARGETS`.
        multiples_of_16: names of whole numbers that are such multiples, as Triton sees at a launch (strides, sizes); of
            tuples whose whole numbers all are.
        unaligned: names of pointers that are not at multiples of 16 bytes; all others are taken to be.
    """

    kernel: Any
    signature: Mapping[str, str | tuple[str, ...]]
    constexprs: Mapping[str | tuple[str, int], Any] = field(default_factory=dict)
    target: str = "sm_90"
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: Sequence[str] = ()
    unaligned: Sequence[str] = ()


class Compiled(NamedTuple):
    """What one program of a compiled kernel takes.

    Args:
        registers: of each thread (vector registers on ROCm).
        spilled: bytes of each thread's registers that lie in memory instead.
        shared: bytes of shared memory (LDS) of a program.
        assembly: PTX, or the GCN assembly on ROCm.
    """

    registers: int
    spilled: int
    shared: int
    assembly: str


def compile_for(
    kernel: Any,
    signature: Mapping[str, str | tuple[str, ...]],
    constexprs: Mapping[str, Any],
    target: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    **more: Any,
) -> Compiled:
    """Compile one kernel; the arguments are `Case`'s."""
    return compile_all([Case(kernel, signature, constexprs, target, num_warps, num_stages, **more)])[0]


def compile_all(cases: Sequence[Case]) -> list[Compiled]:
    """Compile kernels.

    Raises:
        AssertionError: one did not compile; with the compiler's words.
    """
    sent = [(_name(case.kernel), {**vars(case), "kernel": None}) for case in cases]
    to_child, from_child = _child()
    pickle.dump(sent, to_child)
    to_child.flush()
    found, error = pickle.load(from_child)
    assert not error, error[-6000:]
    return [Compiled(*one) for one in found]


@cache
def _child() -> tuple[IO[bytes], IO[bytes]]:
    """What it reads, and what it writes. It ends when what it reads does: with this process."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, __file__]
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    atexit.register(child.communicate)
    return child.stdin, child.stdout


def _name(kernel: Any) -> tuple[str, str]:
    return kernel.fn.__module__, kernel.fn.__name__


# -- the child -----------------------------------------------------------------------------------------------------
def _compile(name: tuple[str, str], case: Case) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(name[0]), name[1])
    arguments = list(inspect.signature(kernel.fn).parameters)
    elements = {name: value for name, value in case.constexprs.items() if isinstance(name, tuple)}
    given = {*case.signature, *case.constexprs} - elements.keys()
    assert given == set(arguments), f"{name[1]}: {sorted(given.symmetric_difference(arguments))} are not as it takes"
    signature = {each: "constexpr" if each in case.constexprs else case.signature[each] for each in arguments}
    multiples = {arguments.index(each) for each in case.multiples_of_16}
    aligned = [
        path
        for path, kind in _paths(signature.values())
        if kind.startswith("*") or (path[0] in multiples and kind in ("i32", "i64"))
    ]
    unaligned = {(arguments.index(each),) for each in case.unaligned}
    attributes = {path: [["tt.divisibility", 16]] for path in aligned if path not in unaligned}
    constexprs = {name: value for name, value in case.constexprs.items() if name not in elements}
    constexprs |= {(arguments.index(name), at): value for (name, at), value in elements.items()}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes),
        target=GPUTarget(*TARGETS[case.target]),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    shared = int(made.metadata.shared)
    if "cubin" in made.asm:
        return Compiled(*_cubin_use(made.asm["cubin"], made.metadata.name), shared, made.asm["ptx"])
    text = made.asm["amdgcn"]
    return Compiled(
        _number(r"\.vgpr_count: +(\d+)", text), 4 * _number(r"\.vgpr_spill_count: +(\d+)", text), shared, text
    )


def _paths(kinds: Iterable[str | tuple[str, ...]]) -> Iterator[tuple[tuple[int, ...], str]]:
    """The type of each argument, or of each element of one that is a tuple, by its place."""
    for place, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from (((place, *path), each) for path, each in _paths(kind))
        else:
            yield (place,), kind


def _cubin_use(cubin: bytes, name: str) -> tuple[int, int]:
    """Registers, and bytes of spilled ones, of a kernel's machine code, by the tool that Triton brings along."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = text[text.index(f"Function {name}:") :]
    return _number(r"REG:(\d+)", text), max(_number(r"STACK:(\d+)", text), _number(r"LOCAL:(\d+)", text))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in the compiler's output"
    return int(found[1])


def _main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed while compiling is no part of an answer
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found, error = [], ""
        for name, fields in asked:
            case = Case(**fields)
            try:
                found.append(tuple(_compile(name, case)))
            except Exception:
                what = f"{name[1]} for {case.target} with {dict(case.constexprs)} does not compile"
                error = f"{traceback.format_exc()}\n{what}"
                break
        pickle.dump((found, error), answers)
        answers.flush()


if __name__ == "__main__":
    _main()
